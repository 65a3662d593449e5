"""``segment_reduce`` along the first dimension, and reductions of jagged tensors: reductions over the bounds that these
are given. In training they stay PyTorch's."""

from __future__ import annotations

from math import inf
from typing import Any

from torch import fx

from tilestream.graph.nodes import argument, arguments, aten, packet, value
from tilestream.graph.rewrites.busy import END
from tilestream.graph.rewrites.each import each
from tilestream.graph.rewrites.given_bounds import MOST_ROWS, Bounds
from tilestream.graph.rewrites.insert import call, cast, size
from tilestream.graph.rewrites.settings import APART, Settings
from tilestream.graph.sizes import hint, same_size
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


OF_PADDED = {aten.sum: "sum", aten.amax: "max", aten.amin: "min"}


def open_jagged(graph: fx.Graph, settings: Settings) -> int:
    """Reduce rows of jagged tensors as they lie, where PyTorch pads each segment to as many rows as there are in all,
    and reduces that; how often. PyTorch has no gradients of these."""
    if settings.sums is None:
        return 0
    made = 0
    for padded in graph.find_nodes(op="call_function", target=aten._jagged_to_padded_dense_forward.default):
        if _is_whole(padded) and padded.users and all(_reduces(user, padded) for user in padded.users):
            for user in list(padded.users):
                _reduce(user, padded)
                made += 1
    return made


def _is_whole(padded: fx.Node) -> bool:
    """Whether no row is cut off, since a segment has room for all."""
    rows, listed, (room, *_) = arguments(padded)[:3]
    fake = value(rows)
    if fake is None or fake.dtype not in DTYPES or len(listed) != 1 or hint(fake.shape[0]) > MOST_ROWS:
        return False
    return same_size(room.meta["val"] if isinstance(room, fx.Node) else room, fake.shape[0])


def _reduces(user: fx.Node, padded: fx.Node) -> bool:
    """Whether a node reduces the rows of each segment, by what padding leaves as it is."""
    if packet(user) not in OF_PADDED or user.args[1] != [1]:
        return False
    filled = argument(padded, 3, "padding_value", 0.0)
    return packet(user) is not aten.sum or (filled == 0.0 and user.kwargs.get("dtype") is None)


def _reduce(user: fx.Node, padded: fx.Node) -> None:
    rows, (offsets,), *_ = arguments(padded)
    how, filled = OF_PADDED[packet(user)], argument(padded, 3, "padding_value", 0.0)
    with user.graph.inserting_before(user):
        bounds = Bounds.joined(user, [offsets], size(user, rows))
        total = bounds.reduced(rows, how)
        if how != "sum":
            none = call(user, aten.eq.Scalar, bounds.lengths(rows.meta["val"].dim()), 0.0)
            total = cast(user, call(user, aten.where.ScalarSelf, none, filled, total), rows.meta["val"].dtype)
            total = call(user, aten.clamp_min.default if how == "max" else aten.clamp_max.default, total, filled)
        if argument(user, 2, "keepdim", False):
            total = call(user, aten.unsqueeze.default, total, 1)
    user.replace_all_uses_with(total)
    total.meta["val"] = user.meta["val"]
