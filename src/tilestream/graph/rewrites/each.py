"""Rewrites that look at one node after another."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from torch import fx

from tilestream.graph.nodes import packet
from tilestream.graph.rewrites.settings import Settings

Instead = Callable[[fx.Node, Settings], fx.Node | tuple[fx.Node | None, ...] | None]
"""What takes the place of a node, whose graph inserts in front of it, or of each of its results that somebody takes:
the node itself where it was changed in place, None where it stays as it is."""


def each(*operators: object) -> Callable[[Instead], Callable[[fx.Graph, Settings], int]]:
    """The rewrite of a graph that does the following to each node of these operators, in order; how many it changed."""

    def of(instead: Instead) -> Callable[[fx.Graph, Settings], int]:
        @wraps(instead, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
        def run(graph: fx.Graph, settings: Settings) -> int:
            made = 0
            for node in [n for n in graph.nodes if packet(n) in operators]:
                with graph.inserting_before(node):
                    new = instead(node, settings)
                if isinstance(new, tuple):
                    for part in list(node.users):
                        if (other := new[part.args[1]]) is not None:  # pyright: ignore
                            part.replace_all_uses_with(other)
                elif new is not None and new is not node:
                    node.replace_all_uses_with(new)
                made += new is not None
            return made

        return run

    return of
