"""Whether a stage can run on one SM of a device, as the schedule and the verifier see it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from tilestream.devices import Device
from tilestream.errors import VerifyError
from tilestream.ir.launches import launches_at_dram
from tilestream.ir.pipeline import Pipeline, Residency, Shard, Stage, Transport
from tilestream.ir.verify import tiles_fit_registers
from tilestream.kernels.fits import stages_fit_sm


def isolated(p: Pipeline) -> dict[str, Pipeline]:
    """Each stage by itself: what it takes is loaded from tensors, what it hands on is stored to tensors."""
    # Stages that share no queue share a launch: take them apart too.
    return {s.name: _alone(launch, s) for launch in launches_at_dram(_spilled(p)) for s in launch.stages}


def isolated_stage(p: Pipeline, name: str) -> Pipeline:
    """The stage of that name by itself, as ``isolated`` has it."""
    (launch,) = launches_at_dram(_spilled(p), of=name)
    return _alone(launch, launch.stage(name))


def _spilled(p: Pipeline) -> Pipeline:
    """``p`` with all its queues in DRAM."""
    if all(q.transport is Transport.DRAM and q.depth == 0 for q in p.queues):
        return p
    return replace(p, queues=tuple(replace(q, transport=Transport.DRAM, depth=0) for q in p.queues))


def _alone(launch: Pipeline, stage: Stage) -> Pipeline:
    return launch if launch.stages == (stage,) else launch.with_stages((stage,))


# Recipes ask again for stages that others cut as well.
@lru_cache(maxsize=4096)
def problem(alone: Pipeline, device: Device, placement: Shard, residency: Residency) -> str:
    """Why the stage of ``alone`` (see ``isolated``) does not fit one SM in this way; empty if it does."""
    pipeline = alone.with_stages((alone.stages[0].with_(placement=placement, residency=residency),))
    try:
        tiles_fit_registers(pipeline)
        stages_fit_sm(pipeline, device)
    except VerifyError as error:
        return error.cause
    return ""


def narrowest(alone: Pipeline, device: Device, dims: tuple[int, ...] = (0, 1)) -> tuple[Shard, str]:
    """The first of the placements under which the stage fits, weights streamed; the last and why not, if none does."""
    placement, reason = Shard(dims[-1]), ""
    for dim in dims:
        placement = Shard(dim)
        reason = problem(alone, device, placement, Residency.STREAMED)
        if not reason:
            break
    return placement, reason
