"""Whole models over devices, sizes and executions, on all cores or a cluster.

A point is one simulation. Points of the same model, mode and sizes share one capture, so each such group is one task.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tilestream import devices
from tilestream.errors import OptionError
from tilestream.studies.kitsune.outcome import Outcome
from tilestream.studies.kitsune.parallel import each

EXECUTIONS = ("bulk", "vertical", "kitsune")
"""What is run unless told otherwise; ``deep``, ``whole`` and ``mixed`` are to be asked for."""
ALL_EXECUTIONS = (*EXECUTIONS, "deep", "whole", "mixed")
MODES = ("inference", "training")

Sizes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Point:
    """One simulation: ``sizes`` are arguments of the model's input maker by name, sorted."""

    app: str
    mode: str
    device: str
    execution: str
    sizes: Sizes = ()


@dataclass(frozen=True)
class Swept:
    """A point, what it came to, and how many times as fast it is as bulk with the same model, sizes and device."""

    point: Point
    outcome: Outcome
    speedup: float | None


def points(
    apps: Sequence[str],
    device_names: Sequence[str],
    executions: Sequence[str] = EXECUTIONS,
    modes: Sequence[str] = ("inference",),
    sizes: Mapping[str, Sequence[int]] | None = None,
) -> list[Point]:
    """Every combination, in order.

    Raises:
        OptionError: a mode or strategy is unknown, or a list is empty.
        DeviceError: a device is unknown.
    """
    for what, given, known in (("mode", modes, MODES), ("strategy", executions, ALL_EXECUTIONS)):
        for name in given:
            if name not in known:
                raise OptionError(f"unknown {what} {name!r}", f"use some of: {', '.join(known)}")
    for what, given in (("model", apps), ("device", device_names), ("mode", modes), ("strategy", executions)):
        if not given:
            raise OptionError(f"the sweep names no {what}", "name at least one")
    for name in device_names:
        devices.get(name)
    named = sorted((sizes or {}).items())
    combined = [tuple(zip([n for n, _ in named], v, strict=True)) for v in itertools.product(*(v for _, v in named))]
    return [
        Point(app, mode, device, execution, at)
        for app, mode, at, device, execution in itertools.product(apps, modes, combined, device_names, executions)
    ]


def sweep(wanted: Sequence[Point], jobs: int = -1, progress: Callable[[str], None] = lambda _: None) -> list[Swept]:
    """Simulate every point; results in the order of ``wanted``.

    Args:
        jobs: processes; -1 is one a core. A joblib back end that is set around the call takes over.
    """
    groups: dict[tuple[str, str, Sizes], list[Point]] = {}
    for point in wanted:
        groups.setdefault((point.app, point.mode, point.sizes), []).append(point)
    tasks = [(tuple(group),) for group in groups.values()]
    found: dict[Point, Outcome] = {}
    for made in each(run_group, tasks, jobs, progress, _said, _about):
        found.update(made)
    bulk = {(p.app, p.mode, p.sizes, p.device): o.time_s for p, o in found.items() if p.execution == "bulk"}
    return [Swept(p, found[p], _ratio(bulk.get((p.app, p.mode, p.sizes, p.device)), found[p])) for p in wanted]


def _ratio(bulk_s: float | None, outcome: Outcome) -> float | None:
    return None if bulk_s is None else bulk_s / outcome.time_s


def _about(group: Sequence[Point]) -> str:
    point = group[0]
    return f"{point.app} {point.mode}" + "".join(f", {n}={v}" for n, v in point.sizes)


def _said(made: list[tuple[Point, Outcome]]) -> str:
    return f"{_about([point for point, _ in made])}: {len(made)} simulations"


def run_group(group: Iterable[Point]) -> list[tuple[Point, Outcome]]:
    """Capture the one model of the group, and simulate each of its points."""
    from tilestream.studies.kitsune import design
    from tilestream.studies.kitsune.evaluate import evaluate
    from tilestream.studies.kitsune.graphs import graph_of

    group = list(group)
    graph = graph_of(group[0].app, group[0].mode, dict(group[0].sizes))
    phases = {op.name: str(op.phase) for op in graph.operators}
    made = []
    for point in group:
        device = devices.get(point.device)
        plan = design(graph, device, point.execution)
        names = {"app": point.app, "mode": point.mode, "execution": point.execution}
        made.append((point, evaluate(plan.workload, device, phases=phases, **names)))
    return made
