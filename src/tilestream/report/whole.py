"""The line on the whole model that every command prints: who runs it, in operators and FLOPs, and how long it takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.text import Text

from tilestream.ir.pipeline import Pipeline
from tilestream.plan.analysis import Analysis
from tilestream.plan.decode import steps_of
from tilestream.plan.left_out import of_plan
from tilestream.plan.parts import Coverage, Share
from tilestream.plan.shown import closed_forms
from tilestream.report.words import count, microseconds, percent

SIMULATOR_ERROR = 0.18
"""Mean absolute error of the simulator on the kernels of the fresh set (docs/truth.md)."""
MEASURED_ON = {"h200": "an H200"}
"""The devices that predictions were held against, by their names; a device that is scaled has another name."""


def error(device: str) -> str:
    """How far off predictions for a device were measured to be: of this device alone."""
    named = MEASURED_ON.get(device)
    return f"{SIMULATOR_ERROR:.0%} mean error on {named}" if named else "not measured on this device"


def simulator(device: str) -> str:
    """What a prediction for a device comes from, and its error."""
    return f"simulator, {error(device)}" + ", over kernels of all kinds" * (device in MEASURED_ON)


def formulas(pipelines: Iterable[Pipeline], device: str) -> list[str]:
    """A line for each closed form that tells the time of some of ``pipelines``, with its own error."""
    named = MEASURED_ON.get(device)
    return [
        f"{form.name}: predicted by a closed form, not event by event, "
        + (f"{form.error:.0%} mean error on {named} ({form.kernels})" if named else "not measured on this device")
        for form in closed_forms(pipelines)
    ]


def facts(a: Analysis) -> dict[str, Any]:
    """Coverage, and microseconds of the whole model; None where a time is not known."""
    out = None if a.empty else of_plan(a.whole)
    return {
        "coverage": a.coverage.json(),
        "predicted_us": a.predicted_us,
        "inductor_predicted_us": a.inductor_predicted_us,
        "measured_us": a.measured_us,
        "inductor_measured_us": a.inductor_measured_us,
        "left_out": None if out is None else asdict(out),
        "mode": a.mode,
        "float32": [
            {
                "precision": f.name,
                "write": f.write,
                "coverage": f.coverage.json() if f.coverage is not None else None,
                "predicted_us": f.predicted_us,
                "inductor_predicted_us": f.inductor_predicted_us,
                "problem": f.problem,
            }
            for f in a.float32
        ],
    }


def render(a: Analysis) -> Text:
    """A heading, who runs the model, its times, hints, graph breaks, and what float32 costs."""
    text = Text()
    text.append(a.model, style="bold")
    text.append(f" on {a.device}, {_captured(a)}\n")
    text.append(coverage(a.coverage, _regions(a)) + "\n", style="bold")
    text.append(times(a) + "\n")
    if said := left_to_inductor(a):
        text.append(said + "\n")
    for hint in a.hints:
        text.append(f"note: {hint}\n", style="yellow")
    for reason in a.breaks:
        text.append(f"graph break: {reason}\n", style="yellow")
    text.append(float32(a), style="yellow")
    return text


def left_to_inductor(a: Analysis) -> str:
    """The share of the predicted time that is no pipeline's, and the operators with most of it; empty where none is."""
    out = None if a.empty else of_plan(a.whole)
    if out is None:
        return ""
    where = f", first at {out.source}" if out.source else ""
    return (
        f"outside of pipelines: {percent(out.share, 1)} of the predicted time, most of it in {out.largest} "
        f"({percent(out.largest_share, 1)}{where})"
    )


def _regions(a: Analysis) -> str:
    """How many regions and sums of gradients run as dataflow, and of how many; empty where there is none."""
    kinds = {"region": ("region", "regions")}
    kinds |= {"ragged": ("ragged region", "ragged regions")}
    kinds |= {"backward chain": ("backward chain", "backward chains")}
    kinds |= {"weight gradients": ("launch of weight gradients", "launches of weight gradients")}
    said = []
    for kind, (one, more) in kinds.items():
        found = [r for r in a.regions if r.kind == kind]
        running = [r for r in found if r.runner not in ("inductor", "eager")]
        if found:
            some = f"{len(running)} of " if len(running) < len(found) else ""
            said.append(f"{some}{len(found)} {one if len(found) == 1 else more}")
    if steps := sum(len(steps_of(g.graph)) for g in a.graphs):
        said.append(count(steps, "decode step"))
    return " and ".join(said)


def _captured(a: Analysis) -> str:
    kinds = ", ".join(dict.fromkeys(g.kind for g in a.graphs))
    return count(len(a.graphs), "graph") + (f" ({kinds})" if kinds else "") + (f", {a.mode} mode" if a.mode else "")


def coverage(c: Coverage, regions: str = "") -> str:
    """``dataflow: 9 of 10 operators (90%), 99% of the FLOPs, in 1 region; Inductor: 1 (10%), 1%; eager: none``."""
    where = f" in {regions}" if regions else ""
    return f"dataflow: {_share(c.dataflow, c.whole, True)}{where}; Inductor: {_share(c.inductor, c.whole)}; " + (
        f"eager: {_share(c.eager, c.whole)}"
    )


def _share(part: Share, whole: Share, first: bool = False) -> str:
    if not part.operators and not first:
        return "none"
    words = f"{part.operators} of {count(whole.operators, 'operator')}" if first else f"{part.operators}"
    words += f" ({percent(part.operators, whole.operators)})"
    return words + (f", {percent(part.flops, whole.flops)} of the FLOPs" if whole.flops else "")


def times(a: Analysis) -> str:
    """Predicted and measured microseconds of the whole model, Inductor's beside them."""
    if a.empty:
        return "no rows: nothing is launched, and nothing predicted"
    mine, other = a.predicted_us, a.inductor_predicted_us
    said = f"predicted: {microseconds(mine)} us; all on Inductor: {microseconds(other)} us"
    said += f" ({simulator(a.device)})"
    if a.measured_us is not None:
        said += f"\nmeasured: {microseconds(a.measured_us)} us"
        if a.inductor_measured_us is not None:
            said += f"; all on Inductor: {microseconds(a.inductor_measured_us)} us"
    return said


def float32(a: Analysis) -> str:
    """What lower precisions would give, with the line to write; empty where float32 costs nothing."""
    if not a.float32:
        return ""
    lines = ["float32 products do not run on tensor cores as torch is set. With less precision:"]
    for f in a.float32:
        lines.append(f"  {f.name}: write {f.write}")
        if f.coverage is None:
            lines.append(f"        does not work as it is: {f.problem}")
            continue
        us, inductor_us = microseconds(f.predicted_us), microseconds(f.inductor_predicted_us)
        lines.append(f"        predicted: {us} us; all on Inductor: {inductor_us} us; {_short(f.coverage)}")
    return "\n".join(lines) + "\n"


def _short(c: Coverage) -> str:
    return (
        f"{percent(c.dataflow.operators, c.whole.operators)} of the operators and "
        f"{percent(c.dataflow.flops, c.whole.flops)} of the FLOPs as dataflow"
    )


def ran(a: Analysis, used: Sequence[str]) -> str:
    """What ran each region: ``region0: vertical``; or why nothing ran as dataflow."""
    if not a.graphs:
        return "no graph: the model ran eagerly"
    return "; ".join(used) if used else "no region: nothing ran as dataflow"
