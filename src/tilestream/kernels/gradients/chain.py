"""A stage read as a chain of gradients: its layers from the last one to the first.

Sums of a weight's and a bias's gradient alone are a chain of one layer whose dX nobody wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilestream.errors import VerifyError
from tilestream.ir.axes import ROWS
from tilestream.ir.derive import sums
from tilestream.ir.pipeline import Pipeline, Stage, TileOp

FINITE = frozenset(
    {
        "relu_backward", "cast", "mul", "add", "sub", "neg", "abs", "square", "maximum", "minimum", "gelu_slope",
        "relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "softplus", "exp", "expm1", "sin", "cos",
    }
)  # fmt: skip
"""Ops between two layers: elementwise ones that are finite at zeros, which stand beside a layer's last column."""


@dataclass(frozen=True)
class Layer:
    """``weight_gradient = dY.T X``, ``bias_gradient = sum of dY``, and ``ops(dY weight)``, the next layer's dY.

    Attributes:
        sum: the product over rows, [out, k].
        x: the tile of X. input: the tensor that it is loaded from; empty where ``makes`` make it, as an activation
            whose result was not saved, of ``sources``: tensors by tile.
        weight: the parameter [out, k]; empty where no gradient of X is wanted.
        bias_gradient: empty where there is none.
        ops: between this layer and the next. product: the tile that they begin with, dY times the weight.
        result: the tile that they end with. streams: tensors that they read, by tile.
        members: everything that the layer does but to load and to store.
    """

    sum: TileOp
    weight_gradient: str
    bias_gradient: str
    x: str
    input: str
    makes: tuple[TileOp, ...]
    sources: tuple[tuple[str, str], ...]
    weight: str
    out: int
    k: int
    ops: tuple[TileOp, ...]
    product: str
    result: str
    streams: tuple[tuple[str, str], ...]
    members: tuple[TileOp, ...]

    @property
    def source(self) -> str:
        """The user's line."""
        return _where(self.sum)

    @property
    def read(self) -> tuple[str, ...]:
        """Tensors that it takes through the ring, each once."""
        beside = (tensor for _, tensor in (*self.sources, *self.streams))
        return tuple(dict.fromkeys((*([self.input] if self.input else []), *beside)))

    @property
    def along(self) -> tuple[TileOp, ...]:
        """Of ``ops`` those that the product goes through."""
        through, found = {self.product}, []
        for op in self.ops:
            if op.out is not None and not through.isdisjoint(op.ins):
                through.add(op.out.name)
                found.append(op)
        return tuple(found)

    @property
    def slope(self) -> str:
        """The one tile that ``ops`` make beside the product for it, where ``makes`` read the same: both at once are
        hardly more than either (GELU and its derivative share Phi). Empty where it is another number of tiles."""
        beside = [op for op in self.ops if op not in self.along]
        wanted = {name for op in self.along for name in op.ins} & {op.out.name for op in beside if op.out is not None}
        more = {name for op in beside for name in op.ins} & (dict(self.streams).keys() - dict(self.sources).keys())
        return wanted.pop() if self.makes and len(wanted) == 1 and not more else ""


@dataclass(frozen=True)
class Chain:
    """Layers from the last to the first; ``gradient`` is the last one's dY, ``result`` the first one's dX, or empty.

    Attributes:
        left: tiles between two layers that leave as well, and the tensors that they are stored to.
    """

    gradient: str
    layers: tuple[Layer, ...]
    result: str
    dtype: str
    left: tuple[tuple[str, str], ...] = ()


def find_chain(stage: Stage, pipeline: Pipeline) -> Chain:
    """The chain that a stage in plain form (``ir.plain``) is.

    Raises:
        VerifyError: it is none; names the op, by its user's line.
    """
    return _Reader(stage, pipeline).read()


class _Reader:
    def __init__(self, stage: Stage, pipeline: Pipeline) -> None:
        self.stage, self.pipeline = stage, pipeline
        self.loaded = {op.made.name: op.params[0] for op in stage.ops if op.kind == "load"}
        self.stored: dict[str, str] = {}
        for op in stage.ops:
            if op.kind in ("load", "store") and any(
                at.offset or at.index or at.strides or len(at.axes) != 1 for at in op.views[-1].at or ()
            ):
                raise VerifyError(f"{_where(op)}: parts of a tensor have no place among gradients", "use whole tensors")
            if op.kind == "store":
                self.stored[op.ins[0]] = op.params[0]

    def read(self) -> Chain:
        products = [op for op in self.stage.ops if op.kind == "product"]
        over_rows = [op for op in products if sums(op) == {ROWS.name}]
        by_rows = [op for op in products if op not in over_rows]
        if not over_rows:
            raise VerifyError(f"stage {self.stage.name!r} sums no product over rows", "use a row stream")
        gradient = self._first(over_rows, by_rows)
        tile, layers = gradient, []
        while tile:
            layer, tile = self._layer(tile, over_rows, by_rows)
            layers.append(layer)
        read = {id(op) for layer in layers for op in layer.members}
        odd = next((op for op in self.stage.ops if id(op) not in read and op.kind not in ("load", "store")), None)
        if odd is not None:
            raise VerifyError(f"{_where(odd)}: a {odd.kind!r} that is no part of the chain", "move it elsewhere")
        last = layers[-1].result
        made = {self.stored.pop(last)} if last in self.stored else set()
        if last and not made:
            raise VerifyError(f"{layers[-1].source}: dX of the first layer is not stored", "store it, or leave it out")
        left = tuple((x.result, self.stored.pop(x.result)) for x in layers[:-1] if x.result in self.stored)
        totals = {op.made.name for op in self.stage.ops if _is_total(op)}
        if extra := set(self.stored) - {op.made.name for op in over_rows} - totals:
            raise VerifyError(f"tile {min(extra)!r} leaves a backward chain", "leave it in another stage")
        return Chain(self.loaded[gradient], tuple(layers), made.pop() if made else "", self._dtype(), left)

    def _first(self, over_rows: Sequence[TileOp], by_rows: Sequence[TileOp]) -> str:
        """The tile that comes as the last layer's dY: a loaded one that is multiplied by a weight, or summed alone."""
        lefts = [_operands(op)[0] for op in over_rows]
        found = [t for t in lefts if t in self.loaded]
        steps = {op.ins[0] for op in by_rows}
        if len(found) != 1 or (by_rows and found[0] not in steps):
            raise VerifyError(
                f"stage {self.stage.name!r} has {len(found)} loaded gradients", "a backward chain begins with one"
            )
        return found[0]

    def _layer(self, tile: str, over_rows: Sequence[TileOp], by_rows: Sequence[TileOp]) -> tuple[Layer, str]:
        """The layer whose dY is ``tile``, and the next layer's dY, or nothing."""
        mine = [op for op in over_rows if _operands(op)[0] == tile]
        where = _where(mine[0]) if mine else f"tile {tile!r}"
        if len(mine) != 1:
            raise VerifyError(f"{where}: {len(mine)} gradients of weights from one dY", "give each layer one")
        (product,) = mine
        x = _operands(product)[1]
        makes: list[TileOp] = []
        sources: dict[str, str] = {}
        if x not in self.loaded:
            self._side(x, makes, sources)
        out, k = (int(a.size or 0) for a in product.made.axes)
        totals = [op for op in self.stage.ops if _is_total(op) and op.ins == (tile,)]
        bias = self._stored(totals[0]) if totals else ""
        steps = [op for op in by_rows if op.ins and op.ins[0] == tile]
        if len(steps) > 1 or (steps and len(steps[0].params) != 1):
            raise VerifyError(f"{where}: dY is multiplied by {len(steps)} weights", "a chain has one a layer")
        weight, made, result, ops, streams = "", "", "", [], {}
        for step in steps:
            weight, made = step.params[0], step.made.name
            lies = next(v for v in step.views if v.of == weight)
            columns = tuple(a.name for a in step.made.axes if a != ROWS)
            if lies.axes[1:] != columns or self.pipeline.tensor(weight).shape != (out, k):
                raise VerifyError(f"{where}: dY [rows, {out}] takes a weight [{out}, {k}] as it lies", "turn it")
            ops, streams, result = self._between(made, {_operands(op)[0] for op in over_rows})
        own = {id(op) for op in (product, *totals[:1], *makes, *steps, *ops)}
        layer = Layer(
            product, self._stored(product), bias, x, self.loaded.get(x, ""), tuple(makes), tuple(sources.items()),
            weight, out, k, tuple(ops), made, result, tuple(streams.items()),
            tuple(op for op in self.stage.ops if id(op) in own),
        )  # fmt: skip
        further = any(_operands(op)[0] == result for op in over_rows)
        return layer, result if further else ""

    def _between(self, made: str, wanted: set[str]) -> tuple[list[TileOp], dict[str, str], str]:
        """Elementwise ops from the product ``made`` to the next dY, or to what is stored; their loads; the result."""
        ops: list[TileOp] = []
        streams: dict[str, str] = {}
        current = made
        while current not in wanted and current not in self.stored:
            users = [op for op in self.stage.ops if current in op.ins]
            if len(users) != 1 or not _finite(users[0]) or users[0].out is None:
                kinds = ", ".join(op.kind for op in users) or "nothing"
                raise VerifyError(f"tile {current!r} goes to {kinds}", "a chain goes on by one elementwise op each")
            (op,) = users
            for name in op.ins:
                if name != current:
                    self._side(name, ops, streams)
            if op.params:
                raise VerifyError(f"{_where(op)}: vectors have no place in a backward chain", "use a row stream")
            ops.append(op)
            current = op.made.name
        return ops, streams, current

    def _side(self, name: str, ops: list[TileOp], streams: dict[str, str]) -> None:
        """A tile that a chain's op takes beside the chain: loaded, or made of one that is, elementwise."""
        if name in self.loaded:
            streams[name] = self.loaded[name]
            return
        maker = self.stage.makers[name]
        if maker in ops:
            return
        if not _finite(maker) or maker.params:
            raise VerifyError(f"{_where(maker)}: a {maker.kind!r} beside a backward chain", "use a row stream")
        for each in maker.ins:
            self._side(each, ops, streams)
        ops.append(maker)

    def _stored(self, op: TileOp) -> str:
        if op.made.name not in self.stored:
            raise VerifyError(f"{_where(op)}: a gradient that nobody stores", "store it")
        return self.stored[op.made.name]

    def _dtype(self) -> str:
        weights = (name for op in self.stage.ops if op.kind == "product" for name in op.params)
        tensors = {self.pipeline.tensor(name).dtype: name for name in (*self.loaded.values(), *weights)}
        if len(tensors) != 1 or next(iter(tensors)) not in ("bf16", "f16"):
            found = ", ".join(f"{name} {dtype}" for dtype, name in tensors.items())
            raise VerifyError(f"stage {self.stage.name!r} reads {found}", "use one dtype, bf16 or f16")
        return next(iter(tensors))


def _operands(op: TileOp) -> tuple[str, str]:
    """dY and X of a product over rows, in the order of its result's axes."""
    by_axes = {v.axes: v.of for v in op.views}
    operands = [by_axes.get((ROWS.name, a.name), "") for a in op.made.axes if a.size is not None]
    if len(op.made.axes) != 2 or len(operands) != 2 or not all(operands):
        raise VerifyError(f"{_where(op)}: a sum over rows makes [out, k] of [rows, out] and [rows, k]", "write it so")
    return operands[0], operands[1]


def _is_total(op: TileOp) -> bool:
    """Whether an op sums dY over the rows: a bias's gradient."""
    return op.kind == "sum" and sums(op) == {ROWS.name}


def _finite(op: TileOp) -> bool:
    """Whether an op may stand between two layers; a quotient where it divides by a number."""
    by_number = op.kind == "div" and op.attr("scalar") not in (None, 0.0) and not op.attr("reversed")
    return op.kind in FINITE or by_number


def _where(op: TileOp) -> str:
    return op.source or op.kind
