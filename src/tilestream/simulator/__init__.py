"""Discrete events over a Pipeline on a Device: time, what every worker did, bytes and utilisation.

The cost model gives the length of a step; the simulation adds what a formula cannot: filling and draining, waiting for
tiles and for room, shared bandwidth. Deterministic.
"""

from __future__ import annotations

from dataclasses import replace

from tilestream.cost import predict, traffic
from tilestream.devices import Device
from tilestream.ir import TILE_ROWS, Pipeline
from tilestream.simulator.engine import Launch
from tilestream.simulator.run import LaunchRun, Run, StageRun, run
from tilestream.simulator.spans import Simulation, Span
from tilestream.work import phases, tiles_of

__all__ = ["LaunchRun", "Run", "Simulation", "Span", "StageRun", "run", "simulate"]

MOST_STEPS = 150_000  # steps of all stages that are simulated one by one: a few seconds


def simulate(pipeline: Pipeline, rows: int, device: Device, most_steps: int = MOST_STEPS) -> Simulation:
    """Run ``pipeline`` over ``rows`` rows on ``device``, event by event.

    Launches of strategy ``bulk`` stand for library kernels: each takes as long as the cost model says.
    More than ``most_steps`` steps are not simulated one by one: the rest follows from the rate of the second half.

    Raises:
        PipelineDeadlock: the queues hold too little for the pipeline to finish.
    """
    if rows <= 0:
        return Simulation(pipeline.name, device.name, 0, 0.0, (), (), traffic(pipeline, 0).levels(), {})
    steps = sum(tiles_of(rows) / s.tiles_per_step for s in pipeline.stages)
    if steps > most_steps:
        return _extrapolated(pipeline, rows, device, most_steps, int(rows * most_steps / steps))
    return _exact(pipeline, rows, device)


def _extrapolated(pipeline: Pipeline, rows: int, device: Device, most_steps: int, part: int) -> Simulation:
    """Simulate ``part`` rows and half of them, and go on at the rate between the two."""
    part -= part % (2 * TILE_ROWS)
    whole, half = _exact(pipeline, part, device), _exact(pipeline, part // 2, device)
    scale = (rows - part) / (part - part // 2)
    launches = tuple(a + (a - b) * scale for a, b in zip(whole.launches_us, half.launches_us, strict=True))
    time_us = sum(launches)
    note = f"{part} of {rows} rows simulated step by step (at most {most_steps} steps), the rest at their steady rate"
    levels = traffic(pipeline, rows).levels()
    return replace(
        whole,
        rows=rows,
        time_us=time_us,
        launches_us=launches,
        bytes=levels,
        exact=False,
        simulated_rows=part,
        note=note,
    )


def _exact(pipeline: Pipeline, rows: int, device: Device) -> Simulation:
    predicted = predict(pipeline, rows, device)
    start_us = 0.0
    launches_us: list[float] = []
    spans: list[Span] = []
    utilisation: dict[str, float] = {}
    dram_s = l2_s = flops_s = 0.0
    for number, (launch, cost) in enumerate(zip(pipeline.launches(), predicted.launches, strict=True)):
        run = Launch(launch, rows, device, {c.stage: c for c in cost.stages})
        dram_s, l2_s = dram_s + run.dram.busy_s, l2_s + run.l2.busy_s
        scale = cost.total_s / run.seconds if pipeline.strategy == "bulk" else 1.0
        spans += _spans(run, number, start_us, 1e6 * scale)
        for index, stage in enumerate(launch.stages):
            work = sum(r.end - r.start for r in run.records if r.worker.stage == index)
            utilisation[stage.name] = work / (stage.replicas * run.seconds)
            flops_s += sum(
                tiles_of(rows) * p.flops / device.tensor_flops[p.dtype] for p in phases(stage, launch) if p.flops
            )
        launches_us.append(run.seconds * 1e6 * scale)
        start_us += launches_us[-1]
    seconds = start_us * 1e-6
    utilisation |= {"tensor": flops_s / seconds, "l2": l2_s / seconds, "dram": dram_s / seconds}
    return Simulation(
        pipeline.name,
        device.name,
        rows,
        start_us,
        tuple(launches_us),
        tuple(sorted(spans, key=lambda s: (s.start_us, s.worker))),
        traffic(pipeline, rows).levels(),
        utilisation,
        simulated_rows=rows,
    )


def _spans(run: Launch, number: int, offset_us: float, us: float) -> list[Span]:
    per_step = [s.tiles_per_step for s in run.stages]
    return [
        Span(
            number,
            run.stages[r.worker.stage].name,
            r.worker.replica,
            r.worker.index,
            r.step * per_step[r.worker.stage],
            min(per_step[r.worker.stage], run.tiles - r.step * per_step[r.worker.stage]),
            offset_us + r.start * us,
            offset_us + r.end * us,
            r.waited * us,
            r.waited_for,
        )
        for r in run.records
    ]
