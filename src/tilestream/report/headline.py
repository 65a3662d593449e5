"""What a reader sees first of a model's report: one headline, at most six figures, and the time beside Inductor's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilestream.plan.analysis import Analysis
from tilestream.report import whole
from tilestream.report.groups import Group
from tilestream.report.words import count, percent, size

MOST_CARDS = 6
Times = Sequence[tuple[str, float, str]]
"""Rows of (label, microseconds, "predicted" or "measured")."""


def headline(a: Analysis) -> str:
    """``4.6 times as fast as Inductor, predicted``; where nothing runs as a pipeline, that Inductor runs the model."""
    if a.empty:
        return "No rows: nothing runs"
    if not any(launch.ours for launch in a.whole.launches):
        return "Inductor runs the whole model: no pipeline is faster"
    ours, other, how = a.measured_us, a.inductor_measured_us, "measured"
    if ours is None or other is None:
        ours, other, how = a.predicted_us, a.inductor_predicted_us, "predicted"
    if not ours or not other:
        return ""
    times = other / ours
    return f"{times:.1f} times as fast as Inductor, {how}" if times >= 1.05 else f"As fast as Inductor, {how}"


def cards(a: Analysis, groups: Sequence[Group], accuracy: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Figures that stand nowhere else on the page above the fold, each with what it counts."""
    part, everything = a.coverage.dataflow, a.coverage.whole
    made = []
    if everything.operators:
        share = percent(part.operators, everything.operators)
        made.append((share, f"of the {everything.operators:,} operators run in pipelines"))
    if everything.flops:
        made.append((percent(part.flops, everything.flops), "of the FLOPs run in pipelines"))
    found = sum(len(g.regions) for g in groups)
    running = sum(len(g.regions) for g in groups if g.runs)
    if found:
        rest = f"of {found} regions run as pipelines" if running < found else "run as pipelines: all that were found"
        made.append((f"{running}" if running < found else count(found, "region"), rest))
    if not a.empty and a.whole.launches:
        ours, other = (round(sum(x.bytes for x in plan.launches)) for plan in (a.whole, a.on_inductor))
        made.append((size(ours), f"moved to and from DRAM; {size(other)} with everything on Inductor"))
        kernels, others = (sum(x.kernels for x in plan.launches) for plan in (a.whole, a.on_inductor))
        made.append((count(kernels, "kernel"), f"a call; {others:,} with everything on Inductor"))
    for check in accuracy[:1]:
        made.append((f"{check['error']:.1e}", f"error against float64; eager's is {check['eager_error']:.1e}"))
    return [{"value": value, "label": label} for value, label in made[:MOST_CARDS]]


def times(a: Analysis, by_strategy: Mapping[str, float] | None = None) -> Times:
    """The whole model's times: Inductor's and the plan's, measured where they are, and by each single strategy."""
    if a.empty:
        return ()
    mine, other = a.predicted_us, a.inductor_predicted_us
    rows = [("Inductor", other, "predicted"), ("tilestream", mine, "predicted")]
    rows += [("Inductor", a.inductor_measured_us, "measured"), ("tilestream", a.measured_us, "measured")]
    made = [(label, us, how) for label, us, how in rows if us is not None]
    return [*made, *forced(by_strategy or {}, mine)]


def forced(by_strategy: Mapping[str, float], mine: float | None) -> Times:
    """Times by one strategy alone, but for those of the plan itself."""
    return [
        (f"only {name}", us, "predicted")
        for name, us in by_strategy.items()
        if name not in ("auto", "inductor") and (mine is None or abs(us - mine) > 0.005 * mine)
    ]


def note(device: str, rows: Times) -> str:
    """Of a chart: how far predictions for a device are known to be off, and what times by one strategy are."""
    if not any(how == "predicted" for *_, how in rows):
        return ""
    alone = " only ...: every region by that strategy; a region that has no such pipeline is Inductor's."
    return f"Predictions by the {whole.simulator(device)}." + alone * any(
        label.startswith("only ") for label, *_ in rows
    )
