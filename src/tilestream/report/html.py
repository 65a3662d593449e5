"""One self-contained HTML file: drawings, timelines, bytes and figures, with no reference to anything outside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from tilestream import files
from tilestream.graph.rewrites.epilogues import with_epilogues
from tilestream.ir import traffic
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Pipeline
from tilestream.plan.analysis import Analysis
from tilestream.plan.candidates import Candidate
from tilestream.plan.parts import RegionAnalysis
from tilestream.plan.whole import Launch
from tilestream.report import charts, drawing, excluded, facts, launches, parts, steps, whole
from tilestream.report.explain import REGISTERS, Report, sms, strategy, weights
from tilestream.report.glossary import DIVIDED, WORDS
from tilestream.report.groups import Group, groups
from tilestream.report.headline import Times, cards, headline, note, times
from tilestream.report.simulation import Simulation as Simulated
from tilestream.report.words import microseconds, percent, shortened, size
from tilestream.simulator import Simulation
from tilestream.simulator.steps import StepRun


@dataclass
class Content:
    """What a page shows besides the plan.

    Args:
        times: device name to rows of (label, microseconds, "predicted" or "measured"); else of the analysis.
        by_strategy: predicted microseconds of the whole model by one strategy alone.
        simulations: region name to strategy to simulated run.
        kernels: one mapping of column heading to cell a kernel.
        accuracy: mappings with ``what``, ``rows``, ``error``, ``eager_error`` and ``ok``.
    """

    times: Mapping[str, Times] = field(default_factory=dict)
    by_strategy: Mapping[str, float] = field(default_factory=dict)
    simulations: Mapping[str, Mapping[str, Simulation]] = field(default_factory=dict)
    kernels: Sequence[Mapping[str, str]] = ()
    accuracy: Sequence[Mapping[str, Any]] = ()
    environment: Mapping[str, object] = field(default_factory=dict)


def content(simulated: Simulated) -> Content:
    """What a simulated model's page shows."""
    return Content(by_strategy=simulated.whole_us, simulations=simulated.by_region())


def write(path: Path, report: Report, content: Content) -> Path:
    """Write the page to ``path`` and return it."""
    return files.write(path, render(report, content))


def render(report: Report, content: Content) -> str:
    """The page as text."""
    loader = jinja2.PackageLoader("tilestream.report", "templates")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=False)
    return environment.get_template("report.html.j2").render(page=_page(report, content))


def _page(report: Report, content: Content) -> dict[str, Any]:
    a = report.analysis
    found = groups(a)
    running, left = [g for g in found if g.runs], [g for g in found if not g.runs]
    out = excluded.groups(a.exclusions)
    shown = content.times or {a.device: times(a, content.by_strategy)}
    return {
        "title": f"{a.model} on {a.device}",
        "headline": headline(a),
        "notes": [
            *([said[0].upper() + said[1:] + "."] if (said := whole.left_to_inductor(a)) else []),
            *a.hints,
            *(f"graph break: {reason}" for reason in a.breaks),
            *whole.float32(a).splitlines(),
        ],
        "cards": cards(a, found, content.accuracy),
        "times": [_times(device, rows) for device, rows in shown.items() if rows],
        "parts": [dict(zip(_PART, parts.cells(p, a), strict=True)) for p in parts.parts(a)],
        "launches": [] if a.empty else [dict(zip(_LAUNCH, launches.cells(x), strict=True)) for x in a.whole.launches],
        "steps": [_step(*each) for each in steps.of(a)],
        "step_headings": steps.HEADINGS,
        "groups": [_group(a, g, i, content) for i, g in enumerate(running)],
        "left": [_left(g) for g in left],
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
            for g in out
        ],
        "excluded": sum(g.number for g in out),
        "registers": REGISTERS,
        "words": WORDS,
        "environment": content.environment,
    }


_PART = ("graph", "name", "launches", "flops", "predicted", "measured", "dram")
_LAUNCH = ("who", "name", "operators", "modules", "predicted", "measured", "dram")


def _times(device: str, entries: Times) -> dict[str, Any]:
    items = [
        charts.Bar(
            label, us, f"{charts.time_text(us)}{', measured' * (how == 'measured')}", 7 if label == "Inductor" else 0
        )
        for label, us, how in entries
    ]
    return {
        "title": device,
        "svg": Markup(charts.bars(items, left=112, right=150)),
        "note": note(device, entries),
    }


def _step(launch: Launch, run: StepRun) -> dict[str, Any]:
    """A decode step: microseconds of each stage as bars, the same in numbers."""
    found = [(stages[0].name, sum(stage.us for stage in stages)) for stages in run.by_name()]
    items = [charts.Bar(name, us, charts.time_text(us)) for name, us in found]
    svg = Markup(charts.bars(items, left=132, right=100))
    return {"title": steps.title(launch, run), "svg": svg, "rows": steps.rows(run)}


def _group(a: Analysis, group: Group, index: int, content: Content) -> dict[str, Any]:
    """Equal regions: what the folded line says, and the first of them as ``_region`` shows it."""
    whole_us = a.predicted_us
    share = percent(group.us, whole_us) if group.us is not None and whole_us else ""
    chosen = group.first.runs
    alone = "" if group.inductor_us is None else f" (Inductor {microseconds(group.inductor_us)})"
    return {
        "title": group.title if len(a.regions) > 1 else a.model,
        "what": group.what,
        "strategy": group.strategy if chosen is None else chosen.name,
        "time": "" if group.us is None else f"{microseconds(group.us)} µs{alone}",
        "share": share,
        "others": ", ".join(r.name for r in group.regions[1:]),
        **_region(a, group.first, index, content.simulations.get(group.first.name, {})),
    }


def _left(group: Group) -> dict[str, str]:
    problem = group.first.problem
    return {
        "title": group.title,
        "what": group.what,
        "us": microseconds(group.us if group.us is not None else group.inductor_us),
        "why": problem or "no pipeline is faster",
    }


def _region(a: Analysis, region: RegionAnalysis, index: int, runs: Mapping[str, Simulation]) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "id": f"region{index}",
        "name": region.name,
        "operators": ", ".join(launches.counted(region.operators)),
        "epilogues": not region.parts and not region.alone and bool(with_epilogues(region.nodes)),
    }
    plan = region.plan
    if plan is None:
        return shown
    shown["formulas"] = whole.formulas([p for c in plan.candidates for p in region.pipelines(c)], a.device)
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
        {"title": c.strategy, "chosen": c == first, "svg": Markup(drawing.svg(p)), "note": drawing.caption(p)}
        for c, p in drawn
    ]
    shown["timelines"] = [
        {
            "title": strategy,
            "chosen": strategy == (first.strategy if first.strategy in runs else next(iter(runs))),
            "svg": Markup(charts.gantt(run)),
            "note": run.note,
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


def _stages(described: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "name": s["name"],
            "sms": sms(s),
            "summary": s["summary"],
            "divided": DIVIDED.get(s["placement"], s["placement"]),
            "weights": weights(s),
            "shared": size(s["shared_bytes"]),
            "registers": "" if s["registers"] is None else str(s["registers"]),
        }
        for launch in described["launches"]
        for s in launch["stages"]
    ]
