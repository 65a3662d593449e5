"""Run a design through the simulator and keep what the evaluation asks for."""

from __future__ import annotations

from collections.abc import Mapping

from tilestream import simulator
from tilestream.devices import Device
from tilestream.simulator import StageRun
from tilestream.simulator.workload import SimLaunch, SimStage, Workload
from tilestream.studies.kitsune.outcome import LaunchTime, Outcome, StageTime


def evaluate(
    workload: Workload, device: Device, *, app: str, mode: str, execution: str, phases: Mapping[str, str]
) -> Outcome:
    """Simulate ``workload`` on ``device``.

    Args:
        phases: ``forward`` or ``backward`` by operator name. A launch with operators of both counts as backward.
    """
    run = simulator.run(workload, device)
    launches = tuple(
        LaunchTime(
            launch.name,
            ops := _ops(launch),
            "backward" if any(phases.get(op) == "backward" for op in ops) else "forward",
            timed.start_s,
            timed.end_s - timed.start_s,
            dict(timed.busy),
            tuple(map(_stage, launch.stages, timed.stages)),
            dict(timed.bytes),
        )
        for launch, timed in zip(workload.launches, run.launches, strict=True)
    )
    return Outcome(
        app,
        mode,
        device.name,
        execution,
        run.time_s,
        launches,
        run.bytes["dram"],
        run.bytes["l2"],
        run.events,
        tuple(run.utilisation),
    )


def _ops(launch: SimLaunch) -> tuple[str, ...]:
    return tuple(dict.fromkeys(op for stage in launch.stages for op in stage.ops))


def _stage(stage: SimStage, timed: StageRun) -> StageTime:
    waits = {why: seconds / stage.ctas for why, seconds in timed.waits.items()}
    ended, busy = timed.end_s, timed.busy_s / stage.ctas
    return StageTime(stage.name, str(stage.engine), stage.ops, stage.ctas, stage.tiles, ended, busy, waits)
