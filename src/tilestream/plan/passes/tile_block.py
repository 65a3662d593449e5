"""A feed-forward block or one layer on many rows: products as tiles, dealt over clusters of two CTAs."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from tilestream.devices import Device
from tilestream.errors import VerifyError
from tilestream.ir.axes import Level, Loop, Spread
from tilestream.ir.once import hand_on
from tilestream.ir.pipeline import Pipeline, Stage
from tilestream.kernels.product.finder import only_block
from tilestream.kernels.product.tiled_block.model import CLUSTER, COLUMNS, TiledBlock, find_layers, loop_tiles
from tilestream.kernels.product.written import written_out


def tile_block(program: Pipeline, device: Device) -> Pipeline:
    """One stage whose grid divides rows, and columns of the hidden layer and of the result.

    A cluster's columns of the hidden layer are made by 256 at a time (128 of each product of a gated block); all are
    gathered through the L2 before the second product.

    Raises:
        VerifyError: the program is neither, or ``device`` has too few SMs.
    """
    written = written_out(program)
    if len(written.stages) != 1:
        raise VerifyError(f"pipeline {program.name!r} has {len(written.stages)} stages", "tile a block in one")
    stage = written.stages[0]
    block = find_layers(stage, written)
    blocks = gcd(*TiledBlock(block, 1).result_blocks)
    room = device.resident_clusters(CLUSTER) if device.largest_cluster >= CLUSTER else 0
    if room < blocks:
        width = COLUMNS // block.products
        raise VerifyError(
            f"{blocks} blocks of {width} columns want as many clusters of {CLUSTER}, {device.name} holds {room}",
            "leave the block to row streams",
        )
    columns = _most_busy(room, blocks) if block.one_layer else blocks
    mesh = (
        Spread(Level.GRID, room // columns, (block.rows,)),
        Spread(Level.GRID, columns, block.shared_by_columns),
        Spread(Level.CLUSTER, CLUSTER, (block.rows,)),
    )
    loops = tuple(Loop(axis, tile) for axis, tile in loop_tiles(block).items())
    made = replace(written, stages=(Stage("tiles", stage.ops, loops, mesh),), strategy="tiled block")
    return hand_on(only_block, written, made)


def _most_busy(room: int, blocks: int) -> int:
    """The divisor of ``blocks`` of which a multiple leaves the fewest of ``room`` clusters idle; the largest such."""
    return max((n for n in range(1, blocks + 1) if blocks % n == 0), key=lambda n: (room // n * n, n))
