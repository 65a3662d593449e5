"""``tilestream.explain`` as text and as JSON: coverage, regions, candidates, stages, queues, exclusions."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from tilestream.analysis import Analysis, RegionAnalysis
from tilestream.report import facts

if TYPE_CHECKING:
    from tilestream.planner import Plan

WIDTH = 120


def as_text(shown: RenderableType) -> str:
    """What rich would show on a terminal of ``WIDTH`` columns, without colour."""
    file = io.StringIO()
    Console(file=file, width=WIDTH, color_system=None, highlight=False).print(shown)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


class Report:
    """What tilestream makes of a model. ``str()`` is the text, ``json()`` the same as plain data."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis

    def __str__(self) -> str:
        return as_text(self)

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = [_heading(self.analysis)]
        for region in self.analysis.regions:
            parts += _region(region)
        parts += _exclusions(self.analysis)
        return Group(*parts)

    def json(self) -> dict[str, Any]:
        """Every fact of the report; microseconds and bytes as the names say."""
        a = self.analysis
        return {
            "model": a.model,
            "device": a.device,
            "options": facts.options_facts(a.options),
            "graphs": a.graphs,
            "graph_breaks": list(a.breaks),
            "operators": a.operators,
            "covered": a.covered,
            "coverage": a.coverage,
            "regions": [_region_json(r) for r in a.regions],
            "exclusions": [{"op": e.op, "source": e.source, "reason": e.reason} for e in a.exclusions],
        }


def _region_json(region: RegionAnalysis) -> dict[str, Any]:
    plan = region.plan
    chosen = None
    if plan is not None:
        pipeline = plan.chosen.pipeline
        chosen = facts.candidate_facts(plan.chosen)
        chosen["pipeline"] = facts.pipeline_facts(pipeline) if pipeline is not None else None
    return {
        "name": region.name,
        "graph": region.graph,
        "rows": region.rows,
        "operators": list(region.operators),
        "sources": list(region.sources),
        "problem": region.problem,
        "candidates": [facts.candidate_facts(c) for c in plan.candidates] if plan is not None else [],
        "chosen": chosen,
    }


def _heading(a: Analysis) -> RenderableType:
    regions = f"{len(a.regions)} region{'s' * (len(a.regions) != 1)}"
    graphs = f"{a.graphs} graph{'s' * (a.graphs != 1)}"
    text = Text()
    text.append(f"{a.model}", style="bold")
    text.append(f" on {a.device}: {a.covered} of {a.operators} operators ({a.coverage:.0%}) in {regions}, {graphs}\n")
    if not a.regions:
        text.append("No region: the whole model runs through Inductor.\n")
    for reason in a.breaks:
        text.append(f"graph break: {reason}\n", style="yellow")
    return text


def _region(region: RegionAnalysis) -> list[RenderableType]:
    title = f"region {region.name}: {len(region.operators)} operators, planned for {region.rows:,} rows"
    parts: list[RenderableType] = [Rule(title, align="left", style="cyan")]
    parts.append(Text(_counted(region.operators)))
    if region.sources:
        parts.append(Text("from " + _shortened(region.sources), style="dim"))
    if region.plan is None:
        return [*parts, Text(f"not planned, left to Inductor: {region.problem}", style="yellow")]
    parts.append(candidates(region.plan))
    parts += [Text(f"{c.name}: {c.rejected}", style="dim") for c in region.plan.candidates if c.rejected]
    pipeline = region.plan.chosen.pipeline
    if pipeline is None:
        return [*parts, Text("chosen: Inductor, nothing above is faster", style="yellow")]
    described = facts.pipeline_facts(pipeline)
    parts.append(_stages(described))
    if described["dram_queues"] or any(launch["queues"] for launch in described["launches"]):
        parts.append(_queues(described))
    return parts


def candidates(plan: Plan) -> Table:
    """A plan's candidates, the chosen one marked."""
    table = _table("candidates")
    table.add_column("")
    table.add_column("strategy", min_width=24)
    for heading in ("predicted us", "measured us", "launches", "stages"):
        table.add_column(heading, justify="right")
    for candidate in plan.candidates:
        chosen = candidate == plan.chosen
        pipeline = candidate.pipeline
        table.add_row(
            "*" if chosen else "",
            "inductor" if candidate.strategy == "fallback" else candidate.name,
            microseconds(candidate.predicted_us),
            microseconds(candidate.measured_us),
            "" if pipeline is None else str(len(list(pipeline.launches()))),
            "" if pipeline is None else str(len(pipeline.stages)),
            style="bold green" if chosen else "",
        )
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)


def _stages(described: dict[str, Any]) -> Table:
    table = _table("stages on SMs, one CTA each")
    several = len(described["launches"]) > 1
    if several:
        table.add_column("launch", justify="right")
    for heading in ("stage", "SMs", "tile ops", "placement", "weights"):
        table.add_column(heading, overflow="fold")
    for heading in ("shared", "registers"):
        table.add_column(heading, justify="right")
    for index, launch in enumerate(described["launches"]):
        for stage in launch["stages"]:
            row = [
                stage["name"],
                sms(stage),
                stage["summary"],
                stage["placement"],
                weights(stage),
                size(stage["shared_bytes"]),
                "" if stage["registers"] is None else str(stage["registers"]),
            ]
            table.add_row(*([str(index)] if several else []), *row)
    return table


def sms(stage: dict[str, Any]) -> str:
    """The SMs of a stage: ``0-131``, and ``in pairs`` where two share the streaming of weights."""
    first, last = stage["ctas"]
    return (f"{first}" if first == last else f"{first}-{last}") + (" in pairs" if stage["group"] > 1 else "")


def weights(stage: dict[str, Any]) -> str:
    """Bytes of a stage's weights and where they are; and ``one in flight`` where pages go back as soon as used."""
    if not stage["weight_bytes"]:
        return ""
    return f"{size(stage['weight_bytes'])} {stage['residency']}" + ", one in flight" * (stage["in_flight"] == 1)


def _queues(described: dict[str, Any]) -> Table:
    table = _table("queues")
    for heading in ("tile", "from", "to", "where"):
        table.add_column(heading, overflow="fold")
    for heading in ("tile size", "depth", "ring"):
        table.add_column(heading, justify="right")
    everything = [q for launch in described["launches"] for q in launch["queues"]] + described["dram_queues"]
    for q in everything:
        dram = q["transport"] == "dram"
        table.add_row(
            f"{q['tile']} [dim]{q['features']} {q['dtype']}[/dim]",
            q["producer"],
            ", ".join(q["consumers"]),
            q["transport"].upper(),
            size(q["tile_bytes"]),
            "whole" if dram else str(q["depth"]),
            "" if dram else size(q["ring_bytes"]),
        )
    return table


def _exclusions(a: Analysis) -> list[RenderableType]:
    if not a.exclusions:
        return []
    table = _table("operators left to Inductor")
    for heading in ("operator", "reason", "source"):
        table.add_column(heading, overflow="fold")
    for e in a.exclusions:
        table.add_row(escape(e.op), escape(e.reason), escape(e.source))
    return [Rule(style="cyan"), table]


def microseconds(value: float | None) -> str:
    """Three significant digits or all before the point; empty for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def size(value: int | None) -> str:
    """Bytes in binary units; empty for None."""
    if value is None:
        return ""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value} B"


def _counted(operators: tuple[str, ...]) -> str:
    counts: dict[str, int] = {}
    for name in operators:
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(name if n == 1 else f"{name} x{n}" for name, n in counts.items())


def _shortened(sources: tuple[str, ...], most: int = 3) -> str:
    unique = list(dict.fromkeys(s for s in sources if s))
    more = f" and {len(unique) - most} more lines" if len(unique) > most else ""
    return "; ".join(unique[:most]) + more
