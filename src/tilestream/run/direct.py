"""Graphs that are regions and views of their arguments, and nothing else: called without Inductor's wrapper.

Of the host's time of a call, that wrapper is the larger part where a model is one kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from tilestream.graph.capture import boxed
from tilestream.graph.nodes import is_sym, is_view
from tilestream.run.operator import REGION, run


def is_direct(graph: fx.GraphModule) -> bool:
    """Whether Inductor would have nothing to compile: regions, their parts, views, arithmetic on sizes."""
    return all(node.op in ("placeholder", "output") or _is_free(node) for node in graph.graph.nodes)


def _is_free(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    return node.target in (operator.getitem, REGION) or is_view(node) or is_sym(node)


def direct(graph: fx.GraphModule) -> Callable[..., Any]:
    """The graph as a boxed function that takes a list of arguments, which it empties."""
    for node in graph.graph.find_nodes(op="call_function", target=REGION):
        node.target = run
    graph.recompile()
    forward = graph.forward

    def call(arguments: list[Any]) -> Any:
        values = tuple(arguments)
        arguments.clear()
        return forward(*values)

    return boxed(call)
