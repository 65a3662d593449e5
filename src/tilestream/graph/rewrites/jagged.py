"""Reductions of jagged tensors: PyTorch pads each segment to as many rows as there are in all, and reduces that."""

from __future__ import annotations

from torch import fx

from tilestream.graph.nodes import argument, arguments, aten, packet, value
from tilestream.graph.rewrites.given_bounds import MOST_ROWS, Bounds
from tilestream.graph.rewrites.insert import call, cast, size
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.sizes import hint, same_size
from tilestream.graph.sums import DTYPES

HOW = {aten.sum: "sum", aten.amax: "max", aten.amin: "min"}


def open_jagged(graph: fx.Graph, settings: Settings) -> int:
    """Reduce rows as they lie, without padding; how often. PyTorch has no gradients of these."""
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
    if packet(user) not in HOW or user.args[1] != [1]:
        return False
    filled = argument(padded, 3, "padding_value", 0.0)
    return packet(user) is not aten.sum or (filled == 0.0 and user.kwargs.get("dtype") is None)


def _reduce(user: fx.Node, padded: fx.Node) -> None:
    rows, (offsets,), *_ = arguments(padded)
    how, filled = HOW[packet(user)], argument(padded, 3, "padding_value", 0.0)
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
