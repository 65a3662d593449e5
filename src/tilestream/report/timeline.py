"""Simulated and recorded runs as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tilestream import files
from tilestream.cuda.recording import CONSUMERS, DETAIL, WAIT, Recording, Slice
from tilestream.kernels.stream.emit import ROLES
from tilestream.plan.whole import WholePlan
from tilestream.run.record_step import StepRecording
from tilestream.simulator import Simulation, Span
from tilestream.simulator.steps import StepRun

PROCESSES = 3
"""Of one title: the simulated run, the recorded one, and what the warps of some SMs did."""


def trace(
    runs: Mapping[str, Simulation],
    recordings: Mapping[str, Recording] | None = None,
    plan: WholePlan | None = None,
    steps: Mapping[str, StepRecording] | None = None,
) -> dict[str, Any]:
    """One process a run, one thread an SM, one slice a step; times in microseconds.

    A wait stands where it was, before a step or behind it, and names what was waited for. No time is before 0. A
    recorded run follows the simulated one of its title: a thread for each warpgroup of each SM, with waits where they
    were, and in a process of its own all that the warps of the first SM of each stage did.

    Args:
        runs: simulations by the title that the viewer shows.
        recordings: measured runs by the title of their simulation.
        plan: of the whole model, whose launches are a process of their own, one after another.
        steps: decode steps that ran, by name: a process each, a thread a CTA, with its waits and rows of each stage.
    """
    recordings = recordings or {}
    events: list[dict[str, Any]] = [] if plan is None else _launches(plan)
    for index, (title, run) in enumerate(runs.items()):
        pid = 1 + PROCESSES * index
        events += _process(pid, f"{title}: {run.time_us:.1f} us on {run.device}")
        if title in recordings:
            events += _recorded(pid + 1, title, recordings[title])
        for worker, spans in by_worker(run).items():
            stages = ", ".join(dict.fromkeys(f"{s.stage}[{s.replica}]" for s in spans))
            events += _thread(pid, worker, f"SM {worker}: {stages}")
            for span in spans:
                events += [_wait(pid, worker, *wait) for wait in waits(span)]
                events.append(_step(pid, span))
    for index, (name, step) in enumerate((steps or {}).items()):
        events += _recorded_step(1 + PROCESSES * len(runs) + index, name, step)
    about = {title: _about(recording) for title, recording in recordings.items()}
    about |= {name: _cost(step) for name, step in (steps or {}).items()}
    other = {"source": "tilestream trace --measured", "measured": about} if about else {"source": "tilestream simulate"}
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}


def write(
    path: Path,
    runs: Mapping[str, Simulation],
    recordings: Mapping[str, Recording] | None = None,
    plan: WholePlan | None = None,
    steps: Mapping[str, StepRecording] | None = None,
) -> Path:
    """Write ``trace(runs, recordings, plan, steps)`` to ``path`` and return it."""
    return files.write(path, json.dumps(trace(runs, recordings, plan, steps), separators=(",", ":")))


def _launches(plan: WholePlan) -> list[dict[str, Any]]:
    """The launches of a whole model, one slice each."""
    events = [*_process(0, f"whole model: {plan.predicted_us:.1f} us on {plan.device}"), *_thread(0, 0, "launches")]
    start_us = 0.0
    for launch in plan.launches:
        args = {"operators": ", ".join(launch.operators), "source": launch.source}
        events.append(_launch(launch.kind, launch.name, start_us, launch.predicted_us, args))
        if launch.step is not None:
            events += _stages(launch.step, start_us)
        start_us += launch.predicted_us
    return events


def _stages(run: StepRun, start_us: float) -> Iterator[dict[str, Any]]:
    """The stages of a decode step, within its launch."""
    start_us += run.launch_us
    for stage in run.stages:
        about = {"bytes": stage.bytes, "came ahead": stage.ahead, "hand-over us": stage.hand_over_us}
        name = f"{stage.name}, layer {stage.layer}" if stage.layer < run.stages[-1].layer else stage.name
        yield _launch("stage", name, start_us, stage.us, {**about, "source": run.lines.get(stage.name, "")})
        start_us += stage.us


def _launch(kind: str, name: str, start_us: float, us: float, args: dict[str, Any]) -> dict[str, Any]:
    at = {"ph": "X", "cat": kind, "name": name, "pid": 0, "tid": 0, "ts": round(start_us, 4), "dur": round(us, 4)}
    return {**at, "args": args}


def _process(pid: int, title: str) -> list[dict[str, Any]]:
    order = {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    return [_name("process_name", pid, None, title), order]


def _about(run: Recording) -> dict[str, Any]:
    """What a recording says of itself in the file: what it cost, and how exact it is."""
    return {**_cost(run), "clock_ns": run.clock_ns, "dropped_stamps": run.dropped, "rows": run.rows}


def _cost(run: Recording | StepRecording) -> dict[str, Any]:
    return {"us": run.time_us, "us_with_stamps": run.stamped_us, "overhead": run.overhead, "device": run.device}


def _times(run: Recording | StepRecording) -> str:
    return f"{run.time_us:.1f} us, {run.stamped_us:.1f} us with stamps on {run.device}"


def _recorded_step(pid: int, name: str, step: StepRecording) -> Iterator[dict[str, Any]]:
    """A decode step as a process: what each CTA waited for, and when it made its rows."""
    yield from _process(pid, f"{name}, measured: {_times(step)}")
    known: set[int] = set()
    for s in step.slices():
        if s.cta not in known:
            known.add(s.cta)
            yield from _thread(pid, s.cta, f"CTA {s.cta}")
        if s.values_us > s.begin_us:
            yield _wait(pid, s.cta, s.begin_us, s.values_us, f"values of {s.stage}")
        at = {"ph": "X", "cat": "step", "name": s.stage, "pid": pid, "tid": s.cta, "ts": round(s.values_us, 4)}
        yield {**at, "dur": round(s.end_us - s.values_us, 4), "args": {"layer": s.layer}}


def _recorded(pid: int, title: str, run: Recording) -> list[dict[str, Any]]:
    """A recorded run as two processes: all SMs, and the warps of one SM a stage."""
    events = _process(pid, f"{title}, measured: {_times(run)}")
    events += _process(pid + 1, f"{title}, measured, inside the first SM of each stage")
    stages: dict[int, dict[str, None]] = {}
    details: dict[tuple[int, int], dict[str, None]] = {}
    for s in run.slices:
        if s.role < CONSUMERS and s.kind != DETAIL:
            events.append(_slice(pid, s))
            stages.setdefault(s.worker, {})[f"{s.stage}[{s.replica}]"] = None
        if s.replica == 0:
            events.append(_slice(pid + 1, s))
            if s.kind == DETAIL:
                details.setdefault((s.worker, s.role), {})[s.name] = None
    for worker, names in stages.items():
        for role in range(CONSUMERS):
            text = f"SM {worker}, {ROLES[role]}: {', '.join(names)}"
            events += _thread(pid, worker * len(ROLES) + role, text)
    for (worker, role), names in details.items():
        stage = ", ".join(stages[worker])
        events += _thread(pid + 1, worker * len(ROLES) + role, f"{stage} {ROLES[role]}: {', '.join(names)}")
    return events


def _slice(pid: int, s: Slice) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": s.kind,
        "name": f"wait: {s.name}" if s.kind == WAIT else s.name,
        "pid": pid,
        "tid": s.worker * len(ROLES) + s.role,
        "ts": round(s.start_us, 4),
        "dur": round(s.end_us - s.start_us, 4),
        "args": {"tiles": f"{s.tile}", "replica": s.replica, "sm": s.sm},
    }


def _thread(pid: int, tid: int, text: str) -> list[dict[str, Any]]:
    order = {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
    return [_name("thread_name", pid, tid, text), order]


def _name(what: str, pid: int, tid: int | None, text: str) -> dict[str, Any]:
    thread = {} if tid is None else {"tid": tid}
    return {"ph": "M", "name": what, "pid": pid, **thread, "args": {"name": text}}


def _step(pid: int, span: Span) -> dict[str, Any]:
    last = span.tile + span.tiles - 1
    inside = {"waits inside": f"{span.slow_us:.3f} us for {span.slow_for}"} if span.slow_for else {}
    return {
        "ph": "X",
        "cat": "step",
        "name": span.stage,
        "pid": pid,
        "tid": span.worker,
        "ts": round(span.start_us, 4),
        "dur": round(span.end_us - span.start_us, 4),
        "args": {
            "tiles": f"{span.tile}" if span.tiles == 1 else f"{span.tile} to {last}",
            "replica": span.replica,
            **inside,
        },
    }


def by_worker(run: Simulation) -> dict[int, list[Span]]:
    """Spans of each SM in order of time."""
    found: dict[int, list[Span]] = {}
    for span in run.spans:
        found.setdefault(span.worker, []).append(span)
    return {worker: sorted(found[worker], key=lambda s: s.start_us) for worker in sorted(found)}


def waits(span: Span) -> list[tuple[float, float, str]]:
    """Start and end of what a worker waited for before a step, and for room behind it, and the names of the two."""
    before = (span.start_us - span.waited_us, span.start_us, span.waited_for)
    behind = (span.end_us, span.end_us + span.held_us, span.held_for)
    return [(start, end, why) for start, end, why in (before, behind) if why and end - start > 1e-6]


def _wait(pid: int, worker: int, start: float, end: float, why: str) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "wait",
        "name": f"wait: {why}",
        "pid": pid,
        "tid": worker,
        "ts": round(start, 4),
        "dur": round(end - start, 4),
    }
