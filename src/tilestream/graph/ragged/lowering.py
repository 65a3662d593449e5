"""A ragged region as a pipeline: axes of all its values first, then ops in plain form, by the rules of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from tilestream.graph.lowering import Binding, Steps, constant_of, dtype_of
from tilestream.graph.nodes import Unsupported, argument, packet, tensor_of, value
from tilestream.graph.operators.rules import REDUCTIONS, SHAPES
from tilestream.graph.provenance import source
from tilestream.graph.ragged.growth import FILLS, Grown
from tilestream.graph.ragged.lists import Gather
from tilestream.graph.ragged.rules import POINTWISE, features_of
from tilestream.graph.ragged.spaces import Dim, Space
from tilestream.graph.rewrites.operators import LOOSE, SEGMENT_REDUCE
from tilestream.graph.sizes import expression, settled
from tilestream.graph.sums import OF_NOTHING, constant
from tilestream.ir.axes import At, Axis, View, along
from tilestream.ir.pipeline import Role, Tensor, Tile, TileOp

NODES, EDGES = Axis("nodes"), Axis("edges", of="nodes", bounds="starts")
LETTERS = "fhgdabc"
"""Names of axes of features, the innermost first."""

Dims = tuple[Dim, ...]


class Shapes:
    """Axes of the dimensions behind the first of every value: of members, of rows that are gathered, and of what comes
    from outside, which has those of the first member that reads it.

    Raises:
        Unsupported: with the node that stands in the way.
    """

    def __init__(self, grown: Grown) -> None:
        self.space, self._grown = Space(), grown
        self._members = frozenset(grown.members)
        self.dims: dict[fx.Node, Dims] = {}
        for node in grown.members:
            try:
                self.dims[node] = self._of(node)
            except Unsupported as reason:
                raise Unsupported(reason.reason, node) from reason
        known = list(self.dims.values())
        self.space.share(known)
        self.places = self.space.ordered(known)

    def leaves(self, node: fx.Node) -> tuple[int, ...]:
        """The axes of a value's features, in the order of the region."""
        return tuple(axis for dim in self.dims[node] for axis in self.space.leaves(dim))

    def given(self, node: fx.Node, rank: int = 0) -> Dims:
        """Of an operand; one that is not known yet gets new ones, for ``rank`` dimensions behind the first."""
        if node not in self.dims:
            if node in self._members:
                raise Unsupported("its operand is defined later in the region")
            rows = self._grown.gather(node)
            if rows is not None:
                self.dims[node] = self._rows(rows.table)
            elif not self.is_fixed(node, rank):
                return self._rows(node)
            else:
                self.dims[node] = self.space.new(int(d) for d in tensor_of(node).shape)
        return self.dims[node]

    def _rows(self, table: fx.Node) -> Dims:
        if table not in self.dims:
            sizes = [settled(d) for d in tensor_of(table).shape[1:]]
            if not all(isinstance(d, int) for d in sizes):
                raise Unsupported("the feature dimension is dynamic")
            self.dims[table] = self.space.new(int(d) for d in sizes)
        return self.dims[table]

    def is_fixed(self, node: fx.Node, rank: int) -> bool:
        """Whether an operand from outside has neither edges nor nodes, beside ``rank`` dimensions of features."""
        if node in self._members or self._grown.gather(node) is not None:
            return False
        fake = tensor_of(node)
        if fake.dim() <= rank:
            return True
        sizes = (self._grown.edges.edges, self._grown.edges.nodes)
        return expression(fake.shape[0]) not in sizes

    def _of(self, node: fx.Node) -> Dims:
        kind, fake = packet(node), tensor_of(node)
        sizes = [settled(d) for d in fake.shape[1:]]
        if not all(isinstance(d, int) for d in sizes):
            raise Unsupported("the feature dimension is dynamic")
        if node.target is SEGMENT_REDUCE:
            dims = self.given(_node(node.args[1]), len(sizes))
            if node.args[0] is not None:
                dims = self._broadcast([dims, self.given(_node(node.args[0]), len(sizes))], sizes)
            return dims
        if kind in FILLS:
            return tuple(() for _ in sizes)
        rows = self._grown.gather(node) or self._grown.inside.get(node)
        if rows is not None:
            return self._rows(rows.table)
        if kind in SHAPES:
            return self._view(node, [int(d) for d in sizes])
        if kind in REDUCTIONS:
            dims, over = self.given(_node(node.args[0])), features_of(node)
            keeps = bool(argument(node, 2, "keepdim", False))
            left = [() if d + 1 in over else dim for d, dim in enumerate(dims)]
            return tuple(dim for d, dim in enumerate(left) if keeps or d + 1 not in over)
        read = [n for n in node.all_input_nodes if value(n) is not None]
        return self._broadcast([self.given(n, len(sizes)) for n in read], sizes)

    def _broadcast(self, operands: Sequence[Dims], sizes: Sequence[object]) -> Dims:
        """The dimensions of a result, aligned at the last ones."""
        made: list[Dim] = [()] * len(sizes)
        for dims in operands:
            for back, dim in enumerate(reversed(dims[-len(sizes) :] if sizes else ()), 1):
                if self.space.leaves(dim) and made[-back]:
                    self.space.unify(made[-back], dim)
                made[-back] = made[-back] or dim
        return tuple(made)

    def _view(self, node: fx.Node, sizes: Sequence[int]) -> Dims:
        before = _node(node.args[0])
        dims, had = self.given(before), [settled(d) for d in tensor_of(before).shape[1:]]
        if had == list(sizes):
            return dims
        if expression(tensor_of(before).shape[0]) != expression(tensor_of(node).shape[0]):
            raise Unsupported("a view that joins edges")
        whole = [self.space.extent(self.space.leaves(dim)) for dim in dims]
        repeats = any(size != own for size, own in zip(had, whole, strict=True))
        if len(sizes) >= len(had) and packet(node).__name__ == "expand":
            new: list[Dim] = [()] * (len(sizes) - len(had))
            return (*new, *dims)
        ones = [d for d in range(len(had)) if had[d] != 1]
        if repeats:  # only dimensions of size 1 come and go
            if [had[d] for d in ones] != [s for s in sizes if s != 1]:
                raise Unsupported("a view of repeated elements")
            left = iter([dims[d] for d in ones])
            return tuple(next(left) if s != 1 else () for s in sizes)
        return self.space.viewed(dims, sizes)


def _node(x: object) -> fx.Node:
    if not isinstance(x, fx.Node):
        raise Unsupported("an operand is not a tensor")
    return x


@dataclass
class Ragged:
    """Collects the program of a ragged region: ``operators.writes.Writes`` over edges and nodes.

    Args:
        listed: makes the node that has an index in sorted order.
    """

    grown: Grown
    listed: Callable[[Gather], fx.Node]
    shapes: Shapes
    ops: list[TileOp] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    inputs: list[Binding] = field(default_factory=list)
    parameters: list[Binding] = field(default_factory=list)
    values: dict[fx.Node, Tile] = field(default_factory=dict)
    _loads: dict[Any, Tile] = field(default_factory=dict)
    _names: dict[tuple[fx.Node, Steps], str] = field(default_factory=dict)
    _axes: dict[int, Axis] = field(default_factory=dict)
    _at: fx.Node | None = None

    def __post_init__(self) -> None:
        order = sorted(self.shapes.places, key=self.shapes.places.__getitem__, reverse=True)
        for axis, letter in zip(order, LETTERS, strict=False):
            self._axes[axis] = Axis(letter, self.shapes.space.size(axis))
        if len(order) > len(LETTERS):
            raise Unsupported("its features have too many dimensions")

    # -- members --------------------------------------------------------------------------------

    def emit(self, node: fx.Node) -> None:
        """Append what a member computes."""
        self._at = node
        kind = packet(node)
        if self.grown.gather(node) is not None:
            return  # loaded where it is read
        if node.target is SEGMENT_REDUCE:
            self.values[node] = self._reduced(node)
        elif kind in FILLS:
            number = constant(node)
            if number is None:
                raise Unsupported("it is filled with what is no number")
            self.values[node] = self._op("fill", (EDGES,), (), attrs={"value": number})
        elif kind in SHAPES:
            self.values[node] = self.tile(node.args[0])
        elif kind in REDUCTIONS:
            self.values[node] = self._summed(node, REDUCTIONS[kind])
        elif kind in POINTWISE:
            self.values[node] = POINTWISE[kind](self, node)
        else:  # of a node's own value at the receivers of its edges
            self.values[node] = self.values[self.grown.inside[node].table]

    def _reduced(self, node: fx.Node) -> Tile:
        how = str(argument(node, 5, "how", "sum"))
        base, given = node.args[:2]
        rows = self._at_edges(self.tile(given))
        attrs = {"empty": OF_NOTHING[how]} if how in ("max", "min") and base is None else {}
        axes = (NODES, *rows.axes[1:])
        total = self._op("product", axes, (rows,), (), attrs, how)
        if base is None:
            return total
        kinds = {"sum": "add", "max": "maximum", "min": "minimum", "mul": "mul"}
        return self.binary(kinds[how], total, self.operand(base, self.frame(node)), "f32")

    def _summed(self, node: fx.Node, kind: str) -> Tile:
        x = self.tile(node.args[0])
        kept = {self._axes[a] for a in self.shapes.leaves(node)}
        over = [a for a in x.axes if a.size is not None and a not in kept]
        wanted = {self._axes[a] for a in self.shapes.leaves(_node(node.args[0]))}
        if not wanted <= set(x.axes):
            raise Unsupported("it reduces what is repeated")
        if not over:
            return x
        made = self._op(
            "product", tuple(a for a in x.axes if a not in over), (x,), combine="sum" if kind == "mean" else kind
        )
        return self.binary("mul", made, 1 / prod(a.size or 1 for a in over), "f32") if kind == "mean" else made

    def _at_edges(self, tile: Tile) -> Tile:
        """A value of nodes as one of their edges."""
        if EDGES in tile.axes:
            return tile
        one = self._op("fill", (EDGES,), (), attrs={"value": 1.0})
        return self.binary("mul", one, tile, "f32")

    def store(self, node: fx.Node, name: str, of_edges: bool) -> None:
        """Append the store of a member's value.

        Raises:
            Unsupported: it is no tensor of floats in memory, or repeats elements.
        """
        fake, tile = tensor_of(node), self.values[node]
        leaves = [self._axes[a] for a in self.shapes.leaves(node)]
        if prod(a.size or 1 for a in leaves) != prod(settled(d) for d in fake.shape[1:]):
            raise Unsupported("a result that repeats elements leaves the region", node)
        if of_edges and self.grown.edges.starts.meta.get(LOOSE):
            raise Unsupported("what every row has leaves the region, and rows may be in no segment", node)
        if of_edges:
            tile = self._at_edges(tile)
        if set(tile.axes) != {EDGES if of_edges else NODES, *leaves}:
            raise Unsupported("a result that repeats elements leaves the region", node)
        rows = EDGES if of_edges else NODES
        self.tensors[name] = Tensor(name, Role.OUTPUT, (rows, *leaves), dtype_of(node))
        first = At((rows.name,), index=self._order()) if of_edges else At((rows.name,))
        at = (first, *(At((a.name,)) for a in leaves))
        self.ops.append(TileOp("store", None, (_own(tile),), (View(name, at),), (), source(node)))

    # -- operands -------------------------------------------------------------------------------

    def frame(self, node: fx.Node, /, *operands: object) -> int:
        """How many dimensions of features there are."""
        return len(self.shapes.dims[node])

    def tile(self, node: object, frame: int | None = None, /) -> Tile:
        found = self.operand(node, tensor_of(_node(node)).dim() - 1 if frame is None else frame)
        if isinstance(found, Tile):
            return found
        raise Unsupported("an operand has neither edges nor nodes")

    def operand(self, node: object, frame: int, /) -> Tile | str | float:
        """A tile, the name of a tensor that is the same for all edges, or a number."""
        if isinstance(node, bool | int | float):
            return float(node)
        node = _node(node)
        if node in self.values:
            return self.values[node]
        if node in self.grown.members and self.grown.gather(node) is None:
            raise Unsupported("its operand is defined later in the region")
        fake = tensor_of(node)
        if node.op == "get_attr" and not fake.dim() and fake.device.type == "cpu":
            return constant_of(node)
        starts = self.grown.edges.starts.meta["val"]
        if fake.device != starts.device:
            raise Unsupported(f"an operand is on {fake.device}, the result on {starts.device}")
        if self.shapes.is_fixed(node, frame):
            return self._bound(node, Role.PARAMETER, None)
        rows = self.grown.gather(node)
        if rows is not None:
            return self._rows(rows)
        if expression(fake.shape[0]) == self.grown.edges.nodes and not self._takes_edges(node):
            return self._own_row(node)
        return self._load(node, EDGES, self._order(), node)

    def _takes_edges(self, node: fx.Node) -> bool:
        """Whether the member at hand reads a node's value as that of edges, where there are as many nodes."""
        at = self._at
        assert at is not None
        return at in self.grown.of_edges or (at.target is SEGMENT_REDUCE and at.args[1] is node)

    def _rows(self, rows: Gather) -> Tile:
        """Rows of a table, one an edge."""
        at_receivers = rows.index is self.grown.edges.index
        if at_receivers and expression(tensor_of(rows.table).shape[0]) == self.grown.edges.nodes:
            return self._own_row(rows.table)
        listed = self.listed(rows)
        return self._load(rows.table, EDGES, self._index(listed, "src"), listed)

    def _own_row(self, table: fx.Node) -> Tile:
        return self._load(table, NODES, "", None)

    def _load(self, node: fx.Node, rows: Axis, index: str, by: fx.Node | None) -> Tile:
        if (node, rows, by) not in self._loads:
            of_edges = rows is EDGES and by is node
            name = self._bound(node, Role.INPUT if of_edges else Role.PARAMETER, EDGES if of_edges else NODES)
            features = self.tensors[name].axes[1:]
            at = (At((rows.name,), index=index), *(At((a.name,)) for a in features))
            tile = Tile(f"load{len(self.ops)}", (rows, *features), self.tensors[name].dtype)
            self.ops.append(TileOp("copy", tile, (), (View(name, at),), (), self._line()))
            self._loads[node, rows, by] = tile
        return self._loads[node, rows, by]

    def _bound(self, node: fx.Node, role: Role, rows: Axis | None) -> str:
        """The tensor of a node from outside, its features over the region's axes."""
        fake = tensor_of(node)
        features = tuple(self._axes[a] for a in self.shapes.leaves(node))
        shape = fake.shape if rows is None else fake.shape[1:]
        sizes = tuple(a.size or 1 for a in features)
        steps: Steps = ()
        if tuple(settled(d) for d in shape) != sizes:
            steps = (("features", *sizes),) if rows is not None else (("vector", *sizes),) if sizes else (("scalar",),)
        if (node, steps) not in self._names:
            name = f"{'e' if rows is EDGES else 'v' if rows is None else 'x'}{len(self._names)}"
            first = () if rows is None else (EDGES,) if rows is EDGES else (Axis(f"{name}.rows"),)
            self.tensors[name] = Tensor(name, role, (*first, *features), dtype_of(node))
            (self.inputs if role is Role.INPUT else self.parameters).append(Binding(name, node, steps))
            self._names[node, steps] = name
        return self._names[node, steps]

    def _order(self) -> str:
        """Empty where edges lie side by side."""
        order = self.grown.edges.order
        return "" if order is None else self._index(order, "order")

    def _index(self, node: fx.Node, title: str) -> str:
        """The tensor of what names a row for each edge."""
        if (node, ()) not in self._names:
            taken = sum(name.startswith(title) for name in self.tensors)
            name = f"{title}{taken or ''}"
            wide = tensor_of(node).dtype is torch.int64
            self.tensors[name] = Tensor(name, Role.INPUT, (EDGES,), "i64" if wide else "i32")
            self.inputs.append(Binding(name, node, ()))
            self._names[node, ()] = name
        return self._names[node, ()]

    def bounds(self) -> None:
        """Append where each node's edges lie, and which nodes have many."""
        for node, name in ((self.grown.edges.starts, "starts"), (self.grown.edges.busy, "starts.busy")):
            if node is None:
                continue
            self.tensors[name] = Tensor(name, Role.PARAMETER, (Axis(f"{name}.rows"),), "i32")
            self.parameters.append(Binding(name, node, ()))

    # -- ops ------------------------------------------------------------------------------------

    def unary(self, kind: str, x: Tile, dtype: str, /, **attrs: float | int | str) -> Tile:
        return self._op(kind, x.axes, (x,), attrs=attrs, dtype=dtype if kind == "cast" else "f32")

    def binary(self, kind: str, left: Tile | str | float, right: Tile | str | float, dtype: str, /) -> Tile:
        tiles = [x for x in (left, right) if isinstance(x, Tile)]
        if not tiles:
            raise Unsupported("neither operand has edges or nodes")
        names = [x for x in (left, right) if isinstance(x, str)]
        attrs: dict[str, float | int | str] = {}
        for x in (left, right):
            if isinstance(x, int | float):
                attrs["scalar"] = float(x)
        if not isinstance(left, Tile):
            attrs["reversed"] = 1
        features = {a for x in (*tiles, *(self.tensors[n] for n in names)) for a in x.axes if a.size is not None}
        rows = EDGES if any(EDGES in x.axes for x in tiles) else NODES
        axes = (rows, *(a for a in reversed(self._axes.values()) if a in features))
        return self._op(kind, axes, tuple(tiles), tuple(names), attrs)

    def _op(
        self,
        kind: str,
        axes: tuple[Axis, ...],
        tiles: tuple[Tile, ...],
        tensors: tuple[str, ...] = (),
        attrs: Mapping[str, float | int | str] = MappingProxyType({}),
        combine: str = "sum",
        dtype: str = "f32",
    ) -> Tile:
        made = Tile(f"{kind}{len(self.ops)}", axes, dtype)
        read = tuple(View(n, tuple(At((a.name,)) for a in self.tensors[n].axes)) for n in tensors)
        op = TileOp(kind, made, tuple(map(_own, tiles)), read, tuple(attrs.items()), self._line(), combine)
        self.ops.append(op)
        return made

    def _line(self) -> str:
        return "" if self._at is None else source(self._at)


def _own(tile: Tile) -> View:
    return along(tile.name, [a.name for a in tile.axes])
