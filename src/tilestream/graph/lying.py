"""The order in which a value of a graph lies in memory, and what changes with it."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor, fx
from torch.fx.node import map_arg

from tilestream.graph.rewrites.insert import mode_of


def lie_alike(a: Tensor, b: Tensor) -> bool:
    """Whether elements of two tensors of one shape have the same places."""
    return all(n == 1 or x == y for n, x, y in zip(a.shape, a.stride(), b.stride(), strict=True))


def elsewhere(graph: fx.Graph, made: fx.Node, val: Tensor) -> dict[fx.Node, Any] | None:
    """The values of ``made``'s readers, and of theirs, that lie otherwise where it lies as ``val``; None where they
    cannot."""
    found: dict[fx.Node, Any] = {}
    if val.stride() == made.meta["val"].stride():
        return found
    behind = False
    with mode_of([val]) or contextlib.nullcontext():
        for node in graph.nodes:
            if behind and any(n is made or n in found for n in node.all_input_nodes):
                if node.op != "call_function":
                    return None
                args: Any = map_arg(
                    (node.args, node.kwargs), lambda n: val if n is made else found.get(n, n.meta["val"])
                )
                try:
                    now = node.target(*args[0], **args[1])  # pyright: ignore[reportCallIssue]
                except Exception:  # a view of what lies otherwise
                    return None
                if _strides(now) != _strides(node.meta["val"]):
                    found[node] = now
            behind = behind or node is made
    return found


def _strides(val: Any) -> Any:
    if isinstance(val, list | tuple):
        return [_strides(v) for v in val]
    return val.stride() if isinstance(val, Tensor) else val
