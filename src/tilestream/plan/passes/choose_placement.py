"""How a tile lies over the two warpgroups of a stage: by rows, or by columns where it is too wide."""

from __future__ import annotations

from tilestream.devices import Device
from tilestream.ir.pipeline import Pipeline
from tilestream.plan.passes.fit import isolated, narrowest


def choose_placement(p: Pipeline, device: Device, dims: tuple[int, ...] = (0, 1)) -> Pipeline:
    """The first of ``Shard(dims)`` with which a stage fits its SM; whether the last one does is for ``verify`` to say.

    By rows (0), each warpgroup has a tile of its own and one's epilogue runs beside the other's products. By
    columns (1), a tile is done in half the time and twice as many SMs have work: better for few rows.
    """
    alone = isolated(p)
    return p.with_stages(tuple(s.with_(placement=narrowest(alone[s.name], device, dims)[0]) for s in p.stages))
