"""How a tile lies over the two warpgroups of a stage: by rows, or by columns where it is too wide."""

from __future__ import annotations

from tilestream.devices import Device
from tilestream.ir import Pipeline
from tilestream.passes.fit import narrowest


def choose_placement(p: Pipeline, device: Device) -> Pipeline:
    """``Shard(0)`` where a stage then fits its SM, else ``Shard(1)``; whether that fits is for ``verify`` to say.

    By rows, each warpgroup has a tile of its own and one's epilogue runs beside the other's products.
    """
    return p.with_stages(tuple(narrowest(stage, p, device)[0] for stage in p.stages))
