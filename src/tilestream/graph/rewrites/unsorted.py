"""Sums that give each token back what was sorted away from it: their bounds and their order are known."""

from __future__ import annotations

from operator import add
from typing import Any

import torch
from torch import fx

from tilestream.graph.nodes import aten, packet, value
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.operators import SEGMENTS
from tilestream.graph.sizes import expression, settled

ROUNDED = "floor"


def shared_order(index: fx.Node, nodes: Any) -> tuple[fx.Node, int] | None:
    """Where ``index`` is ``order // k`` of an order of ``k * nodes`` rows, or the order itself: the order, and k.

    Each node has then k rows, which lie where the order names them. None of another index.
    """
    order: Any = index
    by: Any = 1
    if packet(index) is aten.floor_divide or index.kwargs.get("rounding_mode") == ROUNDED:
        order, by = index.args[:2]
    if not isinstance(by, int) or by <= 0:
        return None
    whole, fake = _permutation(order), value(order)
    if whole is None or fake is None or fake.dim() != 1:
        return None
    count = nodes if isinstance(nodes, int) else nodes.meta["val"]
    return (order, by) if expression(fake.shape[0]) == by * expression(settled(count)) else None


def _permutation(order: Any) -> fx.Node | None:
    """The sort that a node is the whole order of."""
    while isinstance(order, fx.Node) and packet(order) in (aten._to_copy, aten.view, aten.reshape, aten.alias):
        order = order.args[0]
    if not isinstance(order, fx.Node) or getattr(order.target, "__name__", "") != "getitem":
        return None
    made: Any = order.args[0]
    of_ours, of_torch = made.target is SEGMENTS and order.args[1] == 0, packet(made) is aten.sort and order.args[1] == 1
    return made if of_ours or of_torch else None


def inverse(like: fx.Node, order: fx.Node) -> fx.Node:
    """Where each row of an order went, int32 [rows]."""
    fake = order.meta["val"]
    rows: Any = fake.shape[0]
    rows = rows if isinstance(rows, int) else call(like, aten.sym_size.int, order, 0)
    numbers = call(order, aten.arange.default, rows, dtype=torch.int32, device=fake.device)
    places = call(like, aten._to_copy.default, order, dtype=torch.int64) if fake.dtype != torch.int64 else order
    empty = call(like, aten.new_empty.default, order, [rows], dtype=torch.int32)
    return call(like, aten.index_put.default, empty, [places], numbers)


def bounds(like: fx.Node, order: fx.Node, nodes: Any, each: int) -> fx.Node:
    """Of ``nodes`` with ``each`` rows, int32 [nodes + 1]."""
    count = nodes + 1 if isinstance(nodes, int) else call(like, add, nodes, 1)
    numbers = call(order, aten.arange.default, count, dtype=torch.int32, device=order.meta["val"].device)
    return numbers if each == 1 else call(like, aten.mul.Tensor, numbers, each)
