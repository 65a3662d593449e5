"""What one replica of a stage takes from its SM, whatever kernel it becomes."""

from __future__ import annotations

from dataclasses import dataclass

from tilestream.ir.pipeline import Pipeline, Stage
from tilestream.ir.plain import plain
from tilestream.kernels.gradients import backward, stationary
from tilestream.kernels.product import shared_tile
from tilestream.kernels.product.tiled_block import model as tiled_block
from tilestream.kernels.shape import is_shared_tile, is_tiled_block
from tilestream.kernels.stream.build import build
from tilestream.kernels.stream.layout import SHARED_LIMIT, lay_out


@dataclass(frozen=True)
class Footprint:
    """What one replica of a stage takes from its SM.

    ``shared_bytes`` is the sum of ``parts`` (name, bytes); ``registers`` is the estimate for one
    thread of a consumer warpgroup.
    """

    shared_bytes: int
    registers: int
    parts: tuple[tuple[str, int], ...]


def footprint(stage: Stage, pipeline: Pipeline, limit: int = SHARED_LIMIT) -> Footprint:
    """Registers and shared memory of one replica; rings fill up to ``limit`` bytes where they can.

    Raises:
        VerifyError: as ``build``. Whether it fits a device is for the caller to compare.
    """
    if is_shared_tile(pipeline):
        written = plain(pipeline)
        shared = shared_tile.build(written.stages[0], written, limit)
        return Footprint(shared.shared_bytes, shared.registers, shared.parts)
    if is_tiled_block(pipeline):
        written = plain(pipeline)
        tiled = tiled_block.build(written.stages[0], written, limit)
        return Footprint(tiled.shared_bytes, tiled.registers, tiled.parts)
    if stationary.is_stationary(pipeline):
        held = next(s for s in stationary.builds(pipeline) if s.stage.name == stage.name)
        return Footprint(held.shared_bytes, held.registers, held.footprint)
    if backward.is_backward(pipeline):
        chain = backward.build(pipeline)
        return Footprint(chain.shared_bytes, chain.registers, chain.footprint)
    schedule = build(stage, pipeline)
    layout = lay_out(schedule, limit)
    return Footprint(layout.total, schedule.registers, layout.parts)
