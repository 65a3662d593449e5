"""One self-contained HTML file: drawings, timelines, bytes and figures, with no reference to anything outside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from tilestream.ir import traffic
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Pipeline
from tilestream.plan.analysis import Analysis
from tilestream.plan.parts import RegionAnalysis
from tilestream.plan.planner import Candidate
from tilestream.report import charts, drawing, excluded, facts, launches, parts, whole
from tilestream.report.explain import REGISTERS, Report, sms, strategy, weights
from tilestream.report.words import count, microseconds, shortened, size
from tilestream.simulator import Simulation


@dataclass
class Content:
    """What a page shows besides the plan.

    Args:
        times: device name to rows of (label, microseconds, "predicted" or "measured").
        simulations: region name to strategy to simulated run.
        kernels: one mapping of column heading to cell a kernel.
        accuracy: mappings with ``what``, ``rows``, ``error``, ``eager_error`` and ``ok``.
    """

    times: Mapping[str, Sequence[tuple[str, float, str]]] = field(default_factory=dict)
    simulations: Mapping[str, Mapping[str, Simulation]] = field(default_factory=dict)
    kernels: Sequence[Mapping[str, str]] = ()
    accuracy: Sequence[Mapping[str, Any]] = ()
    environment: Mapping[str, object] = field(default_factory=dict)


def write(path: Path, report: Report, content: Content) -> Path:
    """Write the page to ``path`` and return it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(report, content), encoding="utf-8")
    return path


def render(report: Report, content: Content) -> str:
    """The page as text."""
    loader = jinja2.PackageLoader("tilestream.report", "templates")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=False)
    return environment.get_template("report.html.j2").render(page=_page(report, content))


def _page(report: Report, content: Content) -> dict[str, Any]:
    a = report.analysis
    rows = max((r.rows for r in a.regions), default=0)
    return {
        "title": f"{a.model} on {a.device}",
        "subtitle": f"{whole.coverage(a.coverage)}. {whole.times(a)}. "
        f"{count(len(a.graphs), 'graph')}, planned for {rows:,} rows",
        "notes": [*a.hints, *(f"graph break: {reason}" for reason in a.breaks), *whole.float32(a).splitlines()],
        "cards": _cards(report, content),
        "rows": f"{rows:,}",
        "times": [{"title": device, "svg": _times(entries)} for device, entries in content.times.items()],
        "parts": [dict(zip(_PART, parts.cells(p, a), strict=True)) for p in parts.parts(a)],
        "launches": [] if a.empty else [dict(zip(_LAUNCH, launches.cells(x), strict=True)) for x in a.whole.launches],
        "regions": [_region(a, r, i, content.simulations.get(r.name, {})) for i, r in enumerate(a.regions)],
        "kernels": content.kernels,
        "accuracy": [{**c, "rows": f"{c['rows']:,}"} for c in content.accuracy],
        "exclusions": [
            {
                "op": g.title,
                "share": excluded.share(g, a),
                "module": shortened(g.modules),
                "reason": g.reason,
                "advice": g.advice,
                "source": shortened(g.sources, 1),
            }
            for g in excluded.groups(a.exclusions)
        ],
        "registers": REGISTERS,
        "environment": content.environment,
    }


_PART = ("graph", "name", "launches", "flops", "predicted", "measured", "dram")
_LAUNCH = ("who", "name", "operators", "modules", "predicted", "measured", "dram")


def _cards(report: Report, content: Content) -> list[dict[str, str]]:
    a = report.analysis
    part, everything = a.coverage.dataflow, a.coverage.whole
    shares = (
        (part.operators, everything.operators, "of the operators run as dataflow"),
        (part.flops, everything.flops, "of the FLOPs run as dataflow"),
    )
    cards = [{"value": f"{n / of:.0%}", "label": label} for n, of, label in shares if of]
    if not a.empty:
        cards.append({"value": f"{microseconds(a.predicted_us)} µs", "label": "predicted for the whole model"})
        cards.append({"value": f"{microseconds(a.inductor_predicted_us)} µs", "label": "predicted, all on Inductor"})
    for region in a.regions:
        if region.plan is not None:
            chosen = region.plan.chosen
            us = chosen.measured_us or a.candidate_us(region, chosen)
            how = "measured" if chosen.measured_us else "predicted"
            cards.append({"value": chosen.strategy, "label": f"strategy chosen for {region.name}"})
            if us:
                cards.append({"value": f"{microseconds(us)} µs", "label": f"{how} on {a.device}"})
    for check in content.accuracy[:1]:
        cards.append({"value": f"{check['error']:.1e}", "label": f"error, eager's is {check['eager_error']:.1e}"})
    return cards


def _times(entries: Sequence[tuple[str, float, str]]) -> Markup:
    items = [charts.Bar(label, us, charts.time_text(us), 0 if how == "predicted" else 1) for label, us, how in entries]
    return Markup(charts.bars(items, left=170))


def _region(a: Analysis, region: RegionAnalysis, index: int, runs: Mapping[str, Simulation]) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "id": f"region{index}",
        "name": region.name,
        "kind": region.kind.capitalize(),
        "operators": f"{len(region.operators)} operators: {', '.join(dict.fromkeys(region.operators))}",
        "problem": region.problem,
    }
    plan = region.plan
    if plan is None:
        return shown
    shown["candidates"] = [
        {
            "strategy": strategy(region, c),
            "predicted": microseconds(a.candidate_us(region, c)),
            "measured": microseconds(c.measured_us),
            "launches": "" if c.pipeline is None else sum(len(cut_at_dram(p)) for p in region.pipelines(c)),
            "stages": "" if c.pipeline is None else sum(len(p.stages) for p in region.pipelines(c)),
            "rejected": c.rejected,
            "chosen": c == plan.chosen,
        }
        for c in plan.candidates
    ]
    drawn = facts.distinct(plan)
    if not drawn:
        return shown
    first = plan.chosen if plan.chosen.pipeline is not None else drawn[0][0]
    shown["drawings"] = [
        {"title": c.strategy, "chosen": c == first, "svg": Markup(drawing.svg(p)), "note": ""} for c, p in drawn
    ]
    shown["timelines"] = [
        {
            "title": strategy,
            "chosen": strategy == (first.strategy if first.strategy in runs else next(iter(runs))),
            "svg": Markup(charts.gantt(run)),
            "note": f"{microseconds(run.time_us)} µs in all by the {whole.SIMULATOR}. {run.note}".strip(),
        }
        for strategy, run in runs.items()
    ]
    shown["traffic"] = _traffic(drawn, region.rows)
    if plan.chosen.pipeline is not None:
        shown["stages"] = _stages(facts.pipeline_facts(*region.pipelines(plan.chosen)))
    return shown


def _traffic(drawn: Sequence[tuple[Candidate, Pipeline]], rows: int) -> list[dict[str, Any]]:
    titles = {"dram": "DRAM", "l2": "L2", "shared": "shared memory", "registers": "registers"}
    levels = {c.strategy: traffic.traffic(p, rows).levels() for c, p in drawn}
    return [
        {
            "title": title,
            "svg": Markup(
                charts.bars([charts.Bar(s, at[level], size(at[level]), i) for i, (s, at) in enumerate(levels.items())])
            ),
        }
        for level, title in titles.items()
    ]


def _stages(described: Mapping[str, Any]) -> list[dict[str, str]]:
    return [
        {
            "name": s["name"],
            "sms": sms(s),
            "summary": s["summary"],
            "placement": s["placement"],
            "weights": weights(s),
            "shared": size(s["shared_bytes"]),
            "registers": "" if s["registers"] is None else str(s["registers"]),
        }
        for launch in described["launches"]
        for s in launch["stages"]
    ]
