"""What lies in memory and how much of it an operator moves: values, operands, bytes read and written."""

from __future__ import annotations

from math import prod

import torch
from torch import fx

from tilestream.graph.costs.table import Eager, Kind, row
from tilestream.graph.costs.work import looked_up
from tilestream.graph.nodes import VIEWS, packet
from tilestream.graph.nodes import value as tensor
from tilestream.ir.dtypes import DTYPES
from tilestream.studies.kitsune.compiler.operators import Operand, Value
from tilestream.studies.kitsune.sources import Sources
from tilestream.studies.kitsune.work import outputs

aten = torch.ops.aten


class Memory:
    """The values of a graph, by name, as its nodes are met in order."""

    def __init__(self) -> None:
        self.sources = Sources()
        self.values: dict[str, Value] = {}
        self.itemsize: dict[str, float] = {}  # bytes of one element as fx sees it: a complex one may lie as two bf16

    def read(self, graph: fx.Graph, stored: set[str]) -> None:
        """Take in a graph: what it views, and the tensors that it is given. ``stored`` names its parameters."""
        self.sources.read(graph)
        for node in graph.nodes:
            like = tensor(node)
            known = node.name in self.values
            if node.op != "placeholder" or known or like is None:
                continue
            if all(s.node != node.name for s in self.sources[node]):
                continue  # a result that the forward graph saved
            is_stored = node.name in stored
            self._add(_value(node.name, like, like.dtype, is_parameter=is_stored, is_input=not is_stored), like)

    def write(self, node: fx.Node) -> list[tuple[str, float]]:
        """Add the results of ``node`` that anyone reads; gives their names and the bytes that are written."""
        written = []
        for key, like in outputs(node).items():
            if key != node.name and not _read(node, int(key.rpartition(".")[2])):
                continue
            value = _value(key, like, _stored_dtype(node) if key == node.name else like.dtype)
            size = self._written(node, value.bytes)
            if row(packet(node)).eager is Eager.TABLE_GRADIENT:
                value = _value(key, like, like.dtype, size=int(size))  # rows of the gradient, not the whole table
            self._add(value, like)
            written.append((key, size))
        return written

    def operands(self, node: fx.Node, inner: set[str]) -> list[Operand]:
        """What ``node`` reads, without the values named by ``inner``, which never leave its operator."""
        kind = row(packet(node)).kind
        if kind is Kind.FILL:  # it takes a tensor's dtype, not its data
            return []
        found = []
        for index, used in enumerate(node.all_input_nodes):
            like = tensor(used)
            for s in self.sources[used] if like is not None else ():
                if s.node in inner:
                    continue
                assert like is not None
                itemsize = self.itemsize[s.node]
                distinct = s.elements * itemsize
                touched = prod(like.shape) * itemsize if len(self.sources[used]) == 1 else distinct
                if kind is Kind.GATHER and index == 0:
                    touched = looked_up(node) * itemsize
                    distinct = min(distinct, touched)
                elif packet(node) is aten.index_put and index == 0:
                    distinct = touched = min(distinct, self._written(node, distinct))
                found.append(Operand(s.node, _real_shape(like), distinct, max(distinct, touched)))
        return found

    def is_parameter(self, node: fx.Node) -> bool:
        return any(self.values[s.node].is_parameter for s in self.sources[node])

    def _add(self, value: Value, like: torch.Tensor) -> None:
        self.values[value.name] = value
        self.itemsize[value.name] = value.bytes / max(1, prod(like.shape))

    def _written(self, node: fx.Node, whole: float) -> float:
        """Bytes written: a scatter into what exists, or into rows of a gradient, writes what it is given."""
        if row(packet(node)).eager is Eager.TABLE_GRADIENT:
            gradient = node.all_input_nodes[0]
            return min(float(whole), looked_up(node) * self.itemsize[self.sources[gradient][0].node])
        if packet(node) is not aten.index_put:
            return float(whole)
        given = node.args[2]
        assert isinstance(given, fx.Node)
        return min(float(whole), sum(s.elements * self.itemsize[s.node] for s in self.sources[given]))


def _value(name: str, like: torch.Tensor, dtype: torch.dtype, size: int | None = None, **flags: bool) -> Value:
    shape = _real_shape(like)
    real = dtype.to_real() if dtype.is_complex else dtype
    dtype_name = DTYPES.get(real, str(real).removeprefix("torch."))
    return Value(name, shape, dtype_name, prod(shape) * real.itemsize if size is None else size, **flags)


def _real_shape(like: torch.Tensor) -> tuple[int, ...]:
    """The shape in real numbers: the last dimension of complex ones counts twice."""
    shape = tuple(int(d) for d in like.shape)
    return (*shape[:-1], 2 * shape[-1]) if like.dtype.is_complex and shape else shape


def _read(node: fx.Node, index: int) -> bool:
    """Whether one of several results is read at all."""
    return any(user.args[1] == index and len(user.users) > 0 for user in node.users)


def _stored_dtype(node: fx.Node) -> torch.dtype:
    """The dtype in which a result lies in memory: a narrower one where everyone who reads it converts it to that."""
    value = tensor(node)
    assert value is not None
    own = value.dtype.to_real() if value.dtype.is_complex else value.dtype
    wanted: set[torch.dtype] = set()

    def look(user: fx.Node) -> None:
        dtype = user.kwargs.get("dtype")
        if packet(user) in VIEWS:
            for next_user in user.users:
                look(next_user)
        elif packet(user) is aten._to_copy and isinstance(dtype, torch.dtype):
            wanted.add(dtype)
        else:
            wanted.add(own)

    for user in node.users:
        look(user)
    narrow = next(iter(wanted)) if len(wanted) == 1 else own
    return narrow if narrow.itemsize < own.itemsize else value.dtype
