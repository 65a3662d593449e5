"""Plans of all that was found in a graph: regions first, then sums of what those make that run, then chains.

One walk, whether a graph is compiled or explained: they differ in where plans come from, measurements or predictions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from torch import fx

from tilestream.devices import Device
from tilestream.graph.costs import flops
from tilestream.graph.nodes import computes, name
from tilestream.graph.provenance import module_path
from tilestream.graph.selection import Cut
from tilestream.plan.backward_chains import STRATEGY
from tilestream.plan.candidates import Candidate, Plan
from tilestream.plan.find import Found
from tilestream.plan.gradient_launches import GradientLaunch, gradient_launches
from tilestream.plan.pairs import Pair, find_pair, maker
from tilestream.plan.parts import RegionAnalysis
from tilestream.plan.ragged import edges_of


class Plans(Protocol):
    """Where plans come from. What raises here ends the walk."""

    def region(self, cut: Cut) -> RegionAnalysis:
        """The plan of a region, or why it has none: what ``of_cut`` makes of either."""
        ...

    def sums(self, launch: GradientLaunch) -> Plan | None:
        """The plan of a launch of weight gradients; None where it is the library's without one."""
        ...

    def chain(self, pair: Pair, apart: Sequence[Candidate]) -> Plan | None:
        """The plan of a backward chain beside what runs ``apart``; None where it is not joined without one."""
        ...


def plan_graph(found: Found, plans: Plans, device: Device) -> list[RegionAnalysis]:
    """All regions and launches of a graph with their plans; a chain in the place of the region that it begins with."""
    regions = [plans.region(cut) for cut in found.cuts]
    running = {n: cut for n, cut in enumerate(found.cuts) if regions[n].running}
    launches = gradient_launches(found.sites, device, [cut.nodes for cut in running.values()])
    sums = [of_launch(each, plan) for each in launches if (plan := plans.sums(each)) is not None]
    summing = [(each, told) for told in sums if isinstance(each := told.of, GradientLaunch) and told.running]
    together = {node: each.nodes for each in (*running.values(), *(x for x, _ in summing)) for node in each.nodes}
    outputs = {node: n for n, cut in running.items() for node in cut.outputs}
    chains: dict[int, RegionAnalysis] = {}
    for launch, told in summing:
        n = maker(launch, outputs)
        if n is None or n in chains:
            continue
        chain = _chain(running[n], launch, (regions[n], told), together, plans, device)
        if chain is not None:
            chains[n] = chain
            together |= dict.fromkeys(chain.nodes, chain.nodes)
    joined = {id(chain.parts[1]) for chain in chains.values()}
    return [*(chains.get(n, r) for n, r in enumerate(regions)), *(s for s in sums if id(s) not in joined)]


def numbered(made: RegionAnalysis, graph: int, prefix: str) -> RegionAnalysis:
    """The same as a part of graph ``graph``, with ``prefix`` before its name."""
    parts = tuple(numbered(part, graph, prefix) for part in made.parts)
    return replace(made, name=prefix + made.name, graph=graph, parts=parts)


def of_cut(
    cut: Cut, plan: Plan | None, problem: str = "", turned_us: float = 0.0, alone: bool = False
) -> RegionAnalysis:
    """A region with its plan, or with the reason why it has none."""
    region = cut.region
    return RegionAnalysis(
        name=region.name,
        rows=region.rows,
        operators=region.operators,
        sources=region.sources,
        program=region.program,
        plan=plan,
        problem=problem,
        flops=sum(flops.of_node(n) for n in cut.nodes if computes(n)),
        nodes=cut.nodes,
        modules=_modules(cut.nodes),
        turned_us=turned_us,
        alone=alone,
        kind="ragged" if region.program.ragged else "region",
        edges=edges_of(region) if region.program.ragged else 0,
        of=cut,
    )


def of_launch(launch: GradientLaunch, plan: Plan) -> RegionAnalysis:
    """A launch of weight gradients with its plan."""
    pipeline = plan.candidates[0].pipeline
    assert pipeline is not None
    return RegionAnalysis(
        name=launch.name,
        rows=launch.rows,
        operators=tuple(map(name, launch.nodes)),
        sources=tuple(dict.fromkeys(site.source for site in launch.sites if site.source)),
        program=pipeline,
        plan=plan,
        flops=sum(2 * site.rows * site.out * site.k for site in launch.sites),
        nodes=launch.nodes,
        modules=_modules(launch.nodes),
        kind="weight gradients",
        of=launch,
    )


def of_pair(pair: Pair, plan: Plan, parts: tuple[RegionAnalysis, RegionAnalysis]) -> RegionAnalysis:
    """A backward chain with its plan. ``parts``: its region and its sums."""
    region, sums = parts
    return RegionAnalysis(
        name=f"{region.name}+{sums.name}",
        rows=sums.rows,
        operators=(*region.operators, *sums.operators),
        sources=tuple(dict.fromkeys((*region.sources, *sums.sources))),
        program=pair.joined.pipelines[0],
        plan=plan,
        flops=region.flops + sums.flops,
        nodes=(*region.nodes, *sums.nodes),
        modules=tuple(dict.fromkeys((*region.modules, *sums.modules))),
        kind="backward chain",
        launches=pair.joined.pipelines,
        parts=parts,
        of=pair,
    )


def _chain(
    cut: Cut,
    launch: GradientLaunch,
    parts: tuple[RegionAnalysis, RegionAnalysis],
    together: Mapping[fx.Node, Sequence[fx.Node]],
    plans: Plans,
    device: Device,
) -> RegionAnalysis | None:
    """A region and its sums as one, where that would run."""
    (rows_by,), (summed_by,) = (part.running for part in parts)
    pair = find_pair(cut, launch, (rows_by, summed_by), together, device)
    apart = [c for part in parts if (c := part.runs) is not None]
    plan = None if pair is None else plans.chain(pair, apart)
    if pair is None or plan is None or plan.chosen.strategy != STRATEGY:
        return None
    return of_pair(pair, plan, parts)


def _modules(nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for node in nodes if (path := module_path(node))))
