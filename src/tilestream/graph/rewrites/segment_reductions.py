"""``segment_reduce`` along the first dimension: reductions over the bounds that it is given. In training it stays
PyTorch's."""

from __future__ import annotations

from math import inf
from typing import Any

from torch import fx

from tilestream.graph.nodes import arguments, aten, packet, value
from tilestream.graph.rewrites.busy import END
from tilestream.graph.rewrites.each import each
from tilestream.graph.rewrites.given_bounds import MOST_ROWS, Bounds
from tilestream.graph.rewrites.insert import call, cast, size
from tilestream.graph.rewrites.settings import APART, Settings
from tilestream.graph.sizes import hint
from tilestream.graph.sums import DTYPES

HOW = {"sum": "sum", "mean": "sum", "max": "max", "min": "min", "prod": "mul"}
"""What the operator calls the ways to reduce, by the names of ours."""
OF_NOTHING = {"max": -inf, "min": inf}
"""What segments without rows have, where that is not what ours have."""


@each(aten.segment_reduce)
def open_segments(node: fx.Node, settings: Settings) -> fx.Node | None:
    """A reduction over bounds in its place; those that stay say why."""
    if settings.sums is None:
        return None
    if (why := why_not(node)) is not None:
        node.meta[APART] = f"a segment_reduce {why}"
        return None
    result = _reduced(node)
    result.meta["val"] = node.meta["val"]
    return result


def why_not(node: fx.Node) -> str | None:
    """Why an operator stays as it is; None where it need not."""
    (given, _), fake = _bounds_given(node), value(node.args[0])
    if fake is None or fake.dtype not in DTYPES:
        return "of another dtype than float32, bfloat16 or float16"
    lengths = value(given)
    if lengths is None or lengths.dim() != 1 or node.kwargs.get("axis", 0) != 0:
        return "along another dimension than the first"
    initial = node.kwargs.get("initial")
    if not (initial is None or isinstance(initial, int | float)) or hint(fake.shape[0]) > MOST_ROWS:
        return "that starts with what is no number, or has more rows than int32 numbers"
    if any(packet(n) is aten._segment_reduce_backward for n in node.graph.nodes):
        return "in training"
    return None


def _bounds_given(node: fx.Node) -> tuple[Any, bool]:
    """The tensor that bounds are made of, and whether it has lengths."""
    offsets = node.kwargs.get("offsets")
    return (node.kwargs.get("lengths"), True) if offsets is None else (offsets, False)


def _bounds(node: fx.Node, data: fx.Node) -> Bounds:
    """Of lengths that do not add up to all rows the last bound is below zero, which whoever reads bounds refuses."""
    given, of_lengths = _bounds_given(node)
    rows = size(node, data)
    if not of_lengths:
        return Bounds.joined(node, [given], rows, whole=False)
    ends = call(node, aten.cumsum.default, given, 0)
    last = call(node, aten.slice.Tensor, ends, 0, -1, END)
    last = call(node, aten.where.ScalarOther, call(node, aten.eq.Scalar, last, rows), last, -1)
    zero = call(node, aten.new_full.default, ends, [1], 0)
    return Bounds.joined(node, [zero, call(node, aten.slice.Tensor, ends, 0, 0, -1), last], rows)


def _reduced(node: fx.Node) -> fx.Node:
    (data, how), initial = arguments(node)[:2], node.kwargs.get("initial")
    bounds = _bounds(node, data)
    total, lengths = bounds.reduced(data, HOW[how]), bounds.lengths(data.meta["val"].dim())
    if how in ("sum", "mean", "prod") and initial is not None:
        total = call(node, aten.mul.Scalar if how == "prod" else aten.add.Scalar, total, initial)
    if how == "mean":
        total = bounds.divided(total, lengths)  # NaN where there is no row and nothing to start with
    of_nothing = OF_NOTHING.get(how) if initial is None else initial
    if of_nothing is not None and how in ("mean", *OF_NOTHING):
        total = call(node, aten.where.ScalarSelf, call(node, aten.eq.Scalar, lengths, 0.0), of_nothing, total)
        total = cast(node, total, node.meta["val"].dtype)
    if initial is not None and how in OF_NOTHING:
        total = call(node, aten.clamp_min.default if how == "max" else aten.clamp_max.default, total, initial)
    return total
