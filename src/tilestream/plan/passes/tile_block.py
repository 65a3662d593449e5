"""A feed-forward block on many rows: both products as tiles, dealt over clusters of two CTAs."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from tilestream.devices import Device
from tilestream.errors import VerifyError
from tilestream.ir.axes import Level, Loop, Spread
from tilestream.ir.pipeline import Pipeline, Stage
from tilestream.schedule.shared_tile import find_two_layers, written_out
from tilestream.schedule.tiled_block import CLUSTER, COLUMNS, ROWS


def tile_block(program: Pipeline, device: Device) -> Pipeline:
    """One stage whose grid divides rows, and columns of the hidden layer and of the result.

    A cluster's columns of the hidden layer are made by 256 at a time (128 of each product of a gated block); all are
    gathered through the L2 before the second product.

    Raises:
        VerifyError: the program is no feed-forward block, or ``device`` has too few SMs.
    """
    written = written_out(program)
    if len(written.stages) != 1:
        raise VerifyError(f"pipeline {program.name!r} has {len(written.stages)} stages", "tile a block in one")
    stage = written.stages[0]
    block = find_two_layers(stage, written)
    columns = ceil(block.sizes[2] / COLUMNS)
    room = device.resident_clusters(CLUSTER) if device.largest_cluster >= CLUSTER else 0
    if room < columns:
        raise VerifyError(
            f"{columns} blocks of {COLUMNS} columns want as many clusters of {CLUSTER}, {device.name} holds {room}",
            "leave the block to row streams",
        )
    mesh = (
        Spread(Level.GRID, room // columns, (block.rows,)),
        Spread(Level.GRID, columns, (block.last.out, block.hid)),
        Spread(Level.CLUSTER, CLUSTER, (block.rows,)),
    )
    loops = (Loop(block.rows, ROWS), Loop(block.hid, COLUMNS // len(block.firsts)))
    return replace(written, stages=(Stage("tiles", stage.ops, loops, mesh),), strategy="tiled block")
