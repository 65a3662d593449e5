"""The analysis of captured graphs: what is found in each, planned by prediction where a GPU would measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tilestream.devices import Device
from tilestream.errors import TilestreamError
from tilestream.graph.capture import Captured
from tilestream.graph.costs import flops
from tilestream.graph.nodes import takes_tf32
from tilestream.graph.provenance import module_path
from tilestream.graph.region import Region
from tilestream.graph.selection import Cut
from tilestream.options import Options
from tilestream.plan import planner, ragged
from tilestream.plan.analysis import Analysis
from tilestream.plan.candidates import Candidate, Plan, expected_of
from tilestream.plan.chain_choice import expected
from tilestream.plan.chooser import decide
from tilestream.plan.decode import steps_of
from tilestream.plan.finalists import Shown
from tilestream.plan.find import LONE, NO_ROWS, Found, find, is_lone
from tilestream.plan.gradient_launches import GradientLaunch, question
from tilestream.plan.gradients import STRATEGY as STATIONARY
from tilestream.plan.hints import hints, kept_lists
from tilestream.plan.pairs import Pair
from tilestream.plan.parts import Excluded, GraphAnalysis, RegionAnalysis, share_of
from tilestream.plan.plan_graph import numbered, of_cut, plan_graph
from tilestream.plan.tails import all_promising
from tilestream.plan.turned import Turned, reads_them, turned
from tilestream.plan.whole import inductor_kernels

STRATEGIES = ("vertical", "spatial", "shared", "bulk")


def of_graphs(
    model: Callable[..., Any],
    captured: Captured,
    options: Options,
    device: Device,
    training: bool = False,
    sums: bool = True,
) -> Analysis:
    """The analysis of captured graphs.

    Args:
        sums: whether sums by an index are made in sorted order where that pays.
    """
    if training:
        options = options.with_(constant_weights=False)  # steps of training change them
    graphs = []
    for graph, kind in zip(captured.graphs, captured.kinds, strict=True):
        found = find(graph, kind, options, device, sums=sums)
        steps = [step.share for step in steps_of(graph.graph)]
        graphs.append(GraphAnalysis(kind, sum(steps, share_of(graph.graph)), found))
    made = Analysis(
        model=str(getattr(model, "__name__", type(model).__name__)),
        device=device.name,
        options=options,
        graphs=tuple(graphs),
        eager=captured.eager,
        breaks=captured.breaks,
        mode=("train" if model.training else "eval") if isinstance(model, torch.nn.Module) else "",
        training=training,
        hints=(*hints(model, captured, training), *(kept_lists(captured) if options.keep_lists else ())),
        tf32=takes_tf32(),
    )
    return replan(made, device)


def replan(analysis: Analysis, device: Device | None = None, strategy: str | None = None) -> Analysis:
    """What was found planned for another device, by another strategy, or both; predictions only.

    A region that has no pipeline of ``strategy`` has no plan, and is Inductor's. Sums of gradients are planned by no
    strategy.
    """
    device = device or analysis.hardware
    assert device is not None
    options = analysis.options if strategy is None else analysis.options.with_(strategy=strategy)
    regions: list[RegionAnalysis] = []
    exclusions: list[Excluded] = []
    for index, graph in enumerate(analysis.graphs):
        found = graph.found
        if graph.kind == "inference" and options.target != "reference":
            found = found.with_tails(all_promising(found, options, device))
        prefix = f"graph{index}." if len(analysis.graphs) > 1 else ""
        regions += [numbered(made, index, prefix) for made in _planned(found, options, device, analysis.tf32)]
        summed = {node for site in found.sites for node in site.nodes}
        exclusions += [
            Excluded(e.op, e.source, e.reason, module_path(node), flops.of_node(node), index)
            for node, e in zip(found.outside, found.exclusions, strict=True)
            if node not in summed
        ]
    return replace(
        analysis,
        device=device.name,
        hardware=device,
        options=options,
        regions=tuple(regions),
        exclusions=tuple(exclusions),
        measured_us=None,
        inductor_measured_us=None,
    )


def by_strategy(analysis: Analysis) -> dict[str, Analysis]:
    """``analysis`` by each strategy that has a pipeline for any of its regions; the plan it has by ``auto`` first."""
    own = str(analysis.options.strategy)
    if own != "auto":
        return {own: analysis}
    found = {own: analysis}
    for name in STRATEGIES:
        made = replan(analysis, strategy=name)
        if any(r.plan is not None and r.program.strategy != STATIONARY for r in made.regions):
            found[name] = made
    return found


def predictions(analysis: Analysis) -> dict[str, float]:
    """Strategy to predicted microseconds of the whole model; ``inductor``: with no pipeline at all."""
    found = {name: us for name, a in by_strategy(analysis).items() if (us := a.predicted_us) is not None}
    other = analysis.inductor_predicted_us
    return found if other is None else {**found, "inductor": other}


@dataclass(frozen=True)
class Predicted:
    """Plans by prediction (``plan_graph.Plans``). ``alone``: Inductor has the graph as it is where a region is its."""

    options: Options
    device: Device
    tf32: bool
    alone: bool

    def region(self, cut: Cut) -> RegionAnalysis:
        region, options = cut.region, self.options
        plan, problem, copied = None, "", turned(region, options)
        try:
            if not region.rows:
                problem = NO_ROWS
            elif options.target != "reference" and is_lone(region, options):
                problem = LONE
            else:
                plan = self._plan(region, copied, lambda: self._inductor_us(cut.nodes))
        except TilestreamError as failure:
            problem = str(failure)
        copied_us = 0.0 if plan is not None and reads_them(plan.chosen) else copied.us
        return of_cut(cut, plan, problem, copied_us, self.alone)

    def _inductor_us(self, nodes: Sequence[fx.Node]) -> float:
        """What is shown of Inductor's kernels of operators."""
        return inductor_kernels(nodes, self.device, self.tf32, epilogues=not self.alone).predicted_us

    def _plan(self, region: Region, copied: Turned, shown: Shown) -> Plan:
        if region.program.ragged:
            return ragged.plan(region, self.device, self.options, shown)
        program, rows = region.program, region.rows
        return planner.plan(program, rows, self.device, self.options, turned=copied, fallback_us=shown)

    def sums(self, launch: GradientLaunch) -> Plan:
        return decide(question(launch, self.device, forced=self.options.target == "reference"))

    def chain(self, pair: Pair, apart: Sequence[Candidate]) -> Plan:
        apart_us = sum(expected_of(c) for c in apart if c.predicted_us is not None)
        return expected(pair.joined, pair.launch.rows, self.device, self.options, apart_us)


def _planned(found: Found, options: Options, device: Device, tf32: bool) -> list[RegionAnalysis]:
    """Plans of a graph, each region chosen against what Inductor makes of it where others stream; if none of them does,
    against what Inductor makes of the graph as it is."""
    made: list[RegionAnalysis] = []
    for alone in (False, True) if len(found.cuts) + len(found.sites) > 1 else (True,):
        made = plan_graph(found, Predicted(options, device, tf32, alone), device)
        if any(r.plan is not None and r.plan.chosen.pipeline is not None for r in made):
            break
    return made
