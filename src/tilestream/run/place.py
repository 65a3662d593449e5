"""Calls of ``tilestream::region`` in the place of regions, sums of gradients and backward chains of a graph."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import sympy
import torch
from torch import Tensor, fx

from tilestream.graph.nodes import aten
from tilestream.graph.region import Region
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.table import When, rewrite
from tilestream.graph.selection import Cut, Partition
from tilestream.graph.settled import settle
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.pipeline import Pipeline
from tilestream.plan.gradient_launches import GradientLaunch
from tilestream.run.chain_calls import ChainCalls
from tilestream.run.operator import REGION
from tilestream.run.spec import RegionSpec, encode, spec_of, sums_spec

log = logging.getLogger(__name__)

SPEC = "tilestream.spec"
"""In the ``meta`` of a call: what it says as text."""


def place(
    owner: fx.GraphModule,
    found: Partition,
    pipeline_of: Callable[[Region], Pipeline | None],
    kind: str,
    constant: bool = False,
) -> list[Region]:
    """Replace, in ``owner``, every region that has a pipeline by one call; what is left is in a legal order.

    Args:
        found: the partition of ``owner``.
        kind, constant: as ``RegionSpec`` has them.

    Returns:
        The regions that are calls now.
    """
    calls = Calls(owner)
    wanted = ((cut, pipeline_of(cut.region)) for cut in found.cuts)
    placed = [calls.of_region(cut, made, kind, constant) for cut, made in wanted if made is not None]
    calls.settle()
    return placed


class Calls:
    """Puts calls in the place of parts of a graph, which then has to be settled.

    A call stands where the last node of its part stands; users that stand before it are sorted behind it later. No
    operator that mutates lies between two nodes of a region, so the call lies on their side of each.
    """

    def __init__(self, owner: fx.GraphModule) -> None:
        self._owner, self._graph = owner, owner.graph
        self._now = {n.name: n for n in owner.graph.nodes}
        self._replaced: list[fx.Node] = []

    def of_region(self, cut: Cut, pipeline: Pipeline, kind: str, constant: bool = False) -> Region:
        """One call in the place of a region, which gets an argument for each size that its results need.

        Args:
            constant: as ``RegionSpec`` has it.

        Raises:
            PlanError: as ``spec_of``.
        """
        region = with_sizes(cut.region, self._owner)
        spec = spec_of(region, pipeline, kind, constant)
        arguments = [self._now[name] for name in region.arguments]
        with self._graph.inserting_before(cut.nodes[-1]):
            made = self._call(arguments, spec, [o.meta["val"] for o in cut.outputs], cut.outputs[-1])
            self._instead(dict(zip(cut.outputs, made, strict=True)), cut.nodes)
        return region

    def of_sums(self, launch: GradientLaunch, pipeline: Pipeline, kind: str) -> None:
        """One call in the place of weight gradients, each with its bias's."""
        spec = sums_spec(launch, pipeline, kind)
        last = launch.sites[-1].product
        with self._graph.inserting_before(last):
            operands = self._operands(launch, launch.operands)
            made = self._call(operands, spec, results_like(spec, last.meta["val"]), last)
            self._instead(dict(zip(launch.results.values(), made, strict=True)), launch.nodes)

    def of_chain(self, chain: ChainCalls) -> None:
        """Calls one after another in the place of a region and its sums."""
        cut, launch = chain.pair.cut, chain.pair.launch
        own = {r.tensor: node for r, node in zip(cut.region.results, cut.outputs, strict=True)}
        results = launch.results | {name: own[name] for name in chain.pair.wanted}
        have: dict[str, fx.Node] = {}
        last = launch.sites[-1].product
        with self._graph.inserting_before(last):
            given = [self._now[name] for name in cut.region.arguments]
            given += self._operands(launch, chain.pair.beside)
            for spec, takes in chain.calls:
                taken = [given[n] if isinstance(n, int) else have[n] for n in takes]
                fakes = results_like(spec, last.meta["val"], {n: own[n].meta["val"] for n in chain.pair.wanted})
                made = self._call(taken, spec, fakes, last)
                have |= {r.tensor: node for r, node in zip(spec.results, made, strict=True)}
            self._instead({node: have[name] for name, node in results.items()}, (*cut.nodes, *launch.nodes))

    def settle(self) -> None:
        """Bring the graph into a legal order, without what nobody reads any more."""
        if self._replaced:
            for node in reversed(self._replaced):
                if not node.users:
                    self._graph.erase_node(node)
            settle(self._owner, sort=True)
            rewrite(self._owner, When.PLACED)
        log.info("%d operators are in calls", len(self._replaced))

    def _call(self, given: Sequence[fx.Node], spec: RegionSpec, made: Sequence[Tensor], like: fx.Node) -> list[fx.Node]:
        """A call with tensors and sizes as ``given``, and its results; these are like ``made``."""
        tensors = [a for a in given if isinstance(a.meta["val"], Tensor)]
        sizes = [a for a in given if not isinstance(a.meta["val"], Tensor)]
        call = self._graph.call_function(REGION, (tensors, sizes, encode(spec)))
        call.meta = {"val": list(made), "stack_trace": like.meta.get("stack_trace"), SPEC: spec}
        results = [self._graph.call_function(operator.getitem, (call, index)) for index in range(len(made))]
        for result, fake in zip(results, made, strict=True):
            result.meta = {"val": fake}
        return results

    def _operands(self, launch: GradientLaunch, wanted: Collection[str]) -> list[fx.Node]:
        """What a launch reads, as it is in the graph by now."""
        return [self._wide(node, launch) for name, node in launch.current.operands.items() if name in wanted]

    def _wide(self, node: fx.Node, launch: GradientLaunch) -> fx.Node:
        """``node`` with further columns up to a width that bulk copies can address: those it is cut from, or zeros."""
        whole, more = launch.whole(node)
        return call(whole, aten.constant_pad_nd.default, whole, [0, more], 0.0) if more else whole

    def _instead(self, made: Mapping[fx.Node, fx.Node], nodes: Sequence[fx.Node]) -> None:
        """Users of the keys that are none of ``nodes`` get the values."""
        inside = frozenset(nodes)
        for node, result in made.items():
            part = result if result.meta["val"] is node.meta["val"] else self._shaped(result, node.meta["val"])
            part.meta = {**node.meta, "val": part.meta["val"]}
            node.replace_all_uses_with(part, delete_user_cb=lambda user: user not in inside)
            self._now[node.name] = part
        self._replaced += nodes

    def _shaped(self, part: fx.Node, wanted: Tensor) -> fx.Node:
        """A call's result, cut to the size of a gradient, and in its shape."""
        have, shape = list(part.meta["val"].shape), [int(n) for n in wanted.shape]
        want = shape[len(shape) - len(have) :]  # without dimensions that a sum keeps
        for dim, (size, most) in enumerate(zip(have, want, strict=True)):
            if size != most:
                part = call(part, aten.slice.Tensor, part, dim, 0, most)
        if have != want:
            part = call(part, aten.clone.default, part, memory_format=torch.contiguous_format)
        if want != shape:
            part = call(part, aten.reshape.default, part, shape)
        return part


def results_like(spec: RegionSpec, like: Tensor, known: Mapping[str, Tensor] = MappingProxyType({})) -> list[Tensor]:
    """Fake results of a call whose sizes are all known; ``known`` are some of them, by their names."""
    return [
        known[r.tensor]
        if r.tensor in known
        else like.new_empty([int(n) for n in r.shape], dtype=TORCH_DTYPES[spec.pipeline.tensor(r.tensor).dtype])
        for r in spec.results
    ]


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
