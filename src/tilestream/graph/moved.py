"""Regions and weight gradients found once for two copies of a graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import fx

from tilestream.graph.gradients import GradientSite
from tilestream.graph.nodes import value
from tilestream.graph.selection import Cut

Text = tuple[tuple[object, ...], ...]
"""A graph with all that decides its partition."""


def text(graph: fx.Graph) -> Text:
    """Equal for graphs that are alike to the names of their nodes, and that are cut alike."""
    return tuple((n.name, n.op, str(n.target), str(n.args), str(n.kwargs), _described(n)) for n in graph.nodes)


def _described(node: fx.Node) -> str:
    fake = value(node) if node.op in ("placeholder", "get_attr") else None
    return "" if fake is None else f"{fake.dtype} {fake.device} {tuple(fake.shape)} {fake.stride()}"


def moved(
    cuts: Sequence[Cut], sites: Sequence[GradientSite], graph: fx.Graph
) -> tuple[tuple[Cut, ...], tuple[GradientSite, ...]]:
    """Regions and weight gradients of another graph of the same ``text``, in this one."""
    by_name = {n.name: n for n in graph.nodes}

    def here(nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
        return tuple(by_name[n.name] for n in nodes)

    def site_here(site: GradientSite) -> GradientSite:
        product, gradient, given = here((site.product, site.gradient, site.input))
        total = None if site.total is None else by_name[site.total.name]
        return replace(site, product=product, total=total, gradient=gradient, input=given)

    return tuple(Cut(c.region, here(c.nodes), here(c.outputs)) for c in cuts), tuple(map(site_here, sites))
