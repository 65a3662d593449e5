"""Whether a stage can run on one SM of a device, as the schedule and the verifier see it."""

from __future__ import annotations

from dataclasses import replace

from tilestream.devices import Device
from tilestream.errors import VerifyError
from tilestream.ir import Pipeline, Residency, Shard, Stage, Transport
from tilestream.verify import stages_fit_sm, tiles_fit_registers


def isolated(stage: str, p: Pipeline) -> Pipeline:
    """The stage alone: what it takes is loaded from tensors, what it hands on is stored to tensors."""
    spilled = replace(p, queues=tuple(replace(q, transport=Transport.DRAM, depth=0) for q in p.queues))
    launch = next(launch for launch in spilled.launches() if any(s.name == stage for s in launch.stages))
    return launch.with_stages((launch.stage(stage),))  # stages that share no queue share a launch


def problem(stage: Stage, alone: Pipeline, device: Device) -> str:
    """Why ``stage``, with its placement and residency, does not fit one SM; empty if it does.

    ``alone`` is ``isolated`` of it: there, only placement and residency are taken from ``stage``.
    """
    changed = replace(alone.stages[0], placement=stage.placement, residency=stage.residency)
    pipeline = alone.with_stages((changed,))
    try:
        tiles_fit_registers(pipeline)
        stages_fit_sm(pipeline, device)
    except VerifyError as error:
        return error.cause
    return ""


def narrowest(stage: Stage, p: Pipeline, device: Device, dims: tuple[int, ...] = (0, 1)) -> tuple[Stage, str]:
    """The stage, weights streamed, under the first of the placements that fits; and why none does.

    If none does, the stage has the last of them.
    """
    alone = isolated(stage.name, p)
    candidate, reason = stage, ""
    for dim in dims:
        candidate = replace(stage, placement=Shard(dim), residency=Residency.STREAMED)
        reason = problem(candidate, alone, device)
        if not reason:
            break
    return candidate, reason
