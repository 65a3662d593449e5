"""Whole models over devices, sizes and strategies, on all cores or a cluster: our plans, and a paper's designs.

A point is one simulation. Points of the same model, mode and sizes share one capture, so each such group is one task.
The compiler's strategies have the names and the times that ``simulate`` has; designs of the paper are named after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tilestream import devices
from tilestream.errors import OptionError
from tilestream.studies.kitsune.outcome import Outcome
from tilestream.studies.kitsune.parallel import each

if TYPE_CHECKING:  # the command line's help needs neither torch nor the planner
    from tilestream.plan.analysis import Analysis
    from tilestream.plan.whole import WholePlan

STRATEGIES = ("vertical", "spatial", "shared", "bulk")
"""As ``plan.predicted.STRATEGIES``."""

PAPER = "paper:"
DESIGNS = tuple(PAPER + name for name in ("bulk", "vertical", "kitsune", "deep", "whole", "mixed"))
"""Designs of Kitsune's paper as it has them, which the compiler does not run."""
PLANS = ("auto", *STRATEGIES, "inductor")
"""What ``simulate`` shows of a whole model: the plan, those by one strategy, and every region on Inductor."""
ALL_STRATEGIES = (*PLANS, *DESIGNS)
USUAL = ("auto", "inductor", "paper:bulk", "paper:vertical", "paper:kitsune")
"""What is run unless told otherwise."""
MODES = ("inference", "training")

Sizes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Point:
    """One simulation: ``sizes`` are arguments of the model's input maker by name, sorted."""

    app: str
    mode: str
    device: str
    strategy: str
    sizes: Sizes = ()

    @property
    def design(self) -> str:
        """The paper's design; empty where it is a plan of the compiler."""
        return self.strategy.removeprefix(PAPER) if self.strategy.startswith(PAPER) else ""

    @property
    def base(self) -> str:
        """The strategy that it is compared with."""
        return "paper:bulk" if self.design else "inductor"


@dataclass(frozen=True)
class Planned:
    """What ``simulate`` says of a whole model by one strategy. ``time_s`` is None where it has no pipeline for any
    region; ``dram_bytes`` are those of all launches, each as if nothing were cached from the one before it."""

    time_s: float | None
    launches: int = 0
    dram_bytes: float = 0.0


@dataclass(frozen=True)
class Swept:
    """A point, what it came to, and how many times as fast it is as bulk of the paper's designs, or as Inductor of the
    compiler's plans, with the same model, sizes and device; None where that was not asked for."""

    point: Point
    outcome: Outcome | Planned
    speedup: float | None

    @property
    def launches(self) -> int:
        found = self.outcome.launches
        return found if isinstance(found, int) else len(found)

    def json(self) -> dict[str, object]:
        """As plain data: what it is of, and what is known of it."""
        p, o = self.point, self.outcome
        known: dict[str, object] = {
            "time_us": None if o.time_s is None else o.time_s * 1e6,
            "launches": self.launches,
            "dram_bytes": o.dram_bytes,
        }
        if isinstance(o, Outcome):
            known |= {name: value for name, value in o.json().items() if name not in ("app", "mode", "execution")}
        about = {"app": p.app, "mode": p.mode, "strategy": p.strategy, "sizes": dict(p.sizes)}
        return {**about, **known, "device": p.device, "speedup": self.speedup}


def points(
    apps: Sequence[str],
    device_names: Sequence[str],
    strategies: Sequence[str] = USUAL,
    modes: Sequence[str] = ("inference",),
    sizes: Mapping[str, Sequence[int]] | None = None,
) -> list[Point]:
    """Every combination, in order.

    Raises:
        OptionError: a mode or strategy is unknown, or a list is empty.
        DeviceError: a device is unknown.
    """
    for what, given, known in (("mode", modes, MODES), ("strategy", strategies, ALL_STRATEGIES)):
        for name in given:
            if name not in known:
                raise OptionError(f"unknown {what} {name!r}", f"use some of: {', '.join(known)}")
    for what, given in (("model", apps), ("device", device_names), ("mode", modes), ("strategy", strategies)):
        if not given:
            raise OptionError(f"the sweep names no {what}", "name at least one")
    for name in device_names:
        devices.get(name)
    named = sorted((sizes or {}).items())
    combined = [tuple(zip([n for n, _ in named], v, strict=True)) for v in itertools.product(*(v for _, v in named))]
    return [
        Point(app, mode, device, strategy, at)
        for app, mode, at, device, strategy in itertools.product(apps, modes, combined, device_names, strategies)
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
    found: dict[Point, Outcome | Planned] = {}
    for made in each(run_group, tasks, jobs, progress, _said, _about):
        found.update(made)
    return [Swept(p, found[p], _ratio(found.get(replace(p, strategy=p.base)), found[p])) for p in wanted]


def _ratio(base: Outcome | Planned | None, outcome: Outcome | Planned) -> float | None:
    if base is None or base.time_s is None or outcome.time_s is None:
        return None
    return base.time_s / outcome.time_s


def _about(group: Sequence[Point]) -> str:
    point = group[0]
    return f"{point.app} {point.mode}" + "".join(f", {n}={v}" for n, v in point.sizes)


def _said(made: list[tuple[Point, Outcome | Planned]]) -> str:
    return f"{_about([point for point, _ in made])}: {len(made)} simulations"


def run_group(group: Iterable[Point]) -> list[tuple[Point, Outcome | Planned]]:
    """Capture the one model of the group, and simulate each of its points."""
    group = list(group)
    designs = dict(_designs([p for p in group if p.design]))
    plans: dict[Point, Planned] = {}
    for device in dict.fromkeys(p.device for p in group if not p.design):
        plans |= _plans([p for p in group if not p.design and p.device == device])
    return [(point, designs[point] if point.design else plans[point]) for point in group]


def _designs(group: Sequence[Point]) -> Iterator[tuple[Point, Outcome]]:
    """Points of the paper's designs, of one model."""
    if not group:
        return
    from tilestream.studies.kitsune import design
    from tilestream.studies.kitsune.evaluate import evaluate
    from tilestream.studies.kitsune.graphs import graph_of

    graph = graph_of(group[0].app, group[0].mode, dict(group[0].sizes))
    phases = {op.name: str(op.phase) for op in graph.operators}
    for point in group:
        device = devices.get(point.device)
        plan = design(graph, device, point.design)
        names = {"app": point.app, "mode": point.mode, "execution": point.design}
        yield point, evaluate(plan.workload, device, phases=phases, **names)


def _plans(group: Sequence[Point]) -> dict[Point, Planned]:
    """Points of the compiler's plans, of one model on one device."""
    from tilestream.plan.predicted import by_strategy

    found = _analysed(group[0])
    plans = {name: a.whole for name, a in by_strategy(found).items() if not a.empty}
    if not found.empty:
        plans["inductor"] = found.on_inductor
    return {p: _planned(plans.get(p.strategy)) for p in group}


def _analysed(point: Point) -> Analysis:
    """As ``simulate`` does: with the shapes of tensors alone, and with real ones where a model branches on values."""
    import torch

    from tilestream.graph.capture import NeedsValuesError
    from tilestream.options import Options
    from tilestream.plan.analyse import analyse
    from tilestream.studies.kitsune.graphs import workload_of

    device, training = devices.get(point.device), point.mode == "training"
    for fake in (True, False):
        what = workload_of(point.app, point.mode, dict(point.sizes), fake)
        try:
            with torch.set_grad_enabled(training):
                return analyse(what.module, what.inputs, Options(), device, keywords=what.keywords, training=training)
        except NeedsValuesError:
            if not fake:
                raise
    raise AssertionError("real tensors have values")


def _planned(plan: WholePlan | None) -> Planned:
    if plan is None:
        return Planned(None)
    kernels, moved = sum(launch.kernels for launch in plan.launches), sum(launch.bytes for launch in plan.launches)
    return Planned(plan.predicted_us * 1e-6, kernels, moved)
