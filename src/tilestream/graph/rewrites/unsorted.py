"""Sums that give each token back what was sorted away from it: their bounds and their order are known."""

from __future__ import annotations

from operator import add, getitem
from typing import Any

import torch
from torch import fx

from tilestream.graph.nodes import aten, behind, packet, value
from tilestream.graph.rewrites.insert import call, cast, size
from tilestream.graph.rewrites.operators import SEGMENTS
from tilestream.graph.sizes import expression, same_shape, same_size, settled

ROUNDED = "floor"
EMPTY = (aten.new_empty, aten.empty, aten.empty_like)
FLAT = (aten.view, aten.reshape, aten._unsafe_view, aten.clone)


def shared_order(index: fx.Node, nodes: Any) -> tuple[fx.Node | None, int] | None:
    """The order of rows and k, where each node has k rows, which lie where the order names them; None of another index.

    ``index`` is then ``order // k`` of an order of ``k * nodes`` rows, the order itself, or each node's number k times,
    behind each other, which needs no order.
    """
    order: Any = index
    by: Any = _times(index)
    if by is not None:
        order = None
    elif packet(index) is aten.floor_divide or index.kwargs.get("rounding_mode") == ROUNDED:
        order, by = index.args[:2]
    else:
        by = 1
    fake = value(index)
    if not isinstance(by, int) or by <= 0 or fake is None or fake.dim() != 1:
        return None
    if order is not None and not permutation(order):
        return None
    count = nodes if isinstance(nodes, int) else nodes.meta["val"]
    return (order, by) if expression(fake.shape[0]) == by * expression(settled(count)) else None


def _times(index: fx.Node) -> int | None:
    """How often an index has each of the numbers from 0 on: ``arange(n)[:, None].expand(n, k).reshape(-1)``."""
    wide: Any = behind(index, lambda n: packet(n) in FLAT)
    column: Any = wide.args[0] if packet(wide) is aten.expand else wide
    numbers: Any = column.args[0] if packet(column) in (aten.unsqueeze, aten.view, aten.reshape) else column
    fake, counted = value(wide), value(numbers)
    if not isinstance(numbers, fx.Node) or fake is None or counted is None or value(column) is None:
        return None
    first = fake.dim() == 2 and column.meta["val"].dim() == 2 and same_size(fake.shape[0], counted.shape[0])
    times = settled(fake.shape[1]) if first and same_size(column.meta["val"].shape[1], 1) else None
    return times if _counts_up(numbers) and isinstance(times, int) else None


def permutation(order: Any) -> bool:
    """Whether a node is the whole order of a sort, or the inverse of one."""
    while isinstance(order, fx.Node) and packet(order) in (aten._to_copy, aten.view, aten.reshape, aten.alias):
        order = order.args[0]
    if isinstance(order, fx.Node) and packet(order) is aten.index_put:
        given: Any = order.args
        return len(given[1]) == 1 and permutation(given[1][0]) and _is_inverse(order, given[0], given[1][0], given[2])
    if not isinstance(order, fx.Node) or order.target is not getitem:
        return False
    made: Any = order.args[0]
    fake = value(order)
    of_ours, of_torch = made.target is SEGMENTS and order.args[1] == 0, packet(made) is aten.sort and order.args[1] == 1
    return bool(of_ours or of_torch) and fake is not None and fake.dim() == 1


def _is_inverse(order: fx.Node, base: fx.Node, places: fx.Node, numbers: fx.Node) -> bool:
    made, had = value(order), value(places)
    if made is None or had is None or made.dim() != 1 or packet(base) not in EMPTY:
        return False
    return same_size(made.shape[0], had.shape[0]) and _counts_up(numbers) and same_shape(made, numbers.meta["val"])


def _counts_up(node: fx.Node) -> bool:
    """Whether its elements are 0, 1, 2, ..."""
    return node.target is aten.arange.default or (node.target is aten.arange.start and node.args[:1] == (0,))


def inverse(like: fx.Node, order: fx.Node) -> fx.Node:
    """Where each row of an order went, int32 [rows]."""
    rows = size(like, order)
    numbers = call(order, aten.arange.default, rows, dtype=torch.int32, device=order.meta["val"].device)
    places = cast(like, order, torch.int64)
    empty = call(like, aten.new_empty.default, order, [rows], dtype=torch.int32)
    return call(like, aten.index_put.default, empty, [places], numbers)


def bounds(like: fx.Node, index: fx.Node, nodes: Any, each: int) -> fx.Node:
    """Of ``nodes`` with ``each`` rows, int32 [nodes + 1], on the device of ``index``."""
    count = nodes + 1 if isinstance(nodes, int) else call(like, add, nodes, 1)
    numbers = call(index, aten.arange.default, count, dtype=torch.int32, device=index.meta["val"].device)
    return numbers if each == 1 else call(like, aten.mul.Tensor, numbers, each)
