"""Which weights stay in shared memory."""

from __future__ import annotations

from tilestream.devices import Device
from tilestream.ir.pipeline import Pipeline, Residency
from tilestream.plan.passes.fit import isolated, problem


def choose_residency(p: Pipeline, device: Device, resident: bool = True) -> Pipeline:
    """``RESIDENT`` for every stage whose weights then fit beside its tiles, else ``STREAMED``.

    Resident weights leave less room for inputs on their way: where DRAM is the limit, streaming them from the L2 for
    every tile may be faster (MeshGraphNets' block: 99 against 127 us). ``resident=False`` streams all.
    """
    alone = isolated(p)
    stages = []
    for stage in p.stages:
        has_weights = any(op.kind == "linear" for op in stage.ops)
        fits = resident and has_weights and not problem(alone[stage.name], device, stage.placement, Residency.RESIDENT)
        stages.append(stage.with_(residency=Residency.RESIDENT if fits else Residency.STREAMED))
    return p.with_stages(tuple(stages))
