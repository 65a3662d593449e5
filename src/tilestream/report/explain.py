"""``tilestream.explain`` as text and as JSON: coverage, regions, candidates, stages, queues, exclusions."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from tilestream.graph.rewrites.epilogues import with_epilogues
from tilestream.ir.float32 import by_parts
from tilestream.ir.launches import cut_at_dram
from tilestream.plan.analysis import Analysis
from tilestream.plan.candidates import FALLBACK, rejections
from tilestream.plan.parts import RegionAnalysis
from tilestream.report import excluded, facts, launches, parts, steps, whole
from tilestream.report.glossary import DIVIDED
from tilestream.report.words import WIDTH, count, microseconds, shortened, size

if TYPE_CHECKING:
    from tilestream.plan.candidates import Candidate

REGISTERS = (
    "registers: of a consumer's thread, estimated. The compiler reports 168, with which every thread starts; then "
    "setmaxnreg moves the loader's to the consumers."
)


def as_text(shown: RenderableType) -> str:
    """What rich would show on a terminal of ``WIDTH`` columns, without colour."""
    file = io.StringIO()
    Console(file=file, width=WIDTH, color_system=None, highlight=False, markup=False, emoji=False).print(shown)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


class Report:
    """What tilestream makes of a model. ``str()`` is the text, ``json()`` the same as plain data."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis

    def __str__(self) -> str:
        return as_text(self)

    def __rich__(self) -> RenderableType:
        a = self.analysis
        shown: list[RenderableType] = [whole.render(a), *parts.render(a), *launches.render(a), *steps.render(a)]
        for region in a.regions:
            shown += _region(region, a)
        if any(r.runner not in ("inductor", "eager") for r in a.regions):
            shown.append(Text(REGISTERS, style="dim"))
        return Group(*shown, *_exclusions(a), *_eager(a))

    def json(self) -> dict[str, Any]:
        """Every fact of the report; microseconds and bytes as the names say."""
        a = self.analysis
        return {
            "model": a.model,
            "device": a.device,
            "options": facts.options_facts(a.options),
            **whole.facts(a),
            "graphs": [{"kind": g.kind, "operators": g.whole.operators, "flops": g.whole.flops} for g in a.graphs],
            "graph_breaks": list(a.breaks),
            "notes": list(a.hints),
            "parts": parts.facts(parts.parts(a)),
            "launches": [] if a.empty else a.whole.json()["launches"],
            "regions": [_region_json(r, a) for r in a.regions],
            "exclusions": [
                {
                    "op": e.op,
                    "module": e.module,
                    "source": e.source,
                    "reason": e.reason,
                    "graph": e.graph,
                    "flops": e.flops,
                }
                for e in a.exclusions
            ],
            "eager": [{"op": e.op, "source": e.source, "flops": e.flops} for e in a.eager],
        }


def _region_json(region: RegionAnalysis, a: Analysis) -> dict[str, Any]:
    plan = region.plan
    chosen = None
    if plan is not None:
        pipelines = region.pipelines(plan.chosen)
        chosen = facts.candidate_facts(plan.chosen, a.candidate_us(region, plan.chosen))
        chosen["pipeline"] = facts.pipeline_facts(*pipelines) if pipelines else None
    return {
        "name": region.name,
        "kind": region.kind,
        "graph": region.graph,
        "rows": region.rows,
        "flops": region.flops,
        "runs": region.runner,
        "operators": list(region.operators),
        "sources": list(region.sources),
        "modules": list(region.modules),
        "problem": region.problem,
        "candidates": [facts.candidate_facts(c, a.candidate_us(region, c)) for c in plan.candidates] if plan else [],
        "chosen": chosen,
    }


def _region(region: RegionAnalysis, a: Analysis) -> list[RenderableType]:
    kind = a.graphs[region.graph].kind if region.graph < len(a.graphs) else "inference"
    where = f", {kind} graph" if len(a.graphs) > 1 else ""
    done = "summed over" if region.kind == "weight gradients" else "planned for"
    operators = count(len(region.operators), "operator")
    rows = f"{region.rows:,} rows"
    if region.kind == "ragged":
        rows = f"{region.rows:,} nodes of {region.edges / max(1, region.rows):.1f} edges in the mean"
    title = f"{region.kind} {region.name}: {operators}, {done} {rows}{where}"
    shown: list[RenderableType] = [Rule(title, align="left", style="cyan")]
    shown.append(Text(_counted(region.operators)))
    if region.modules:
        shown.append(Text("modules " + shortened(region.modules, 8), style="dim"))
    if region.sources:
        shown.append(Text("from " + shortened(region.sources), style="dim"))
    if region.plan is None:
        who = "left to Inductor" if region.rows else "run eagerly"
        return [*shown, Text(f"not planned, {who}: {region.problem}", style="yellow")]
    runs = region.runs
    shown.append(candidates(a, region, runs))
    shown += [Text(line, style="dim") for line in rejections(region.plan.candidates)]
    tried = [p for c in region.plan.candidates for p in region.pipelines(c)]
    shown += [Text(line, style="dim") for line in whole.formulas(tried, a.device)]
    if not region.parts and not region.alone and (taken := with_epilogues(region.nodes)):
        told = f"inductor: {count(len(taken), 'activation')} inside of products, as the region runs on Inductor; "
        shown.append(Text(f"{told}all on Inductor, each is a kernel's work of its own", style="dim"))
    if region.turned_us and region.plan.chosen.pipeline is not None:
        how = "are float32, and multiplied as parts of bf16" if by_parts(region.program) else "lie transposed"
        told = f"its weights {how}: {microseconds(region.turned_us)} us of each prediction copy them"
        shown.append(Text(told, style="dim"))
    pipelines = region.pipelines(runs)
    if not pipelines:
        return [*shown, Text("chosen: Inductor, nothing above is faster", style="yellow")]
    described = facts.pipeline_facts(*pipelines)
    shown.append(_stages(described))
    if described["dram_queues"] or any(launch["queues"] for launch in described["launches"]):
        shown.append(_queues(described))
    return shown


def strategy(region: RegionAnalysis, candidate: Candidate) -> str:
    """What a reader knows a candidate as: of a backward chain the fallback is what it is made of, apart."""
    if candidate.pipeline is not None or candidate.strategy != FALLBACK:
        return candidate.name
    return f"apart: {' and '.join(part.name for part in region.parts)}" if region.parts else "inductor"


def candidates(a: Analysis, region: RegionAnalysis, runs: Candidate | None = None) -> Table:
    """A region's candidates, the one that ``runs`` (by default the chosen one) marked."""
    plan = region.plan
    assert plan is not None
    table = _table(f"candidates (predicted by the {whole.simulator(a.device)})")
    table.add_column("")
    table.add_column("strategy", min_width=24)
    for heading in ("predicted us", "measured us", "launches", "stages"):
        table.add_column(heading, justify="right")
    for candidate in plan.candidates:
        chosen = candidate == (runs or plan.chosen)
        pipelines = region.pipelines(candidate)
        table.add_row(
            "*" if chosen else "",
            strategy(region, candidate),
            microseconds(a.candidate_us(region, candidate)),
            microseconds(candidate.measured_us),
            str(sum(len(cut_at_dram(p)) for p in pipelines)) if pipelines else "",
            str(sum(len(p.stages) for p in pipelines)) if pipelines else "",
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
    for heading in ("stage", "SMs", "tile ops", "tile by", "weights"):
        table.add_column(heading, overflow="fold")
    for heading in ("shared", "registers"):
        table.add_column(heading, justify="right")
    for index, launch in enumerate(described["launches"]):
        for stage in launch["stages"]:
            row = [
                stage["name"],
                sms(stage),
                stage["summary"],
                DIVIDED.get(stage["placement"], stage["placement"]),
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
            Text.assemble(f"{q['tile']} ", (f"{q['features']} {q['dtype']}", "dim")),
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
    headings = ("operator", "of the FLOPs", "module", "reason", "what to do", "source")
    for heading in headings:
        table.add_column(heading, overflow="fold", justify="right" if heading == headings[1] else "left")
    for g in excluded.groups(a.exclusions):
        cells = (g.title, excluded.share(g, a), shortened(g.modules), g.reason, g.advice, shortened(g.sources, 1))
        table.add_row(*map(Text, cells))
    return [Rule(style="cyan"), table]


def _eager(a: Analysis) -> list[RenderableType]:
    if not a.eager:
        return []
    table = _table("operators that run eagerly, outside of every graph")
    for heading in ("operator", "source"):
        table.add_column(heading, overflow="fold")
    lines: dict[str, list[str]] = {}
    for e in a.eager:
        lines.setdefault(e.source, []).append(e.op)
    for source, names in lines.items():
        table.add_row(Text(_counted(tuple(names))), Text(source))
    return [Rule(style="cyan"), table]


def _counted(operators: tuple[str, ...]) -> str:
    counts: dict[str, int] = {}
    for name in operators:
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(name if n == 1 else f"{name} x{n}" for name, n in counts.items())
