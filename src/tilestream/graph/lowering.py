"""Builds tile ops from ATen nodes: which operands are rows, which are whole parameters, which are scalars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx

from tilestream.graph.nodes import Unsupported, tensor_of, value
from tilestream.graph.provenance import source
from tilestream.graph.real import real
from tilestream.graph.sizes import expression, product, settled
from tilestream.ir.dtypes import DTYPES
from tilestream.ir.pipeline import Role, Tensor, Tile, TileOp
from tilestream.ir.taps import Tap
from tilestream.ir.tileops import OPS

MAX_FEATURES = 512
"""Widest linear result, and widest computed tile, of one stage: two warpgroups of 256 columns."""


Steps = tuple[tuple[str | int | float, ...], ...]
"""What is done to a tensor before the program sees it; the words are those of ``Binding``."""


INDEX_STEPS: Steps = (("index",),)
PARTS: Steps = (("parts",),)
"""The last step of a weight that products by parts read (``ir.float32``)."""


@dataclass(frozen=True)
class Value:
    """What an fx node is to a region: its elements in row-major order are the matrix ``[rows, tile.features]``.

    How the node's shape shows them follows from the shape alone (``of``), whatever operators made it: the features are
    its last dimension; or it lacks that (``dropped``), as after ``mean(-1)``: the tile is a column, and every element
    a row; or it shows neither (``folded``), as between the views of an einsum: only another view can take it on.
    """

    tile: Tile
    rows: sympy.Expr
    dropped: bool = False
    folded: bool = False

    @staticmethod
    def of(tile: Tile, shape: Sequence[int | torch.SymInt]) -> Value:
        """The value of a node of this shape, whose elements in row-major order are those of ``tile``."""
        if len(shape) and expression(shape[-1]) == tile.features:
            return Value(tile, product(shape[:-1]))
        return Value(tile, product(shape) / tile.features, dropped=tile.features == 1, folded=tile.features != 1)


@dataclass(frozen=True)
class Binding:
    """How a tensor of the program is made from an fx node.

    ``steps`` are applied in order to the node's tensor: ``("matrix",)`` drops a leading 1, ``("t",)`` transposes,
    ``("rows", a, b)`` takes rows of a weight, ``("flatten", n)`` reshapes to ``[rows, n]``, ``("features", m, n)`` to
    ``[its first dimension, m, n]``, ``("vector", n)`` to ``[n]``, of more numbers to these, ``("index",)`` to
    ``[rows]``, ``("scalar",)`` to ``[]``, ``("taps",)`` makes ``[out, ky kx in]`` of a convolution's weight ``[out,
    in, ky, kx]``, ``("rstd", eps)`` ``1 / sqrt(x + eps)`` in fp32 of a variance, and ``("parts",)`` the bf16 parts of a
    float32 weight, side by side (``graph.operators.split``).
    """

    tensor: str
    node: fx.Node
    steps: Steps


@dataclass(frozen=True)
class Frame:
    """The matrix that an operation works on: symbolic rows, features, and whether the shape lacks the latter."""

    rows: sympy.Expr
    features: int
    dropped: bool
    rank: int


Operand = Tile | str | float
"""A tile, the name of a parameter, or a scalar."""


@dataclass
class Emitter:
    """Collects the program of one region, or checks one node.

    Args:
        known: values of nodes that have been found to be tile ops. Those that are not in
            ``members`` are read from memory with the same meaning.
        members: nodes of the region; ``None`` while a single node is checked.
        widest: columns that a computed tile may have.
        wide: nodes that may be wider: hidden layers that are taken by chunks (``graph.few_rows.hidden``).
    """

    known: Mapping[fx.Node, Value]
    members: frozenset[fx.Node] | None = None
    widest: int = MAX_FEATURES
    wide: frozenset[fx.Node] = frozenset()
    ops: list[TileOp] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    inputs: list[Binding] = field(default_factory=list)
    parameters: list[Binding] = field(default_factory=list)
    values: dict[fx.Node, Value] = field(default_factory=dict)
    parameter_nodes: set[fx.Node] = field(default_factory=set)
    tile_nodes: set[fx.Node] = field(default_factory=set)
    deferred: dict[str, fx.Node] = field(default_factory=dict)
    parts: dict[tuple[str, int, int], Tile] = field(default_factory=dict)
    split: dict[str, tuple[Tile, ...]] = field(default_factory=dict)
    _loads: dict[tuple[fx.Node, int], Tile] = field(default_factory=dict)
    _bound: dict[tuple[fx.Node, Steps], str] = field(default_factory=dict)
    _source: str = ""
    _narrow: bool = True  # whether ``widest`` holds for the node at hand
    _device: torch.device | None = None

    # -- shapes ---------------------------------------------------------------------------------

    def start(self, node: fx.Node) -> None:
        """Begin the operations of ``node``."""
        self._source = source(node)
        self._narrow = node not in self.wide
        fake = value(node)
        self._device = fake.device if fake is not None else None

    def frame(self, node: fx.Node, *operands: object) -> Frame:
        """The matrix that ``node`` fills. It lacks the feature dimension if an operand of its shape does."""
        fake = _tensor(node)
        for operand in operands:
            known = self._known(operand)
            if known and known.dropped and known.rows == product(fake.shape):
                return Frame(known.rows, 1, True, fake.dim())
        return self.matrix(node)

    def natural(self, node: object) -> Frame:
        """The matrix that an operand is by itself."""
        if not isinstance(node, fx.Node):
            raise Unsupported("an operand is not a tensor")
        known = self._known(node)
        if known:
            return Frame(known.rows, known.tile.features, known.dropped, _tensor(node).dim())
        return self.matrix(node)

    def matrix(self, node: object) -> Frame:
        """The matrix that an operator along the last dimension sees in an operand."""
        fake = _tensor(node)
        if not fake.dim():
            raise Unsupported("a scalar has no rows")
        return Frame(product(fake.shape[:-1]), _features(fake.shape[-1]), False, fake.dim())

    def _known(self, node: object) -> Value | None:
        found = self._value(node)
        return None if found is None or found.folded else found

    def _value(self, node: object) -> Value | None:
        if not isinstance(node, fx.Node):
            return None
        return self.values.get(node) or self.known.get(node)

    # -- operands -------------------------------------------------------------------------------

    def tile(self, node: object, frame: Frame | None = None) -> Tile:
        """The tile of a row operand; loads it if it comes from outside the region."""
        frame = frame or self.natural(node)
        operand = self.operand(node, frame)
        if isinstance(operand, Tile):
            return operand
        raise Unsupported("an operand has no rows of its own")

    def whole(self, node: object) -> Tile:
        """The tile of a row operand whose shape does not matter, but only the order of its elements."""
        found = self._value(node)
        if found is None or not isinstance(node, fx.Node):
            return self.tile(node)
        return self._rows(node, found.tile.features, found.rows)

    def operand(self, node: object, frame: Frame) -> Operand:
        """An operand of an elementwise operation on ``frame``: tile, column, vector or scalar."""
        if isinstance(node, bool | int | float):
            return float(node)
        if not isinstance(node, fx.Node) or value(node) is None:
            raise Unsupported("a symbolic scalar operand")
        fake = _tensor(node)
        if node.op == "get_attr" and not fake.dim() and fake.device.type == "cpu":
            return constant_of(node)
        known = self._known(node)
        if known and known.rows == frame.rows and known.dropped == frame.dropped:
            if known.tile.features in (1, frame.features):
                return self._rows(node, known.tile.features, frame.rows)
        elif fake.dim() and (frame.rows != 1 or fake.dim() == frame.rank):
            if product(fake.shape[:-1]) == frame.rows and not frame.dropped and _one_of(fake.shape[-1], frame.features):
                return self._rows(node, _features(fake.shape[-1]), frame.rows)
            if frame.dropped and product(fake.shape) == frame.rows and fake.dim() == frame.rank:
                return self._rows(node, 1, frame.rows)
        if product(fake.shape) == 1:
            return self.parameter(node, (("scalar",),), ())
        if not frame.dropped and product(fake.shape[:-1]) == 1 and _one_of(fake.shape[-1], frame.features):
            return self.vector(node)
        raise Unsupported(f"an operand of shape {_shape(fake)} broadcasts along rows")

    def first(self, node: fx.Node) -> Tile:
        """The first of several results of ``node``, which belongs to the same group."""
        self.tile_nodes.add(node)
        found = self._known(node)
        if found is None:
            raise Unsupported("only some of its results are tiles")
        return found.tile

    def vector(self, node: object) -> str:
        """A parameter of shape ``[features]``."""
        fake = _tensor(node)
        size = _features(fake.shape[-1]) if fake.dim() else 1
        return self.parameter(node, (("vector", size),), (size,))

    def _rows(self, node: fx.Node, features: int, rows: sympy.Expr) -> Tile:
        self.tile_nodes.add(node)
        own = self.values.get(node)
        if own is not None:
            if own.tile.features != features or own.rows != rows:
                raise Unsupported("takes other rows of a value of the region")
            return own.tile
        if self.members is not None and node in self.members:
            raise Unsupported("its operand is defined later in the region")
        key = (node, features)
        if key not in self._loads:
            self._check_device(node)
            name = f"x{len(self.inputs)}"
            self.tensors[name] = Tensor.of(name, Role.INPUT, (features,), dtype_of(node))
            self.inputs.append(Binding(name, node, (("flatten", features),)))
            self._loads[key] = self._load((name,), features, dtype_of(node))
        return self._loads[key]

    def _load(self, names: tuple[str, ...], features: int, dtype: str, attrs: tuple[tuple[str, int], ...] = ()) -> Tile:
        tile = Tile.of(f"load{len(self.ops)}", features, dtype)
        self.ops.append(TileOp("load", tile, (), names, attrs, self._source))
        return tile

    def _bind(
        self, node: fx.Node, letter: str, among: list[Binding], steps: Steps, made: Callable[[str], Tensor]
    ) -> str:
        """The name of an operand of which every tile has all; ``made`` makes the tensor of that name."""
        if (node, steps) not in self._bound:
            self._check_device(node)
            name = self._bound[node, steps] = f"{letter}{len(among)}"
            self.tensors[name] = made(name)
            among.append(Binding(name, node, steps))
        return self._bound[node, steps]

    def gathered(self, table: fx.Node, rows: int | None, features: int, index: fx.Node, dtype: str) -> Tile:
        """The tile of rows of ``table`` that ``index`` (of ``dtype``) names; both come from outside of the region."""
        self.parameter_nodes |= {table, index}
        if table in self.values or index in self.values:
            raise Unsupported("it uses a value of the same rows as a parameter")
        own = dtype_of(table)
        whole = self._bind(table, "t", self.parameters, (), lambda name: Tensor.table(name, rows, features, own))
        named = self._bind(index, "x", self.inputs, INDEX_STEPS, lambda name: Tensor.of(name, Role.INPUT, (), dtype))
        return self._load((whole, named), features, own)

    def tapped(self, pictures: fx.Node, tap: Tap, channels: int) -> Tile:
        """The tile of pixels that ``tap`` takes of ``pictures``, which come from outside of the region."""
        self.parameter_nodes.add(pictures)
        if pictures in self.values:
            raise Unsupported("a convolution reads pixels of other rows")
        height, width = (int(d) for d in _tensor(pictures).shape[1:3])
        sizes = height, width, channels, dtype_of(pictures)
        name = self._bind(pictures, "p", self.parameters, (), lambda name: Tensor.pictures(name, *sizes))
        return self._load((name,), channels, dtype_of(pictures), tap.attrs)

    def parameter(self, node: object, steps: Steps, shape: tuple[int, ...], dtype: str = "") -> str:
        """The name of a whole operand that every tile uses; ``dtype`` is the node's own if not given."""
        if not isinstance(node, fx.Node):
            raise Unsupported("a parameter is not a tensor")
        self.parameter_nodes.add(node)
        if node in self.values:
            raise Unsupported("it uses a value of the same rows as a parameter")

        def made(name: str) -> Tensor:
            return Tensor.of(name, Role.PARAMETER, shape, dtype or dtype_of(node))

        return self._bind(node, "w" if len(shape) == 2 else "v", self.parameters, steps, made)

    def _check_device(self, node: fx.Node) -> None:
        fake = _tensor(node)
        if self._device is not None and fake.device != self._device:
            raise Unsupported(f"an operand is on {fake.device}, the result on {self._device}")

    # -- results --------------------------------------------------------------------------------

    def emit(
        self,
        kind: str,
        features: int,
        dtype: str,
        ins: tuple[Tile, ...] = (),
        params: tuple[str, ...] = (),
        **attrs: float | int | str,
    ) -> Tile:
        """Append an operation; returns its tile.

        Raises:
            Unsupported: the operation would compute on a tile that no stage can hold. Only cutting,
                joining and feeding a linear are possible on wider ones: they stay in shared memory.
        """
        computed = [features] if kind == "linear" else [features, *(t.features for t in ins)]
        if self._narrow and OPS[kind].family not in ("layout", "rows") and max(computed) > self.widest:
            raise Unsupported(f"{max(computed)} features wide: a stage holds {self.widest} columns at most")
        tile = Tile.of(f"{kind}{len(self.ops)}", features, dtype)
        self.ops.append(TileOp(kind, tile, tuple(t.name for t in ins), params, tuple(attrs.items()), self._source))
        return tile

    def unary(self, kind: str, x: Tile, dtype: str, **attrs: float | int | str) -> Tile:
        """``kind`` of every element of ``x``."""
        return self.emit(kind, x.features, dtype, (x,), (), **attrs)

    def binary(self, kind: str, left: Operand, right: Operand, dtype: str) -> Tile:
        """``left kind right``, at least one of them a tile; as wide as the wider."""
        if isinstance(left, Tile) and isinstance(right, Tile):
            return self.emit(kind, max(left.features, right.features), dtype, (left, right))
        if isinstance(left, Tile) and not isinstance(right, Tile):
            return self._with(kind, left, right, dtype, {})
        if isinstance(right, Tile) and not isinstance(left, Tile):
            return self._with(kind, right, left, dtype, {"reversed": 1})
        raise Unsupported("neither operand has rows")

    def _with(self, kind: str, tile: Tile, other: str | float, dtype: str, attrs: dict[str, int]) -> Tile:
        if isinstance(other, str):
            wide = max(tile.features, self.tensors[other].features)
            return self.emit(kind, wide, dtype, (tile,), (other,), **attrs)
        return self.emit(kind, tile.features, dtype, (tile,), (), scalar=other, **attrs)


def constant_of(node: fx.Node) -> float:
    """The number that a constant of no dimensions is."""
    found = getattr(node.graph.owning_module, str(node.target))
    if found.is_complex():
        raise Unsupported("a complex constant")
    with real(found.device):
        return float(found.item())


def dtype_of(node: object) -> str:
    """The IR's name of a node's dtype.

    Raises:
        Unsupported: tiles cannot have it.
    """
    fake = _tensor(node)
    if fake.dtype not in DTYPES:
        raise Unsupported(f"dtype {str(fake.dtype).removeprefix('torch.')}: only bfloat16, float16 and float32 stream")
    return DTYPES[fake.dtype]


def _tensor(node: object) -> torch.Tensor:
    fake = tensor_of(node)
    if fake.layout != torch.strided:
        raise Unsupported(f"layout {fake.layout}")
    return fake


def _features(dim: int | torch.SymInt) -> int:
    dim = settled(dim)
    if not isinstance(dim, int):
        raise Unsupported("the feature dimension is dynamic")
    if dim < 1:
        raise Unsupported("no features")
    return dim


def _one_of(dim: int | torch.SymInt, features: int) -> bool:
    dim = settled(dim)  # a symbolic one is not compared: that would be a guard
    return isinstance(dim, int) and dim in (1, features)


def _shape(fake: torch.Tensor) -> str:
    return str([str(d) if not isinstance(d, int) else d for d in fake.shape]).replace("'", "")
