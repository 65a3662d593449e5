"""Puts a call of ``tilestream::region`` in the place of every region of a graph."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx

from tilestream.graph.pixels import from_pixels
from tilestream.graph.region import Region
from tilestream.graph.selection import Cut, Partition
from tilestream.graph.settled import settle
from tilestream.graph.views import join_maxima
from tilestream.run.operator import REGION

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Placed:
    """A region that is now a call: ``spec`` is the operator's argument."""

    region: Region
    spec: str


def place(owner: fx.GraphModule, found: Partition, spec_for: Callable[[Region], str | None]) -> list[Placed]:
    """Replace, in ``owner``, every region that has a spec by one call; what is left is in a legal order.

    Args:
        found: the partition of ``owner``.
        spec_for: the operator's argument for a region (``run.spec.encode``); None leaves it to Inductor.
    """

    by_name = {n.name: n for n in owner.graph.nodes}
    placed: list[Placed] = []
    doomed: list[fx.Node] = []
    for cut in found.cuts:
        region = with_sizes(cut.region, owner)
        spec = spec_for(region)
        if spec is None:
            continue
        _insert(owner.graph, cut, region, spec, by_name)
        doomed += cut.nodes
        placed.append(Placed(region, spec))
    if placed:
        for node in reversed(doomed):
            if not node.users:
                owner.graph.erase_node(node)
        join_maxima(owner.graph)
        from_pixels(owner.graph)
        settle(owner, sort=True)
    log.info("%d regions are calls, %d of them different", len(placed), len({p.spec for p in placed}))
    return placed


def _insert(graph: fx.Graph, cut: Cut, region: Region, spec: str, by_name: dict[str, fx.Node]) -> None:
    """Insert the call where the region's last node stands; users that stand before it are sorted behind it later.

    No operator that mutates lies between two nodes of a region, so the call lies on their side of each.
    """
    arguments = [by_name[name] for name in region.arguments]
    tensors = [a for a in arguments if isinstance(a.meta["val"], torch.Tensor)]
    sizes = [a for a in arguments if not isinstance(a.meta["val"], torch.Tensor)]
    with graph.inserting_before(cut.nodes[-1]):
        call = graph.call_function(REGION, (tensors, sizes, spec))
        last = cut.outputs[-1]
        call.meta = {"val": [o.meta["val"] for o in cut.outputs], "stack_trace": last.meta.get("stack_trace")}
        inside = frozenset(cut.nodes)
        for index, output in enumerate(cut.outputs):
            part = graph.call_function(operator.getitem, (call, index))
            part.meta = dict(output.meta)
            output.replace_all_uses_with(part, delete_user_cb=lambda user: user not in inside)
            by_name[output.name] = part


def with_sizes(region: Region, owner: fx.GraphModule) -> Region:
    """The region with one more argument for each symbolic size of its results that no argument of its tells."""
    known = {symbol for symbol, _, _ in region.symbols}
    wanted = {
        symbol
        for result in region.results
        for dim in result.shape
        if isinstance(dim, sympy.Expr)
        for symbol in dim.free_symbols - known
    }
    for symbol in sorted(wanted, key=str):
        size = next((n for n in owner.graph.nodes if n.op == "placeholder" and _is_size(n, symbol)), None)
        if size is None:
            continue  # left to the check of the results' shapes
        graph = region.graph.graph
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            graph.placeholder(size.name).meta = dict(size.meta)
        region.graph.recompile()
        region = replace(
            region,
            arguments=(*region.arguments, size.name),
            symbols=(*region.symbols, (symbol, len(region.arguments), -1)),
        )
    return region


def _is_size(node: fx.Node, symbol: sympy.Basic) -> bool:
    found = node.meta.get("val")
    return isinstance(found, torch.SymInt) and found.node.expr == symbol
