"""Which weights stay in shared memory."""

from __future__ import annotations

from dataclasses import replace

from tilestream.devices import Device
from tilestream.ir import Pipeline, Residency
from tilestream.passes.fit import isolated, problem


def choose_residency(p: Pipeline, device: Device) -> Pipeline:
    """``RESIDENT`` for every stage whose weights then fit beside its tiles, else ``STREAMED``."""
    alone = isolated(p)
    stages = []
    for stage in p.stages:
        has_weights = any(op.kind == "linear" for op in stage.ops)
        fits = has_weights and not problem(alone[stage.name], device, stage.placement, Residency.RESIDENT)
        stages.append(replace(stage, residency=Residency.RESIDENT if fits else Residency.STREAMED))
    return p.with_stages(tuple(stages))
