"""Operators of edges and nodes that the table of elementwise operators lacks: comparisons, casts, sums of features.

What is true or false is 1 or 0 inside of a region; it cannot leave it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tilestream.graph.nodes import Unsupported, aten, value
from tilestream.graph.operators import ELEMENTWISE
from tilestream.graph.operators.writes import Writes
from tilestream.ir.dtypes import DTYPES
from tilestream.ir.pipeline import Tile

LARGEST = torch.finfo(torch.float32).max


Rule = Callable[[Writes, fx.Node], Tile]


def cast(e: Writes, node: fx.Node) -> Tile:
    """Between two stores nothing is rounded, as in Inductor's kernels."""
    return e.tile(node.args[0])


def compared(kind: str) -> Rule:
    """1 where ``left kind right``. Both are what they would be in memory; infinities are equal to themselves."""

    def rule(e: Writes, node: fx.Node) -> Tile:
        frame = e.frame(node)
        left, right = (_finite(e, x, frame) for x in node.args[:2])
        if kind in ("lt", "ge"):
            left, right = right, left
        difference = e.binary("sub", left, right, "f32")
        if kind in ("eq", "ne"):
            difference = e.unary("abs", difference, "f32")
        apart = e.binary("relu_backward", 1.0, difference, "f32")  # NaN is larger than nothing, and unlike everything
        return apart if kind in ("ne", "gt", "lt") else e.binary("sub", 1.0, apart, "f32")

    return rule


def _finite(e: Writes, x: Any, frame: Any) -> Tile | str | float:
    operand = e.operand(x, frame)
    if isinstance(operand, int | float):
        return max(-LARGEST, min(LARGEST, float(operand)))
    fake = value(x)
    if isinstance(operand, Tile) and fake is not None and fake.dtype in DTYPES and DTYPES[fake.dtype] != operand.dtype:
        operand = e.unary("cast", operand, DTYPES[fake.dtype])
    return e.binary("minimum", e.binary("maximum", operand, -LARGEST, "f32"), LARGEST, "f32")


def negated(e: Writes, node: fx.Node) -> Tile:
    return e.binary("sub", 1.0, e.tile(node.args[0]), "f32")


def where(e: Writes, node: fx.Node) -> Tile:
    """Of each operand what is chosen, and 0 elsewhere; NaN that is not chosen is gone."""
    frame = e.frame(node)
    chosen = e.tile(node.args[0], frame)
    other = e.binary("sub", 1.0, chosen, "f32")
    left = e.binary("relu_backward", e.operand(node.args[1], frame), chosen, "f32")
    return e.binary("add", left, e.binary("relu_backward", e.operand(node.args[2], frame), other, "f32"), "f32")


OWN: dict[object, Rule] = {
    aten._to_copy: cast,
    torch.ops.prims.convert_element_type: cast,
    **{getattr(aten, kind): compared(kind) for kind in ("eq", "ne", "gt", "lt", "ge", "le")},
    aten.logical_not: negated,
    aten.where: where,
}

POINTWISE: dict[object, Rule] = {**ELEMENTWISE, **OWN}
"""What each operator of elements is."""


def features_of(node: fx.Node) -> tuple[int, ...]:
    """The dimensions that a reduction is over.

    Raises:
        Unsupported: edges are among them.
    """
    fake = value(node.args[0])
    given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    listed = [given] if isinstance(given, int) else given
    dims = [d for d in listed if isinstance(d, int)] if isinstance(listed, list | tuple) else []
    dims = tuple(d % fake.dim() for d in dims) if fake is not None else ()
    if not dims or 0 in dims:
        raise Unsupported("it reduces edges, of all nodes at once")
    return dims
