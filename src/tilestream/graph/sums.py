"""Sums of rows by an index: which nodes of a graph add rows to the rows that an index names, and which are one sum.

``index_add``, ``scatter_add``, ``scatter_reduce`` and ``index_put`` send messages to nodes. The gradient of rows that
were gathered, as of ``v[senders]``, is such a sum too; rows that were gathered twice have two of them, of columns of
one matrix, added up. Besides sums there are means, maxima, minima and products, by the same index.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from tilestream.graph.nodes import argument, aten, behind, is_view, packet, value
from tilestream.graph.sizes import same_shape, same_size, same_sizes, settled

CONSTANTS = {aten.new_zeros, aten.new_ones, aten.zeros_like, aten.ones_like, aten.zeros, aten.ones}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

HOW = {"sum": "sum", "mean": "mean", "amax": "max", "amin": "min", "prod": "mul"}
"""What ``scatter_reduce`` and ``index_reduce`` call the ways to reduce, by the names of ``segment_reduce``."""

OF_NOTHING = {"sum": 0.0, "mean": 0.0, "max": 0.0, "min": 0.0, "mul": 1.0}
"""What nodes without rows have."""

ALIASES = {
    *(aten.slice, aten.select, aten.view, aten.unsqueeze, aten.squeeze, aten.alias, aten.detach, aten.narrow),
    *(aten.split, aten.split_with_sizes, aten.unbind, aten.chunk),
}
"""Views that never copy, as ``reshape`` may."""


@dataclass(frozen=True)
class Part:
    """What one operator adds: row ``first + every * edge`` of ``matrix`` to the node ``index[edge]``.

    Attributes:
        node: the operator.
        base: what it adds to, [nodes, *]; None for zeros, or whatever nodes without rows have.
        index: integers of any shape, edges in its order; below zero they count from the last node.
        rows: the messages, [*index's shape, *].
        matrix: what ``rows`` are part of, read as rows of ``features``; ``rows`` itself where that is none.
        how: ``sum``, ``mean``, ``max``, ``min`` or ``mul``.
        counts_base: whether ``base`` is one of those that a mean is of.
    """

    node: fx.Node
    base: fx.Node | None
    index: fx.Node
    rows: fx.Node
    features: int
    matrix: fx.Node
    every: int = 1
    first: int = 0
    how: str = "sum"
    counts_base: bool = True

    @property
    def whole(self) -> bool:
        """Whether its rows are the matrix, one an edge."""
        return self.matrix is self.rows and self.index.meta["val"].dim() == 1


@dataclass(frozen=True)
class Sum:
    """``node`` is ``base`` (zeros where None) plus the rows of ``parts``, which are rows of one matrix.

    What has another ``how`` than ``sum`` has one part.
    """

    node: fx.Node
    base: fx.Node | None
    parts: tuple[Part, ...]

    @property
    def how(self) -> str:
        return self.parts[0].how

    @property
    def separate(self) -> list[Sum]:
        """One sum for each operator."""
        return [Sum(part.node, part.base, (part,)) for part in self.parts]


def sums(graph: fx.Graph) -> list[Sum]:
    """Every sum of rows by an index of a functional graph, with what it is added to where nobody else reads it."""
    found: dict[fx.Node, Sum] = {}
    for node in graph.nodes:
        part = part_of(node)
        if part is not None:
            found[node] = Sum(node, part.base, (part,))
        elif (taken := _taken(node, found)) is not None:
            found[node] = replace(found.pop(taken), node=node, base=_other(node, taken))
        else:
            continue
        found[node] = _joined(found, found[node])
    return list(found.values())


def _taken(node: fx.Node, found: dict[fx.Node, Sum]) -> fx.Node | None:
    """Which operand of ``a + b`` is a sum that starts with zeros and is read here alone; the other is its base."""
    if node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1:
        return None
    shapes = [value(x) for x in node.args]
    made = value(node)
    if made is None or any(s is None or s.dtype != made.dtype or not same_shape(s, made) for s in shapes):
        return None
    alone = [x for x in node.args if isinstance(x, fx.Node) and x in found and len(x.users) == 1]
    free = [x for x in alone if found[x].base is None and found[x].how == "sum"]
    return next((x for x in reversed(free) if _other(node, x) is not x), None)


def _other(node: fx.Node, operand: fx.Node) -> Any:
    return node.args[1] if node.args[0] is operand else node.args[0]


def _joined(found: dict[fx.Node, Sum], last: Sum) -> Sum:
    """``last`` with the parts of its base, where that is a sum of rows of the same matrix that nobody else reads."""
    base = last.base
    if base is None or base not in found or len(base.users) > 1 or {last.how, found[base].how} != {"sum"}:
        return last
    before = found[base]
    if before.parts[0].matrix is not last.parts[0].matrix or before.parts[0].features != last.parts[0].features:
        return last
    del found[base]
    return Sum(last.node, before.base, (*before.parts, *last.parts))


def part_of(node: fx.Node) -> Part | None:
    """What ``node`` adds, if it is rows of floats to rows that an index names."""
    found = _operands(node)
    if found is None:
        return None
    made, names, given = (value(x) for x in (node, found.index, found.rows))
    if made is None or names is None or given is None or names.dtype not in (torch.int64, torch.int32):
        return None
    if made.dtype not in DTYPES or given.dtype != made.dtype or not made.dim():
        return None
    of_row = [settled(d) for d in made.shape[1:]]
    if not all(isinstance(d, int) for d in of_row):
        return None
    if not same_sizes(given.shape, (*names.shape, *of_row)):
        return None
    features = prod(d for d in of_row if isinstance(d, int))
    free, base = _neutral(found)
    if features == 0 or not free:
        return None
    plain = Part(node, base, found.index, found.rows, features, found.rows, how=found.how, counts_base=found.self)
    return _in_matrix(plain, names.dim())


def _neutral(found: _Operands) -> tuple[bool, fx.Node | None]:
    """Whether what nodes without rows get can be had, and the base that is to be counted; None for none.

    Without the base's own value among the operands, nodes without rows keep it: then it must be what they have anyway.
    """
    start = 0.0 if found.base is None else constant(found.base)
    if not found.self:
        return start == OF_NOTHING[found.how], None
    adds_nothing = found.how in ("sum", "mul") and start == OF_NOTHING[found.how]
    return True, None if adds_nothing else found.base


class _Operands(NamedTuple):
    """``self``: whether the base's own value is reduced with the rows."""

    base: Any
    index: Any
    rows: Any
    how: str = "sum"
    self: bool = True


def _operands(node: fx.Node) -> _Operands | None:
    """Base, index and rows of an operator that adds rows, or reduces them otherwise; None of another."""
    made = value(node)
    if made is None or node.op != "call_function":
        return None
    rows = (0, -made.dim())
    if node.target is aten.index_add.default and node.args[1] in rows and node.kwargs.get("alpha", 1) == 1:
        return _Operands(node.args[0], node.args[2], node.args[3])
    if node.target is aten.scatter_add.default and node.args[1] in rows:
        return _scattered(node)
    if node.target is aten.scatter_reduce.two and node.args[1] in rows:
        return _scattered(node, HOW[str(node.args[4])], bool(argument(node, 5, "include_self", True)))
    if node.target is aten.index_reduce.default and node.args[1] in rows:
        own = bool(argument(node, 5, "include_self", True))
        return _Operands(node.args[0], node.args[2], node.args[3], HOW[str(node.args[4])], own)
    if node.target is aten.index_put.default and argument(node, 3, "accumulate", False) is True:
        names: Any = node.args[1]
        return _Operands(node.args[0], names[0], node.args[2]) if len(names) == 1 else None
    if node.target is aten.embedding_dense_backward.default and node.args[3] == -1 and node.args[4] is False:
        return _Operands(None, node.args[1], node.args[0])
    return None


def _scattered(node: fx.Node, how: str = "sum", own: bool = True) -> _Operands | None:
    """Of an operator that names a place for each element: where all elements of a row have one place."""
    wide, given = (value(x) for x in node.args[2:4])
    alike = wide is not None and given is not None and same_shape(wide, given)
    return _Operands(node.args[0], repeated(node.args[2]), node.args[3], how, own) if alike else None


def repeated(wide: Any) -> fx.Node | None:
    """The index [edges] of which ``wide`` [edges, *] is a copy an element, as graph libraries expand it."""
    fake = value(wide)
    if fake is not None and fake.dim() == 1:
        return wide
    if not isinstance(wide, fx.Node) or wide.target is not aten.expand.default:
        return None
    column: Any = wide.args[0]
    fake = value(column)
    if fake is None or fake.dim() < 2 or not all(same_size(d, 1) for d in fake.shape[1:]):
        return None
    while isinstance(column, fx.Node) and is_view(column) and (fake := value(column)) is not None and fake.dim() > 1:
        column = column.args[0]
    found = value(column)
    return column if found is not None and found.dim() == 1 else None


def _in_matrix(part: Part, dims: int) -> Part:
    """The part with what its rows are columns of: every few rows of a matrix of narrower ones.

    Args:
        dims: of the index.
    """
    whole = behind(part.rows, lambda n: packet(n) in ALIASES or (n.target is operator.getitem and is_view(n)))
    rows, matrix = value(part.rows), value(whole)
    if whole is part.rows or rows is None or matrix is None or not packed(matrix) or matrix.dtype != rows.dtype:
        return part
    strides = [settled(s) for s in rows.stride()]
    start = settled(rows.storage_offset() - matrix.storage_offset())
    width, features = strides[dims - 1] if dims else 0, part.features
    if not isinstance(width, int) or not isinstance(start, int) or width < features:
        return part
    wanted = [width * n for n in _packed_strides(rows.shape[:dims])] + _packed_strides(rows.shape[dims:])
    if width % features or start % features or not same_sizes(strides, wanted):
        return part
    return replace(part, matrix=whole, every=width // features, first=start // features)


def packed(fake: Tensor) -> bool:
    """Whether elements lie in order, without gaps."""
    return same_sizes(fake.stride(), _packed_strides(fake.shape))


def _packed_strides(shape: Any) -> list[Any]:
    strides: list[Any] = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * settled(size))
    return strides[: len(shape)]


def constant(node: Any) -> float | None:
    """The number that all elements of a node are, where it is made so; a number itself."""
    if not isinstance(node, fx.Node):
        return float(node) if isinstance(node, int | float) else None
    if node.target in (aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default):
        return 0.0
    if node.target in (aten.ones_like.default, aten.ones.default, aten.new_ones.default):
        return 1.0
    filled = {aten.scalar_tensor: 0, aten.full: 1, aten.full_like: 1, aten.new_full: 2}.get(packet(node))
    given = None if filled is None else node.args[filled]
    return float(given) if isinstance(given, int | float) else None


def first_alike(graph: fx.Graph, floats: bool = False) -> dict[fx.Node, fx.Node]:
    """Of each integer tensor that a graph computes, the first one computed alike: models take the same part of an index
    tensor in every layer.

    Args:
        floats: those of floats too: a compiler computes them once.
    """
    same: dict[fx.Node, fx.Node] = {}
    known: dict[str, fx.Node] = {}
    for node in graph.nodes:
        fake = value(node)
        if fake is None or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if fake.is_floating_point() and not floats:
            continue
        if node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags:
            continue
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: same.get(n, n))
        told = (fake.shape, fake.dtype) if packet(node) in CONSTANTS else (args, kwargs)  # not whose shape it has
        same[node] = known.setdefault(repr((node.target, told)), node)
    return same
