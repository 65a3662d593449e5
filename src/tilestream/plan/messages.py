"""Messages that are added to nodes beside regions: which of the sums are made in sorted order, and what that takes.

One predicate for all who ask: ``run.messages`` replaces these sums where the graph runs, ``plan.whole`` predicts them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from tilestream.graph.nodes import is_view
from tilestream.graph.nodes import name as target_name
from tilestream.graph.provenance import source
from tilestream.graph.sizes import expression, hint, same_size
from tilestream.plan.values import Readers, moved
from tilestream.simulator.library import Kernel, Own

aten = torch.ops.aten

ROW_BYTES = 16
"""Rows are read by lanes of so many bytes."""

MOST_ROW_BYTES = 8192
"""Of a row: 512 lanes."""

ATOMIC_US = 8e-6
"""Microseconds an element that ``index_add`` takes (16 bits; 7.7e-6 to 9.1e-6 on an H200)."""

SUM_US, SUM_BYTES_PER_US = 3.0, 3e6
SORT_US, SORT_EDGES_PER_US = 55.0, 1.5e4
"""Of sums over sorted messages, and of sorting them: a fixed part and a rate."""


@dataclass(frozen=True)
class Addition:
    """Rows added to the rows of ``base`` that ``index`` names: what ``node`` computes. ``at``: of the rows among its
    arguments, which change where one addition is another's base."""

    node: fx.Node
    index: fx.Node
    at: int

    @property
    def base(self) -> Any:
        return self.node.args[0]

    @property
    def rows(self) -> Any:
        return self.node.args[self.at]


def sorted_sums(nodes: Iterable[fx.Node]) -> list[list[Addition]]:
    """The additions of a graph that sums of sorted rows replace, since its time falls; those of one index together.

    Args:
        nodes: functional ATen, in order, with ``val`` in their meta.
    """
    by_index: dict[tuple[fx.Node, sympy.Expr], list[Addition]] = defaultdict(list)
    for node in nodes:
        found = _addition(node)
        if found is not None:
            by_index[found.index, expression(found.base.meta["val"].shape[0])].append(found)
    return [additions for additions in by_index.values() if _gain_us(additions) > 0]


def _addition(node: fx.Node) -> Addition | None:
    """What ``index_add``, ``scatter_add`` or ``index_put`` adds, if it is rows of 16-bit floats to rows of a matrix."""
    index: Any = None
    at = 3
    if node.target is aten.index_add.default and node.args[1] in (0, -2) and node.kwargs.get("alpha", 1) == 1:
        index = node.args[2]
    elif node.target is aten.scatter_add.default and node.args[1] in (0, -2):
        index = _repeated(node.args[2]) if _same_shape(node.args[2], node.args[3]) else None
    elif node.target is aten.index_put.default and len(node.args) == 4 and node.args[3] is True:
        names, at = node.args[1], 2
        index = names[0] if isinstance(names, list | tuple) and len(names) == 1 else None
    if not isinstance(index, fx.Node):
        return None
    found = Addition(node, index, at)
    to, names, given = (x.meta["val"] for x in (found.base, index, found.rows))
    if to.dim() != 2 or given.dim() != 2 or names.dim() != 1 or names.dtype not in (torch.int64, torch.int32):
        return None
    features = given.shape[1]
    if given.dtype != to.dtype or to.dtype not in (torch.bfloat16, torch.float16) or not isinstance(features, int):
        return None
    row = features * given.element_size()
    fits = row % ROW_BYTES == 0 and 0 < row <= MOST_ROW_BYTES
    whole = same_size(to.shape[1], features) and same_size(given.shape[0], names.shape[0])
    return found if fits and whole else None


def _same_shape(a: Any, b: Any) -> bool:
    shapes = [x.meta["val"].shape for x in (a, b)]
    return len(shapes[0]) == len(shapes[1]) and all(same_size(m, n) for m, n in zip(*shapes, strict=True))


def _repeated(wide: Any) -> fx.Node | None:
    """The index [edges] of which ``wide`` [edges, features] is a copy a column, as graph libraries expand it."""
    if not isinstance(wide, fx.Node) or wide.target is not aten.expand.default:
        return None
    column: Any = wide.args[0]
    if column.meta["val"].dim() != 2 or not same_size(column.meta["val"].shape[1], 1):
        return None
    while isinstance(column, fx.Node) and column.meta["val"].dim() == 2 and is_view(column):
        column = column.args[0]
    return column if isinstance(column, fx.Node) and column.meta["val"].dim() == 1 else None


def _gain_us(additions: list[Addition]) -> float:
    """What sums in sorted order take less than atomics do, the sort counted once."""
    gain, edges = 0.0, 0
    for found in additions:
        fake = found.rows.meta["val"]
        edges, features = hint(fake.shape[0]), fake.shape[1]
        gain += ATOMIC_US * edges * features - SUM_US - edges * features * fake.element_size() / SUM_BYTES_PER_US
    return gain - SORT_US - edges / SORT_EDGES_PER_US


def is_zeros(node: fx.Node) -> bool:
    """Whether a sum that begins with ``node`` begins with nothing."""
    if node.target in (aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default):
        return True
    return node.target in (aten.full.default, aten.full_like.default) and bool(node.args[1] == 0)


def sort_kernel(found: Addition) -> Kernel:
    """The sort of an index, which all of its additions share: int64 places of the edges, int32 starts of the nodes."""
    edges, nodes = _edges(found), float(hint(found.base.meta["val"].shape[0]))
    read = ((found.index.name, edges * found.index.meta["val"].element_size()),)
    return _kernel(found, "sort", Own("sort", edges, 1.0), read, _order(found, edges, nodes))


def sum_kernel(found: Addition, readers: Readers) -> Kernel:
    """A sum over sorted rows: rows and their places are read, each node's sum is written."""
    edges, nodes = _edges(found), float(hint(found.base.meta["val"].shape[0]))
    touched = moved((found.node,), readers)
    operands = tuple((name, size) for name, size in touched.reads if name != found.index.name)
    work = Own("segment_sum", edges, float(found.rows.meta["val"].shape[1]))
    return _kernel(found, "sum", work, (*operands, *_order(found, edges, nodes)), touched.writes)


Moved = tuple[tuple[str, float], ...]


def _order(found: Addition, edges: float, nodes: float) -> Moved:
    return (f"{found.index.name}.order", 8 * edges), (f"{found.index.name}.starts", 4 * (nodes + 1))


def _edges(found: Addition) -> float:
    return float(hint(found.rows.meta["val"].shape[0]))


def _kernel(found: Addition, name: str, work: Own, reads: Moved, writes: Moved) -> Kernel:
    node = found.node
    return Kernel(f"{node.name}.{name}", work, reads, writes, (target_name(node),), source(node))
