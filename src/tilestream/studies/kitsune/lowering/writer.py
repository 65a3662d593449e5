"""Writes operators of an ATen graph as tile ops over general axes: who reads what under which coordinates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import fx

from tilestream.graph.nodes import Unsupported, value
from tilestream.graph.provenance import source
from tilestream.ir.axes import At, Axis, View
from tilestream.ir.dtypes import DTYPES
from tilestream.ir.pipeline import Role, Tensor, Tile, TileOp
from tilestream.studies.kitsune.lowering.dims import Axes, Dims, Shape

INDICES = {torch.int32: "i32", torch.int64: "i64"}
"""Dtypes of tensors by which rows are looked up or added."""

Result = tuple[fx.Node, int]
"""One result of a node: those that have several number them."""


@dataclass(frozen=True)
class Ref:
    """Where the value of a node is: a tile or tensor, and its coordinates in axes of the node."""

    of: str
    at: tuple[At, ...]
    tile: Tile | None = None


@dataclass(frozen=True)
class Given:
    """A tensor of the program that is the value of ``node``, in the shape of its axes.

    Attributes:
        shape: of that value; the tensor of an index has one dimension, all elements in order.
        wraps: of an index whose negative elements count from the end: from where; else 0.
    """

    tensor: Tensor
    node: fx.Node
    shape: tuple[int, ...]
    wraps: int = 0

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """The tensor, where the node's value is ``value``."""
        made = value.reshape([a.size or 1 for a in self.tensor.axes]).contiguous()
        return torch.where(made < 0, made + self.wraps, made) if self.wraps else made


@dataclass
class Writer:
    """The ops of a program, in groups that load for themselves.

    Args:
        dims: of all values, settled.
        shapes: dimensions of every result; ``frames``: of what a node ranges over, its result's first.
        names: axes by number.
        whole: nodes whose values are whole operands (parameters) and no streams.
        sums: by their nodes, sums in memory: tiles, and where each is added.
    """

    dims: Dims
    shapes: Mapping[Result, Shape]
    frames: Mapping[fx.Node, Shape]
    names: Mapping[int, Axis]
    whole: frozenset[fx.Node] = frozenset()
    ops: dict[str, list[TileOp]] = field(default_factory=dict)
    given: dict[fx.Node, Given] = field(default_factory=dict)
    refs: dict[Result, Ref] = field(default_factory=dict)
    sums: dict[fx.Node, tuple[tuple[Tile, tuple[At, ...]], ...]] = field(default_factory=dict)
    _group: str = ""
    _node: fx.Node | None = None
    _loads: dict[tuple[str, View], Tile] = field(default_factory=dict)
    _count: int = 0

    def start(self, node: fx.Node, group: str) -> None:
        """Begin the ops of ``node``, which go to ``group``."""
        self._node, self._group = node, group
        self.ops.setdefault(group, [])

    # -- frames and operands

    @property
    def node(self) -> fx.Node:
        assert self._node is not None
        return self._node

    @property
    def range(self) -> Shape:
        """The dimensions that the node ranges over."""
        return self.frames.get(self.node, self.shapes[self.node, 0])

    def frame(self, node: fx.Node, *operands: object) -> Shape:
        """The dimensions that an elementwise operator's operands are aligned to, the last ones to each other."""
        return self.frames.get(node, self.shapes[node, 0])

    def axes(self, shape: Sequence[Axes]) -> tuple[Axis, ...]:
        return tuple(self.names[a] for a in self.dims.axes(shape))

    def ref(self, node: fx.Node, index: int = 0) -> Ref:
        """Where a value is; a tensor of the program if nothing here makes it."""
        if (node, index) in self.refs:
            return self.refs[node, index]
        if node not in self.given:
            fake = value(node)
            if fake is None:
                raise Unsupported("an operand is not a tensor")
            if node in self.sums:
                raise Unsupported("a sum by an index is read before it is complete", node)
            role = Role.PARAMETER if node in self.whole else Role.INPUT
            axes = self.axes(self.shapes[node, 0])
            dtype = INDICES.get(fake.dtype) or dtype_of(node)
            shape = tuple(a.size or 1 for a in axes)
            self.given[node] = Given(Tensor(f"{node.name}.in", role, axes, dtype), node, shape)
        own = self.given[node].tensor
        return Ref(own.name, tuple(At((a.name,)) for a in own.axes))

    def view(self, node: object, shape: Sequence[Axes], index: int = 0) -> View:
        """``node`` under the axes of ``shape``, dimension by dimension from the last; size 1 broadcasts.

        Raises:
            Unsupported: their dimensions are divided differently.
        """
        if not isinstance(node, fx.Node):
            raise Unsupported("an operand is not a tensor")
        own, to = self.shapes[node, index], {}
        if len(own) > len(shape):
            raise Unsupported("an operand has more dimensions than the result")
        for mine, theirs in zip(reversed(own), reversed(shape), strict=False):
            a, b = self.axes([mine]), self.axes([theirs])
            if a and [x.size for x in a] != [x.size for x in b]:
                raise Unsupported("its operands are divided into different dimensions")
            to |= {x.name: y.name for x, y in zip(a, b, strict=False)}
        ref = self.ref(node, index)
        return View(ref.of, tuple(replace(c, axes=tuple(to.get(a, a) for a in c.axes)) for c in ref.at))

    def operand(self, node: object, shape: Sequence[Axes], index: int = 0) -> Tile | float:
        """An operand of an elementwise operator: a tile of some of the frame's axes, or a number."""
        if isinstance(node, bool | int | float):
            return float(node)
        view = self.view(node, shape, index)
        assert isinstance(node, fx.Node)
        tile = self.ref(node, index).tile
        if tile is not None and view.at == tuple(At((a.name,)) for a in tile.axes):
            return tile
        key = (self._group, view)
        if key not in self._loads:
            named = {a.name: a for a in self.names.values()}
            axes = tuple(named[a] for a in view.axes)
            if tile is None:
                self._loads[key] = self._make("load", axes, dtype_of(node), (), (view,))
            else:
                self._loads[key] = self._make("copy", axes, tile.dtype, (view,))
        return self._loads[key]

    def tile(self, node: object, shape: Sequence[Axes] | None = None, index: int = 0) -> Tile:
        """As ``operand``, of a tensor; under the dimensions of the node at work if none are given."""
        found = self.operand(node, self.range if shape is None else shape, index)
        if isinstance(found, Tile):
            return found
        raise Unsupported("an operand has no rows of its own")

    def index(self, tensor: str, wraps: int) -> Given:
        """A tensor by which rows are looked up or added: from here on it has one dimension.

        Raises:
            Unsupported: it is made here.
        """
        node = next((n for n, given in self.given.items() if given.tensor.name == tensor), None)
        if node is None:
            raise Unsupported("is indexed by what its own pipeline makes")
        given = self.given[node]
        if {given.wraps, wraps} - {0, wraps or given.wraps}:
            raise Unsupported("one index into tensors of different lengths")
        flat = given.tensor
        if len(flat.axes) != 1:
            flat = replace(flat, axes=(Axis(f"{tensor}.all", prod(given.shape)),))
        self.given[node] = replace(given, tensor=flat, wraps=wraps or given.wraps)
        return self.given[node]

    # -- ops

    def loaded(self, view: View, shape: Sequence[Axes], dtype: str) -> Tile:
        """What a tensor holds under ``view``, over the axes of ``shape``."""
        return self._make("load", self.axes(shape), dtype, (), (view,))

    def unary(self, kind: str, x: Tile, dtype: str, **attrs: float | int | str) -> Tile:
        """``kind`` of every element of ``x``."""
        return self._make(kind, x.axes, dtype, (own(x),), attrs=tuple(attrs.items()))

    def binary(self, kind: str, left: Tile | str | float, right: Tile | str | float, dtype: str) -> Tile:
        """``left kind right``, at least one of them a tile, over the axes that they have together."""
        if isinstance(left, Tile) and isinstance(right, Tile):
            order = [a.name for a in self.axes(self.range)]
            both = {a.name: a for a in (*left.axes, *right.axes)}
            axes = sorted(both.values(), key=lambda a: order.index(a.name) if a.name in order else len(order))
            return self._make(kind, tuple(axes), dtype, (own(left), own(right)))
        tile, other = (left, right) if isinstance(left, Tile) else (right, left)
        if not isinstance(tile, Tile) or not isinstance(other, int | float):
            raise Unsupported("neither operand is a tensor")
        attrs: tuple[tuple[str, float | int | str], ...] = (("scalar", float(other)),)
        if not isinstance(left, Tile):
            attrs = (*attrs, ("reversed", 1))
        return self._make(kind, tile.axes, dtype, (own(tile),), attrs=attrs)

    def settle(self, result: Result) -> None:
        """Round a result to its dtype for all who read it from here on."""
        ref, dtype = self.refs.get(result), dtype_of(*result)
        if ref is not None and ref.tile is not None and dtype != "f32":
            tile = self.unary("cast", ref.tile, dtype)
            self.refs[result] = replace(ref, of=tile.name, tile=tile)

    def reduce(self, x: Tile, shape: Sequence[Axes], dtype: str, kind: str = "sum") -> Tile:
        """The sum or the maximum of ``x`` over each axis that ``shape`` lacks."""
        kept = {a.name for a in self.axes(shape)}
        axes = tuple(a for a in x.axes if a.name in kept)
        return self._make(kind, axes, dtype, (own(x),), combine="max" if kind == "max" else "sum")

    def product(self, views: Sequence[View], shape: Sequence[Axes], dtype: str) -> Tile:
        """Operands multiplied, and summed over each axis that ``shape`` lacks."""
        tensors = {g.tensor.name for g in self.given.values()}
        tiles = tuple(v for v in views if v.of not in tensors)
        return self._make("product", self.axes(shape), dtype, tiles, tuple(v for v in views if v.of in tensors))

    def factor(self, node: object, shape: Sequence[Axes]) -> View:
        """An operand of a product: a whole one as it lies, a stream as a tile."""
        view = self.view(node, shape)
        if isinstance(node, fx.Node) and self.ref(node).tile is None and node not in self.whole:
            return own(self.tile(node, shape))
        return view

    def parts(self, views: Sequence[View], shape: Sequence[Axes], dtype: str) -> Tile:
        """A concatenation: parts that are shifted to their places, the sum of which is the whole."""
        return self._make("cat", self.axes(shape), dtype, tuple(views))

    def copied(self, view: View, shape: Sequence[Axes], dtype: str) -> Tile:
        """A tile under other coordinates; what is outside of it is zero."""
        return self._make("copy", self.axes(shape), dtype, (view,))

    def widened(self, x: Tile, axis: Axis) -> Tile:
        """``x`` with one more axis, of size 1."""
        return self._make("copy", (*x.axes, axis), x.dtype, (own(x),))

    def _make(
        self,
        kind: str,
        axes: tuple[Axis, ...],
        dtype: str,
        tiles: tuple[View, ...],
        tensors: tuple[View, ...] = (),
        attrs: tuple[tuple[str, float | int | str], ...] = (),
        combine: str = "sum",
    ) -> Tile:
        tile = Tile(f"{self.node.name}.{kind}{self._count}", axes, dtype)
        self._count += 1
        self.ops[self._group].append(TileOp(kind, tile, tiles, tensors, attrs, source(self.node), combine))
        return tile


def own(tile: Tile) -> View:
    """A tile under its own axes."""
    return View(tile.name, tuple(At((a.name,)) for a in tile.axes))


def dtype_of(node: fx.Node, index: int = 0) -> str:
    """The IR's name of a result's dtype.

    Raises:
        Unsupported: tiles cannot have it.
    """
    fake = node.meta.get("val")
    fake = fake[index] if isinstance(fake, list | tuple) else fake
    if not isinstance(fake, torch.Tensor):
        raise Unsupported("an operand is not a tensor")
    if fake.dtype not in DTYPES:
        raise Unsupported(f"dtype {str(fake.dtype).removeprefix('torch.')}: only bfloat16, float16 and float32 stream")
    return DTYPES[fake.dtype]
