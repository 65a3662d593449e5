"""What shares a tile, as a stage's ops have it by the axes that they mention: one layer or two.

Two: ``y = after(act(x W1, x W3, ...) W2)``, a feed-forward block. One: ``y0 = after(x W0), y1 = after(x W1), ...``,
products of one input; or a gated one, ``y = after(x W0, x W1)``. Either may have in front what makes ``x``, a norm; or
``x`` is pixels at the taps of a convolution, side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilestream.errors import VerifyError
from tilestream.ir.axes import View
from tilestream.ir.pipeline import TileOp
from tilestream.ir.ways import reached
from tilestream.kernels.parts.taps import Grid

MOST_ROWS = 512
"""Beyond that a product keeps all SMs busy by itself, and streams of rows share weights better."""

PANEL = 64
"""Columns of a 16-bit operand in a 128-byte swizzled panel, and rows that a warpgroup's product has."""


@dataclass(frozen=True)
class Product:
    """A product: the weight ``[columns, depth]``, from row ``offset`` on, and what tile it makes."""

    weight: str
    offset: int
    tile: str


@dataclass(frozen=True)
class Last:
    """A product whose sum becomes a result, or two of a gated layer, and what is done to them.

    Attributes:
        out, columns: the axis of the result's columns, and how many there are.
        products: of weights ``[out, hid]``.
        after: elementwise ops, and loads of rows, from their sums to ``result``, which is stored in ``output``.
    """

    out: str
    columns: int
    products: tuple[Product, ...]
    after: tuple[TileOp, ...]
    result: str
    output: str


@dataclass(frozen=True)
class Block:
    """One layer or two: axes with their sizes, operands, and what is done to the sums.

    Attributes:
        rows, k, hid: names of the axes. ``hid`` is what the last layer sums over: of two layers the columns of the
            first, of one ``k`` itself, under another name where ``before`` makes what it reads.
        sizes: of ``k``, of ``hid``, and of the columns of all results together.
        dtype: of the operands of the products.
        input: the tensor that the first products read; empty where ``before`` makes what they read.
        before: ops from rows of tensors to ``operand``, a tile ``[rows, k]``: elementwise, and reductions of a row.
        firsts: products of the first layer; none where there is one layer.
        middle: elementwise ops from the first products' sums to the second product's operand, tile ``hidden``.
        lasts: one, of two layers; of one layer all products of its input.
        adds: whether partial results are added in memory, in any order.
        grid: the taps at which ``input``, pictures, is read; None where it has rows.
        by_columns: whether all weights lie so (``Tensor.by_columns``).
    """

    rows: str
    k: str
    hid: str
    sizes: tuple[int, int, int]
    dtype: str
    input: str
    before: tuple[TileOp, ...]
    operand: str
    firsts: tuple[Product, ...]
    middle: tuple[TileOp, ...]
    hidden: str
    lasts: tuple[Last, ...]
    output_dtype: str
    adds: bool
    grid: Grid | None = None
    by_columns: bool = False

    def vectors(self, ops: tuple[TileOp, ...]) -> tuple[View, ...]:
        """Tensors without rows that ``ops`` read: biases and scalars."""
        return tuple(dict.fromkeys(v for op in ops if op.kind != "load" for v in op.views[len(op.tiles) :]))

    @property
    def outs(self) -> tuple[str, ...]:
        """Axes of the results' columns."""
        return tuple(last.out for last in self.lasts)

    @property
    def last(self) -> Last:
        """The one of two layers."""
        (last,) = self.lasts
        return last

    @property
    def one_layer(self) -> bool:
        return not self.firsts

    @property
    def products(self) -> int:
        """Products that each result is made of."""
        return len(self.lasts[0].products)

    @property
    def after(self) -> tuple[TileOp, ...]:
        """What is done to the last layer's sums, result by result."""
        return tuple(op for last in self.lasts for op in last.after)

    @property
    def shared_by_columns(self) -> tuple[str, ...]:
        """Axes of the direction whose CTAs, or clusters of a tiled block, have columns of every result; of two layers,
        first of the middle."""
        return self.outs if self.one_layer else (*self.outs, self.hid)

    @property
    def shared_by_groups(self) -> tuple[str, ...]:
        """Axes of the direction that divides the last layer's sum, and scatters the partial results."""
        return (self.hid, *self.outs)

    @property
    def loads(self) -> tuple[TileOp, ...]:
        """Ops of ``after``, then of ``before``, that read rows of a tensor."""
        return tuple(op for op in (*self.after, *self.before) if op.kind == "load")


def made_from(tile: str, makers: Mapping[str, TileOp]) -> set[str]:
    """``tile`` and every tile that it is made from; ``makers`` has the op of each."""
    return reached([tile], lambda name: makers[name].ins if name in makers else ()) & makers.keys()


def check_alignment(stage: str, axis: str, size: int) -> None:
    """Raise ``VerifyError`` where bulk copies cannot start behind ``size`` elements of a row."""
    if size * 2 % 16:
        raise VerifyError(
            f"stage {stage!r}: {size} x 2 = {size * 2} bytes along {axis!r} are no multiple of 16, on which bulk"
            " copies start",
            "pad it to a multiple of 8",
        )
