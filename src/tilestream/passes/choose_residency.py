"""Which weights stay in shared memory."""

from __future__ import annotations

from dataclasses import replace

from tilestream.devices import Device
from tilestream.ir import Pipeline, Residency
from tilestream.passes.fit import isolated, problem


def choose_residency(p: Pipeline, device: Device) -> Pipeline:
    """``RESIDENT`` for every stage whose weights then fit beside its tiles, else ``STREAMED``."""
    stages = []
    for stage in p.stages:
        resident = replace(stage, residency=Residency.RESIDENT)
        fits = any(op.kind == "linear" for op in stage.ops) and not problem(resident, isolated(stage.name, p), device)
        stages.append(resident if fits else replace(stage, residency=Residency.STREAMED))
    return p.with_stages(tuple(stages))
