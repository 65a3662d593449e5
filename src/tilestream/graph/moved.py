"""A partition found once for two copies of a graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import fx

from tilestream.graph.nodes import value
from tilestream.graph.selection import Cut, Partition

Text = tuple[tuple[object, ...], ...]
"""A graph with all that decides its partition."""


def text(graph: fx.Graph) -> Text:
    """Equal for graphs that are alike to the names of their nodes, and that are cut alike."""
    return tuple((n.name, n.op, str(n.target), str(n.args), str(n.kwargs), _described(n)) for n in graph.nodes)


def _described(node: fx.Node) -> str:
    fake = value(node) if node.op in ("placeholder", "get_attr") else None
    return "" if fake is None else f"{fake.dtype} {fake.device} {tuple(fake.shape)} {fake.stride()}"


def moved(found: Partition, graph: fx.Graph) -> Partition:
    """The partition of another graph of the same ``text``, for this one."""
    by_name = {n.name: n for n in graph.nodes}

    def here(nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
        return tuple(by_name[n.name] for n in nodes)

    return replace(found, cuts=tuple(Cut(c.region, here(c.nodes), here(c.outputs)) for c in found.cuts))
