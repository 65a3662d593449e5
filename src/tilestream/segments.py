"""The order in which the regions of a graph and the rest of it run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from tilestream.aten.nodes import is_sym, is_view
from tilestream.grouping import successors
from tilestream.lower import Region, extract, is_given


@dataclass(frozen=True)
class Segment:
    """One step: a region, or a graph of operators that are not ours.

    ``arguments`` and ``results`` are names of nodes of the whole graph. ``trivial`` graphs only make
    views and sizes; running them eagerly costs nothing.
    """

    graph: fx.GraphModule
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    region: Region | None = None
    trivial: bool = False


Cut = tuple[Region, tuple[fx.Node, ...], tuple[fx.Node, ...]]
"""A region, its nodes in the whole graph, and those of them that others use."""


def arrange(owner: fx.GraphModule, regions: Sequence[Cut]) -> tuple[Segment, ...]:
    """Cut a graph into segments: as much of the rest as is ready, then a region, and so on."""
    nodes = [n for n in owner.graph.nodes if n.op != "output" and not is_given(n)]
    output = next(n for n in owner.graph.nodes if n.op == "output")
    by_name = {n.name: n for n in owner.graph.nodes}
    home = {n: index for index, (_, members, _) in enumerate(regions) for n in members}
    needs = _needs(nodes, output, regions, home, by_name)
    after = successors(nodes)
    earlier: dict[fx.Node, set[fx.Node]] = {n: set() for n in nodes}
    for node, later in after.items():
        for user in later:
            if user in earlier:
                earlier[user].add(node)
    done: set[fx.Node] = {n for n in owner.graph.nodes if is_given(n)}
    rest = [n for n in nodes if n not in home and n in needs]
    left = dict.fromkeys(range(len(regions)))
    wanted = {*output.all_input_nodes, *(by_name[a] for region, _, _ in regions for a in region.arguments)}
    segments: list[Segment] = []
    while rest or left:
        run: list[fx.Node] = []
        for node in rest:
            if all(p in done or p not in needs for p in (*node.all_input_nodes, *earlier[node])):
                run.append(node)
                done.add(node)
        rest = [n for n in rest if n not in done]
        if run:
            segments.append(_rest(owner, run, wanted | {u for n in rest for u in n.all_input_nodes}))
        ready = next(
            (i for i in left if all(by_name[a] in done for a in regions[i][0].arguments)),
            None,
        )
        if ready is not None:
            region, members, outputs = regions[ready]
            del left[ready]
            done.update(members)
            segments.append(Segment(region.graph, region.arguments, tuple(n.name for n in outputs), region))
        elif not run:
            raise AssertionError("regions depend on each other in a cycle")
    return tuple(segments)


def _needs(nodes, output, regions, home, by_name) -> set[fx.Node]:
    """The nodes that must run: all that the outputs and the regions use, and all that has effects."""
    needed: set[fx.Node] = set()
    queue: list[fx.Node] = [*output.all_input_nodes, *(n for n in nodes if n.is_impure())]
    queue += [by_name[a] for region, _, _ in regions for a in region.arguments]
    while queue:
        node = queue.pop()
        if node in needed:
            continue
        needed.add(node)
        if node in home:
            continue
        queue.extend(node.all_input_nodes)
    return needed


def _rest(owner: fx.GraphModule, run: list[fx.Node], wanted: set[fx.Node]) -> Segment:
    """The nodes of ``run`` as a segment, whose results are those that are ``wanted`` later."""
    inside = set(run)
    inputs = dict.fromkeys(p for n in run for p in n.all_input_nodes if p not in inside)
    used = [n for n in run if n.is_impure() or n in wanted]
    graph, arguments = extract(owner, used, inputs)
    trivial = all(is_view(n) or is_sym(n) or n.op == "get_attr" for n in run)
    return Segment(graph, tuple(n.name for n in arguments), tuple(n.name for n in used), None, trivial)
