"""Operators that go through an index, as Inductor compiles them: which tables a kernel reads rows of, or adds to.

Inductor adds by atomics, in the kernel that computes what is added: a layer of message passing gathers, applies and
adds in one. Not all: ``index_add`` of bfloat16 (pytorch/pytorch#137425), sums of integers, and reductions by an index
that are no sums stay PyTorch's own kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from tilestream.graph.costs.table import Eager, Kind, row
from tilestream.graph.costs.work import looked_up, operands, results, size
from tilestream.graph.nodes import argument, aten, packet, value
from tilestream.graph.sizes import hint
from tilestream.simulator.library import Indexed


def scatters(node: fx.Node) -> bool:
    return row(packet(node)).kind is Kind.SCATTER


def looks_up(node: fx.Node) -> bool:
    return row(packet(node)).kind is Kind.GATHER


def by_atomics(node: fx.Node) -> bool:
    """Whether Inductor compiles an addition by an index itself, with what makes the addends."""
    made = results(node)
    if not scatters(node) or not made or not made[0].is_floating_point():
        return False
    kind = packet(node)
    if kind is aten.index_add:
        return made[0].dtype is not torch.bfloat16
    if kind is aten.index_put:
        return True  # without ``accumulate`` rows are stored, which is no slower
    return kind is aten.scatter_add or is_table_gradient(node)


def is_table_gradient(node: fx.Node) -> bool:
    """Whether rows are added in float32 to zeros, and the sum is rounded by a kernel of its own."""
    return row(packet(node)).eager is Eager.TABLE_GRADIENT


def accesses(nodes: Sequence[fx.Node]) -> tuple[Indexed, ...]:
    """The tables of a kernel of Inductor's that is all of ``nodes``."""
    found = (_added(n) if by_atomics(n) else _read(n) for n in nodes)
    return tuple(x for x in found if x is not None)


def _read(node: fx.Node) -> Indexed | None:
    """The rows that a lookup reads; an element each where it names elements (``gather``)."""
    if not looks_up(node) or not operands(node):
        return None
    table, drawn = operands(node)[0], looked_up(node)
    if packet(node) is aten.gather:
        return _of(size(table), drawn, 1.0, table)
    features = _row(table, _dims(node))
    return _of(size(table) / features, drawn / features, features, table)


def _added(node: fx.Node) -> Indexed | None:
    made = results(node)[0]
    given = [t for t in operands(node) if t.is_floating_point()]
    if not given:
        return None
    added = given[0] if is_table_gradient(node) else given[-1]
    dims = _dims(node)
    features = _row(made, dims)
    if len(dims) > 1:  # ``x[:, rows, columns]``: what is added lies in as many pieces as the first of them has places
        features = max(1.0, size(added) / max(1, hint(added.shape[0])) / hint(made.shape[dims[0]]))
    draws, table = size(added) / features, is_table_gradient(node)
    return _of(size(made) / features, draws, features, made, adds=True, table=table)


def _of(
    rows: float, draws: float, features: float, like: torch.Tensor, *, adds: bool = False, table: bool = False
) -> Indexed | None:
    if min(rows, draws, features) <= 0:
        return None
    return Indexed(max(1.0, rows), draws, features, 4.0 if table else float(like.element_size()), adds=adds)


def _dims(node: fx.Node) -> list[int]:
    """The dimensions of its table that an operator's index names places of."""
    kind = packet(node)
    if kind in (aten.index, aten.index_put):
        names: Any = node.args[1]
        return [at for at, name in enumerate(names) if name is not None] or [0]
    if kind in (aten.index_select, aten.index_add, aten.scatter_add):
        dim = argument(node, 1, "dim", 0)
        like = value(node)
        return [int(dim) % max(1, like.dim())] if isinstance(dim, int) and like is not None else [0]
    return [0]


def _row(table: torch.Tensor, dims: Sequence[int]) -> float:
    """Elements that lie together behind the last dimension of ``dims``."""
    return max(1.0, float(prod(hint(d) for d in table.shape[max(dims) + 1 :])))
