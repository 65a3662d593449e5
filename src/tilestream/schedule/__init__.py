"""How one stage runs on one CTA: its steps, what stays in registers, and its shared memory.

``build`` turns a Stage into a Schedule; ``footprint`` says what that costs. The verifier, the
planner and the CUDA emitter read schedules; the reference machine does not need them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tilestream.ir.pipeline import Pipeline, Stage
from tilestream.ir.plain import plain
from tilestream.schedule import backward, shared_tile, stationary, tiled_block
from tilestream.schedule.layout import SHARED_LIMIT, Layout, lay_out
from tilestream.schedule.model import Schedule
from tilestream.schedule.partition import partition
from tilestream.schedule.shape import is_shared_tile, is_tiled_block

__all__ = ["Footprint", "Layout", "Schedule", "build", "footprint"]


@dataclass(frozen=True)
class Footprint:
    """What one replica of a stage takes from its SM.

    ``shared_bytes`` is the sum of ``parts`` (name, bytes); ``registers`` is the estimate for one
    thread of a consumer warpgroup.
    """

    shared_bytes: int
    registers: int
    parts: tuple[tuple[str, int], ...]


@lru_cache(maxsize=4096)
def build(stage: Stage, pipeline: Pipeline) -> Schedule:
    """Order a stage's ops into steps and give every tile a place.

    Raises:
        VerifyError: if a tile is wider than the placement allows or products have different dtypes; the message names
            the user's line.
    """
    return partition(stage, pipeline)


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
