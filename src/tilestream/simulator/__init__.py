"""Discrete events on a device, present or imagined: what runs is a ``Workload``.

``run`` simulates any workload; ``simulate`` a pipeline of the IR, which becomes one. The cost model gives the length
of a step; the simulation adds what a formula cannot: filling and draining, waiting for tiles and for room, shared
bandwidth, CTAs that share an SM. Kernels whose CTAs wait for each other in other ways have a formula
(``kernels.kernel.Kernel.cost``), and ``simulate`` gives its time. Deterministic.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from tilestream.devices import Device
from tilestream.errors import InputError, PipelineDeadlock, TilestreamError, WorkloadError
from tilestream.ir.axes import ROWS
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.lengths import Lengths, Sizes, outermost, sizes_of
from tilestream.ir.pipeline import Pipeline, Transport
from tilestream.ir.plain import by_rows
from tilestream.ir.sizes import tiles_of
from tilestream.ir.traffic import levels_of
from tilestream.kernels.costs import ClosedForm
from tilestream.kernels.families import kernel_of
from tilestream.kernels.kernel import Kernel
from tilestream.kernels.segments.kernel import SegmentsKernel
from tilestream.simulator.from_axes import mesh_workload
from tilestream.simulator.from_pipeline import launches_of
from tilestream.simulator.launch import MOST_TILES, LaunchResult
from tilestream.simulator.launch import simulate as simulate_launch
from tilestream.simulator.ragged import segments_launch
from tilestream.simulator.run import LaunchRun, Run, StageRun, run
from tilestream.simulator.tables import moved
from tilestream.simulator.workload import SimLaunch


class Span(NamedTuple):
    """One worker busy with one step: ``tiles`` tiles from number ``tile`` on.

    ``start_us`` to ``end_us`` is the work, from the start of the simulation. ``waited_us`` is how long the worker stood
    still before it, and ``waited_for`` what most of that was for: the name of a tile (its queue was empty), "dram",
    "l2", "weights" or "launch". ``held_us`` is how long it then stood still with its result, and ``held_for`` why: the
    name of a tile and "full" (no room in its queue), or "room" (the word that there is some was on its way).
    ``slow_us`` is, of the work itself, how long it stood still for rows that were still coming from ``slow_for``:
    "dram" or "l2". Names are empty where it did not wait.
    """

    launch: int
    stage: str
    replica: int
    worker: int
    tile: int
    tiles: int
    start_us: float
    end_us: float
    waited_us: float = 0.0
    waited_for: str = ""
    held_us: float = 0.0
    held_for: str = ""
    slow_us: float = 0.0
    slow_for: str = ""


@dataclass(frozen=True)
class Simulation:
    """Outcome of a simulated run: time, what every worker did, bytes, utilisation.

    ``launches_us`` are the launches' own times, which add up to ``time_us``. ``spans`` are in order of their start.
    ``bytes`` are those of each level (``traffic.Traffic.levels``). ``utilisation`` maps every stage to the working
    share of its SMs while its launch ran, and "tensor", "l2" and "dram" to the share of the device's rate over the
    whole time. ``exact`` is False where only the first rows were simulated and the rest follows from the steady rate;
    ``note`` says so, and how many. ``waits_us`` are, of every stage, the microseconds that its CTAs waited for each
    of ``core.REASONS``, all CTAs together, in the rows that were simulated.
    """

    pipeline: str
    device: str
    rows: int
    time_us: float
    launches_us: tuple[float, ...]
    spans: tuple[Span, ...]
    bytes: dict[str, int]
    utilisation: dict[str, float]
    exact: bool = True
    note: str = ""
    waits_us: dict[str, dict[str, float]] = field(default_factory=dict)


__all__ = ["LaunchRun", "Run", "Simulation", "Span", "StageRun", "run", "simulate"]

MOST_STEPS = 150_000  # steps of all stages that are simulated one by one: about a second


def simulate(
    pipeline: Pipeline,
    rows: int | Mapping[str, int],
    device: Device,
    most_steps: int = MOST_STEPS,
    spans: bool = True,
    lengths: Mapping[str, Lengths] | None = None,
) -> Simulation:
    """Run ``pipeline`` over ``rows`` rows on ``device``, event by event.

    Launches of strategy ``bulk`` are the kernels of libraries that they stand for. The time of a pipeline that has a
    closed form is that form's, with no steps, and the note says so.
    More than ``most_steps`` steps are not simulated one by one: the rest follows from the rate of the second half.
    Without ``spans``, which take longer than the events themselves, all else is the same.

    Args:
        rows: or the size of each axis that is read at the call, by name. Of a ragged pipeline, how many positions the
            axis around has, and of ragged axes how many in all.
        lengths: of ragged axes by name; equal ones where none are given, as the note says.

    Raises:
        DeviceError: a cluster is larger than the device's.
        InputError: the size of an axis is not known.
        PipelineDeadlock: the queues hold too little for the pipeline to finish.
        WorkloadError: the stages of a launch are not all resident at once on the device.
    """
    given = rows if isinstance(rows, Mapping) else dict.fromkeys(outermost(pipeline) or [ROWS.name], rows)
    size = sizes_of(pipeline, given, lengths)
    if not by_rows(pipeline):
        return _any_axes(pipeline, size, device, spans)
    if ROWS.name not in size:
        raise InputError("the size of rows is read at the call", "say what it is: {'rows': 65536}")
    rows = size[ROWS.name]
    if rows <= 0:
        return Simulation(pipeline.name, device.name, 0, 0.0, (), (), levels_of(pipeline, size), {})
    steps = sum(tiles_of(rows, s) / s.tiles_per_step for s in pipeline.stages)
    if steps > most_steps:
        return _extrapolated(pipeline, rows, device, most_steps, int(rows * most_steps / steps), spans)
    return _exact(pipeline, rows, device, spans)


def _any_axes(pipeline: Pipeline, size: Sizes, device: Device, spans: bool) -> Simulation:
    """A pipeline that is not written in ops of rows: by its kernel's closed form, or its counts dealt to CTAs by the
    lengths of ragged axes. While there is no kernel of it, its stages' tiles are shares of their work; with no numbers,
    unless an axis is ragged."""
    ragged = outermost(pipeline)
    unknown = [axis for axis in ragged if axis not in size]
    if unknown:
        raise InputError(
            f"the size of {', '.join(unknown)} is read at the call", f"say what it is: {{{unknown[0]!r}: 10000}}"
        )
    rows = max(size.get(axis, 0) for axis in ragged or [ROWS.name])
    note = "; ".join(f"{axis}: {each.told()}" for axis, each in size.lengths.items())
    if ragged and rows <= 0:
        return Simulation(pipeline.name, device.name, 0, 0.0, (), (), levels_of(pipeline, size), {}, note=note)
    kernel = kernel_of(pipeline)
    if isinstance(kernel, SegmentsKernel) and not kernel.refusal:
        launches = (segments_launch(kernel, size, device),)
    else:
        launches = mesh_workload(pipeline, size, device).launches
        if kernel.closed_form is not None and not kernel.refusal:
            return _by_form(kernel, kernel.closed_form, launches, size, device)
    levels = levels_of(pipeline, size)
    few = sum(stage.tiles for launch in launches for stage in launch.stages) <= MOST_TILES
    traced = [pipeline] * len(launches) if ragged and spans and few else ()
    made = _ran(pipeline, rows, device, [[k] for k in launches], levels, traced, most=MOST_TILES)
    return replace(made, note=note)


def _by_form(
    kernel: Kernel, form: ClosedForm, launches: Sequence[SimLaunch], size: Sizes, device: Device
) -> Simulation:
    """The time of a closed form, and what ``launches`` move and multiply in it; nothing is known of single steps."""
    pipeline, rows = kernel.launch, size[ROWS.name]
    seconds = kernel.cost(rows, device).seconds if rows > 0 else 0.0
    amounts = [moved(launch, device) for launch in launches]
    stages = (stage for launch in launches for stage in launch.stages)
    dtype = next((s.work.dtype for s in stages if s.work.tensor_flops), "bf16")
    busy_s = {
        "tensor": sum(a.flops for a in amounts) / device.tensor_flops[dtype],
        "dram": sum(a.dram for a in amounts) / device.dram_bytes_per_s,
        "l2": sum(a.l2 for a in amounts) / device.l2_shared_bytes_per_s,
    }
    return Simulation(
        pipeline.name,
        device.name,
        rows,
        seconds * 1e6,
        (seconds * 1e6,),
        (),
        levels_of(pipeline, size),
        {name: min(1.0, busy / seconds) for name, busy in busy_s.items()} if seconds else {},
        note=f"by the closed form of {form.name}, as a whole",
    )


def _told(failure: WorkloadError) -> TilestreamError:
    """What an author of pipelines calls it."""
    if "wait for each other" in failure.cause:
        return PipelineDeadlock(failure.cause, failure.remedy)
    return failure


def _extrapolated(pipeline: Pipeline, rows: int, device: Device, most_steps: int, part: int, spans: bool) -> Simulation:
    """Simulate about ``part`` rows and half of them, in whole rounds of the stages, and go on at the rate between."""
    unit = 2 * pipeline.tile_rows * max(s.replicas * s.tiles_per_step for s in pipeline.stages)
    part -= part % (unit if part > unit else 2 * pipeline.tile_rows)
    whole, half = _exact(pipeline, part, device, spans), _exact(pipeline, part // 2, device, spans=False)
    scale = (rows - part) / (part - part // 2)
    launches = tuple(a + (a - b) * scale for a, b in zip(whole.launches_us, half.launches_us, strict=True))
    time_us = sum(launches)
    note = f"{part} of {rows} rows simulated step by step (at most {most_steps} steps), the rest at their steady rate"
    levels = levels_of(pipeline, {ROWS.name: rows})
    return replace(whole, rows=rows, time_us=time_us, launches_us=launches, bytes=levels, exact=False, note=note)


def _exact(pipeline: Pipeline, rows: int, device: Device, spans: bool) -> Simulation:
    traced = cut_at_dram(pipeline) if spans else ()
    levels = levels_of(pipeline, {ROWS.name: rows})
    return _ran(pipeline, rows, device, launches_of(pipeline, rows, device), levels, traced)


def _ran(
    pipeline: Pipeline,
    rows: int,
    device: Device,
    launches: Sequence[Sequence[SimLaunch]],
    levels: dict[str, int],
    traced: Sequence[Pipeline] = (),
    most: int = sys.maxsize,
) -> Simulation:
    """The kernels of each launch through the event loop.

    Args:
        levels: bytes of each level. traced: what each launch is, where spans are wanted.
        most: tiles of a kernel, beyond which some are joined.
    """
    start_us, exact = 0.0, True
    launches_us: list[float] = []
    made: list[Span] = []
    utilisation: dict[str, float] = {}
    waits_us: dict[str, dict[str, float]] = {}
    busy_s = {"tensor": 0.0, "l2": 0.0, "dram": 0.0}
    for number, kernels in enumerate(launches):
        begun_us = start_us
        for kernel in kernels:
            try:
                found = simulate_launch(kernel, device, device.arbiters, most=most, trace=bool(traced))
            except WorkloadError as failure:
                raise _told(failure) from failure
            for name in busy_s:
                busy_s[name] += found.busy_s[name]
            exact = exact and found.coarse == 1
            if traced:
                made += _spans(found, traced[number], rows, number, start_us)
            for stage, busy, waits in zip(found.launch.stages, found.stage_busy_s, found.waits, strict=True):
                utilisation[stage.name] = busy / (stage.ctas * found.seconds)
                waits_us[stage.name] = {why: seconds * 1e6 for why, seconds in waits.items()}
            start_us += found.seconds * 1e6
        launches_us.append(start_us - begun_us)
    utilisation |= {name: busy / (start_us * 1e-6) for name, busy in busy_s.items()}
    return Simulation(
        pipeline.name,
        device.name,
        rows,
        start_us,
        tuple(launches_us),
        tuple(sorted(made, key=lambda s: (s.start_us, s.worker))),
        levels,
        utilisation,
        exact=exact,
        waits_us=waits_us,
    )


def _spans(found: LaunchResult, launch: Pipeline, rows: int, number: int, offset_us: float) -> list[Span]:
    """One span a step, from the event loop's trace; of a library's kernel, one a tile of its own."""
    from tilestream.simulator.core import REASONS

    reasons: list[str] = list(REASONS)
    queues = [q for q in launch.queues if q.transport is Transport.L2]
    reasons += [q.tile for q in queues for _ in q.consumers] + [f"{q.tile} full" for q in queues]
    reasons.append("")  # number -1: it did not wait
    own = launch.stages if by_rows(launch) else ()
    steps = {stage.name: (stage.tiles_per_step, tiles_of(rows, stage)) for stage in own}
    made: list[Span] = []
    row, first_cta = 0, 0
    starts_us, ends_us, *waits_us = (found.times * 1e6).T.tolist()
    ctas = found.traced[:, 0].tolist()
    why = [np.where(found.times[:, n + 1] > 0, found.traced[:, n], -1).tolist() for n in (1, 2, 3)]
    for simulated in found.launch.stages:
        per_step, tiles = steps.get(simulated.name, (1, simulated.tiles))
        for step, at in enumerate(range(row, row + simulated.tiles)):
            cta, tile = ctas[at], step * per_step
            made.append(
                Span(
                    number,
                    simulated.name,
                    cta - first_cta,
                    cta,
                    tile,
                    min(per_step, tiles - tile),
                    offset_us + starts_us[at],
                    offset_us + ends_us[at],
                    *(x for us, reason in zip(waits_us, why, strict=True) for x in (us[at], reasons[reason[at]])),
                )
            )
        row += simulated.tiles
        first_cta += simulated.ctas
    return made
