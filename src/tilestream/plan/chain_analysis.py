"""Regions of a backward graph and the sums of what they make, told as the backward chains that would run.

What ``run.chain_pairs`` finds among the calls of a graph is found here among its operators, which are no calls yet.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from tilestream.devices import Device
from tilestream.errors import VerifyError
from tilestream.graph.nodes import is_view
from tilestream.graph.origins import bare, is_made_of, origin_of, same_as, unpadded
from tilestream.graph.selection import Cut
from tilestream.options import Options
from tilestream.plan.backward_chains import STRATEGY, Joined, join
from tilestream.plan.candidates import Candidate, expected_of
from tilestream.plan.chain_choice import expected
from tilestream.plan.gradient_launches import GradientLaunch
from tilestream.plan.parts import RegionAnalysis

log = logging.getLogger(__name__)


def with_chains(
    regions: Sequence[RegionAnalysis],
    cuts: Sequence[Cut],
    sums: Sequence[RegionAnalysis],
    launches: Sequence[GradientLaunch],
    device: Device,
    options: Options,
) -> list[RegionAnalysis]:
    """``regions`` and ``sums``, in order; a chain in the place of the region that it begins with.

    Args:
        cuts, launches: what the analyses are of, in their order.
    """
    made: dict[str, RegionAnalysis] = {}
    gone: set[str] = set()
    together = {node: cut.nodes for cut in cuts for node in cut.nodes}
    for launch, told in zip(launches, sums, strict=True):
        makers = [k for k, cut in enumerate(cuts) if any(_made_by(site.gradient, cut) for site in launch.sites)]
        if len(makers) != 1 or regions[makers[0]].name in made:
            continue
        (number,) = makers
        chain = _chain(_Pair(cuts[number], regions[number], launch, told), together, device, options)
        if chain is not None:
            made[regions[number].name] = chain
            gone.add(told.name)
    return [made.get(r.name, r) for r in (*regions, *sums) if r.name not in gone]


@dataclass(frozen=True)
class _Pair:
    """A region and a launch that sums what it makes, with the analysis of each."""

    cut: Cut
    region: RegionAnalysis
    launch: GradientLaunch
    sums: RegionAnalysis


def _chain(
    pair: _Pair, together: Mapping[fx.Node, Sequence[fx.Node]], device: Device, options: Options
) -> RegionAnalysis | None:
    """The analysis of both together, where that would run; ``together``: what each node of a region runs with."""
    region, sums = pair.region, pair.sums
    apart = [r.runs(options.target) for r in (region, sums)]
    joined = _joined(pair, apart, together, device)
    if joined is None:
        return None
    apart_us = sum(expected_of(c) for c in apart if c is not None and c.predicted_us is not None)
    plan = expected(joined, sums.rows, device, options, apart_us)
    if plan.chosen.strategy != STRATEGY:
        return None

    def both(what: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*getattr(region, what), *getattr(sums, what))))

    return RegionAnalysis(
        name=f"{region.name}+{pair.launch.name}",
        graph=region.graph,
        rows=sums.rows,
        operators=(*region.operators, *sums.operators),
        sources=both("sources"),
        program=joined.pipelines[0],
        plan=plan,
        flops=region.flops + sums.flops,
        nodes=(*region.nodes, *sums.nodes),
        modules=both("modules"),
        kind="backward chain",
        launches=joined.pipelines,
        parts=(region, sums),
    )


def _joined(
    pair: _Pair,
    runs: Sequence[Candidate | None],
    together: Mapping[fx.Node, Sequence[fx.Node]],
    device: Device,
) -> Joined | None:
    """The chain that the region and its sums are, if both would run as pipelines and are one.

    Args:
        runs: what would run of each.
    """
    cut, launch = pair.cut, pair.launch
    rows_by, summed_by = (None if c is None else c.pipeline for c in runs)
    if rows_by is None or summed_by is None or cut.region.symbols:
        return None
    own = cut.region
    results = {node: result.tensor for node, result in zip(cut.outputs, own.results, strict=True)}
    by_name = {n.name: n for n in cut.nodes[0].graph.nodes}
    inputs = {(origin_of(by_name[own.arguments[o.index]]), bare(o.steps)): o.tensor for o in own.inputs}
    same: dict[str, str] = {}
    for tensor, node in launch.operands.items():
        made = _made_by(node, cut)
        if made is not None:
            same[tensor] = results[made]
        elif (known := inputs.get((unpadded(node), ()))) is not None:
            same[tensor] = known
        elif is_made_of(unpadded(node), set(cut.nodes), together):
            return None
    summing = {node for site in launch.sites for node in site.nodes}
    wanted = tuple(t for node, t in results.items() if any(r not in summing for r in _readers(node, set(cut.nodes))))
    try:
        return join(rows_by, summed_by, same, wanted, pair.sums.rows, device)
    except VerifyError as reason:
        log.debug("%s and %s are no backward chain: %s", pair.region.name, pair.sums.name, reason)
        return None


def _made_by(node: fx.Node, cut: Cut) -> fx.Node | None:
    """The result of a region that a node is, under any leading dimensions."""
    current: fx.Node | None = node
    while current is not None and current not in cut.outputs:
        current = same_as(current)
    return current


def _readers(node: fx.Node, inside: set[fx.Node]) -> list[fx.Node]:
    """Who uses a region's result outside of it, through any views."""
    users = [user for user in node.users if user not in inside]
    return [r for user in users for r in (_readers(user, inside) if is_view(user) else [user])]
