"""Simulated executions of whole models as a Chrome trace, which Perfetto (ui.perfetto.dev) opens.

As ``report.timeline``, with launches in the place of SMs' steps: a model has too many tiles to draw one by one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilestream.studies.kitsune.outcome import LaunchTime, Outcome


def trace(runs: Mapping[str, Outcome]) -> dict[str, Any]:
    """One process a run: a slice a launch, and a counter for each resource's busy share; times in microseconds."""
    events: list[dict[str, Any]] = []
    for pid, (title, run) in enumerate(runs.items(), start=1):
        label = f"{title}: {run.time_s * 1e6:.1f} us on {run.device}"
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": label}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": 0, "args": {"name": "launches"}})
        for launch in run.launches:
            about = {"operators": ", ".join(launch.ops), "phase": launch.phase}
            about |= {what: f"{share:.0%} busy" for what, share in launch.busy.items()}
            about |= {f"waits for {why}": f"{1e6 * s:.1f} us of CTAs" for why, s in launch.waits.items() if s > 0}
            events.append(
                {"ph": "X", "cat": "launch", "name": launch.name, "pid": pid, "tid": 0, "args": about}
                | {"ts": round(1e6 * launch.start_s, 4), "dur": round(1e6 * launch.seconds, 4)}
            )
            events += _stages(pid, launch)
        for start, _, busy in run.utilisation:
            at = round(1e6 * start, 4)
            events += [
                {"ph": "C", "name": f"{what} busy, %", "pid": pid, "ts": at, "args": {"%": round(100 * share, 2)}}
                for what, share in busy.items()
            ]
        end = round(1e6 * run.time_s, 4)
        last = run.utilisation[-1][2] if run.utilisation else {}
        events += [{"ph": "C", "name": f"{w} busy, %", "pid": pid, "ts": end, "args": {"%": 0}} for w in last]
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"source": "tilestream simulate"}}


def _stages(pid: int, launch: LaunchTime) -> list[dict[str, Any]]:
    """Slices of a pipeline's stages, each in a row of its own below the launches."""
    if len(launch.stages) < 2:
        return []
    made = []
    for row, stage in enumerate(launch.stages, start=1):
        about = {"operators": ", ".join(stage.ops), "engine": stage.engine, "CTAs": stage.ctas, "tiles": stage.tiles}
        about["busy"] = f"{1e6 * stage.busy_s:.1f} us a CTA"
        about |= {f"waits for {why}": f"{1e6 * s:.1f} us a CTA" for why, s in stage.waits.items() if s > 0}
        made.append(
            {"ph": "X", "cat": "stage", "name": stage.name, "pid": pid, "tid": row, "args": about}
            | {"ts": round(1e6 * launch.start_s, 4), "dur": round(1e6 * stage.end_s, 4)}
        )
    return made


def write(path: Path, runs: Mapping[str, Outcome]) -> Path:
    """Write ``trace(runs)`` to ``path`` and return it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trace(runs), separators=(",", ":")))
    return path
