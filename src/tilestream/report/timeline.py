"""Simulated runs as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilestream.simulator import Simulation, Span


def trace(runs: Mapping[str, Simulation]) -> dict[str, Any]:
    """One process a run, one thread an SM, one slice a step; times in microseconds.

    A wait comes before the step that it delayed and names what was waited for.

    Args:
        runs: simulations by the title that the viewer shows.
    """
    events: list[dict[str, Any]] = []
    for pid, (title, run) in enumerate(runs.items(), start=1):
        events.append(_name("process_name", pid, None, f"{title}: {run.time_us:.1f} us on {run.device}"))
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
        for worker, spans in by_worker(run).items():
            stages = ", ".join(dict.fromkeys(f"{s.stage}[{s.replica}]" for s in spans))
            events.append(_name("thread_name", pid, worker, f"SM {worker}: {stages}"))
            events.append(
                {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": worker, "args": {"sort_index": worker}}
            )
            for span, (start, why) in zip(spans, waits(spans), strict=True):
                if why:
                    events.append(_wait(pid, span, start, why))
                events.append(_step(pid, span))
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"source": "tilestream simulate"}}


def write(path: Path, runs: Mapping[str, Simulation]) -> Path:
    """Write ``trace(runs)`` to ``path`` and return it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trace(runs), separators=(",", ":")))
    return path


def _name(what: str, pid: int, tid: int | None, text: str) -> dict[str, Any]:
    thread = {} if tid is None else {"tid": tid}
    return {"ph": "M", "name": what, "pid": pid, **thread, "args": {"name": text}}


def _step(pid: int, span: Span) -> dict[str, Any]:
    last = span.tile + span.tiles - 1
    return {
        "ph": "X",
        "cat": "step",
        "name": span.stage,
        "pid": pid,
        "tid": span.worker,
        "ts": round(span.start_us, 4),
        "dur": round(span.end_us - span.start_us, 4),
        "args": {"tiles": f"{span.tile}" if span.tiles == 1 else f"{span.tile} to {last}", "replica": span.replica},
    }


def by_worker(run: Simulation) -> dict[int, list[Span]]:
    """Spans of each SM in order of time."""
    found: dict[int, list[Span]] = {}
    for span in run.spans:
        found.setdefault(span.worker, []).append(span)
    return {worker: sorted(found[worker], key=lambda s: s.start_us) for worker in sorted(found)}


def waits(spans: Sequence[Span]) -> list[tuple[float, str]]:
    """Before each span of one worker: when its idle time began, and what it waited for (empty: it did not wait).

    A worker may wait before a step for its input or after it for room: the gap shows both.
    """
    made = []
    for before, span in zip([None, *spans], spans, strict=False):
        if before is None:
            start, why = span.start_us - span.waited_us, span.waited_for
        else:
            start, why = before.end_us, span.waited_for or before.waited_for
        made.append((start, why if span.start_us - start > 1e-6 else ""))
    return made


def _wait(pid: int, span: Span, start: float, why: str) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "wait",
        "name": f"wait: {why}",
        "pid": pid,
        "tid": span.worker,
        "ts": round(start, 4),
        "dur": round(span.start_us - start, 4),
    }
