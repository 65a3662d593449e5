"""Convolutions as loads: row ``r`` of a pipeline is an output pixel, and a tap takes the pixel that lies beside it.

A convolution of ``k x k`` is a linear over ``k k`` such loads side by side: implicit im2col. Pictures lie channels
last, ``[images, height, width, channels]``, and what lies outside of one reads as zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from tilestream.errors import InputError, VerifyError
from tilestream.ir.axes import ROWS, At
from tilestream.ir.pipeline import Pipeline, Role, Tensor, Tile, TileOp

ATTRIBUTES = ("height", "width", "stride_y", "stride_x", "y", "x")
"""Of a load of pixels; ``bulk=1`` beside them asks for copies in the im2col mode of the tensor memory accelerator."""


@dataclass(frozen=True)
class Tap:
    """Row ``(n, v, u)`` of ``[images, height, width]`` takes pixel ``(n, stride_y v + y, stride_x u + x)``.

    Attributes:
        height, width: of the output picture, whose pixels are the rows.
        y, x: where output pixel (0, 0) reads; below zero in the padding.
    """

    height: int
    width: int
    stride_y: int
    stride_x: int
    y: int
    x: int
    bulk: bool = False

    @staticmethod
    def of(op: TileOp) -> Tap | None:
        """The tap of a load; None of other ops, and where rows come in order or through an index."""
        if op.kind != "load" or op.attr("height") is None:
            return None
        return Tap(*(int(op.attr(name, 0) or 0) for name in ATTRIBUTES), bulk=bool(op.attr("bulk", 0)))

    @staticmethod
    def seen(op: TileOp) -> Tap | None:
        """The same of a load in plain form, whose coordinates are those of ``at``."""
        at = op.views[-1].at if op.kind == "load" and op.views else None
        if at is None or len(at) != 4 or not (at[1].strides and at[2].strides and at[3].axes):
            return None
        tap = Tap(at[1].within, at[2].within, at[1].strides[0], at[2].strides[0], at[1].offset, at[2].offset)
        return tap if tap.at(at[3].axes[0]) == at else None

    @property
    def attrs(self) -> tuple[tuple[str, int], ...]:
        """As attributes of a load."""
        named = tuple((name, int(getattr(self, name))) for name in ATTRIBUTES)
        return (*named, ("bulk", 1)) if self.bulk else named

    @property
    def pixels(self) -> int:
        """Rows of a picture."""
        return self.height * self.width

    def at(self, channel: str) -> tuple[At, ...]:
        """Coordinates in ``[images, height, width, channels]``, of columns ``channel``."""
        rows = (ROWS.name,)
        return (
            At(rows, strides=(1,), over=self.pixels),
            At(rows, self.y, strides=(self.stride_y,), over=self.width, within=self.height),
            At(rows, self.x, strides=(self.stride_x,), within=self.width),
            At((channel,)),
        )


@dataclass(frozen=True)
class Window:
    """What a convolution slides over pictures of ``height`` x ``width``; all else is (y, x)."""

    height: int
    width: int
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    @property
    def out(self) -> tuple[int, int]:
        """Height and width of the result.

        Raises:
            VerifyError: the kernel does not fit the padded picture.
        """
        made = []
        for axis, size in enumerate((self.height, self.width)):
            span, room = self.dilation[axis] * (self.kernel[axis] - 1) + 1, size + 2 * self.padding[axis]
            if span > room:
                raise VerifyError(
                    f"a window of {self.dilation[axis]} x ({self.kernel[axis]} - 1) + 1 = {span} pixels does not fit"
                    f" {size} + 2 x {self.padding[axis]} = {room}",
                    "pad the picture, or use a smaller kernel",
                )
            made.append((room - span) // self.stride[axis] + 1)
        return made[0], made[1]

    def taps(self, bulk: bool = False) -> tuple[Tap, ...]:
        """Of a row of the kernel after the other: the order of a weight ``[out, ky, kx, channels]`` made flat."""
        return tuple(
            Tap(
                *self.out,
                *self.stride,
                ky * self.dilation[0] - self.padding[0],
                kx * self.dilation[1] - self.padding[1],
                bulk,
            )
            for ky in range(self.kernel[0])
            for kx in range(self.kernel[1])
        )


def im2col(pictures: Tensor, window: Window, bulk: bool = False) -> tuple[TileOp, ...]:
    """Loads of all taps of ``window``, and their concatenation where there are several: the last op's tile is the left
    operand of a linear whose weight is ``[out, ky kx channels]``, a convolution's ``[out, channels, ky, kx]`` permuted.

    Args:
        pictures: ``Tensor.pictures``, of the window's size.
        bulk: pixels come by bulk copies, else lane by lane.
    """
    channels, dtype = pictures.features, pictures.dtype
    loads = tuple(
        TileOp("load", Tile.of(f"{pictures.name}.{k}", channels, dtype), (), (pictures.name,), tap.attrs)
        for k, tap in enumerate(window.taps(bulk))
    )
    if len(loads) == 1:
        return loads
    whole = Tile.of(f"{pictures.name}.taps", channels * len(loads), dtype)
    names = tuple(op.out.name for op in loads if op.out is not None)
    return (*loads, TileOp("cat", whole, names))


@lru_cache(maxsize=256)
def pictures(p: Pipeline) -> dict[str, int]:
    """Tensors that taps read, each with the rows that one of its pictures makes."""
    loads = [op for s in p.stages for op in s.ops if op.kind == "load"]
    found = ((op.params[0], Tap.of(op) or Tap.seen(op)) for op in loads)
    return {name: tap.pixels for name, tap in found if tap is not None}


def ragged_sizes(p: Pipeline, length: Callable[[str], int]) -> dict[str, int]:
    """Positions of the ragged axes that what a call gives has, and of the nodes that rows are summed to.

    Args:
        length: of a tensor's first dimension.
    """
    given = [t for t in p.tensors if t.role is not Role.OUTPUT and t.axes and t.axes[0].name in p.ragged]
    sums = (op for s in p.stages for op in s.ops if op.receivers)
    nodes = {p.tensor(op.params[0]).axes[0].name: length(op.params[2]) - 1 for op in sums}
    return nodes | {t.axes[0].name: length(t.name) for t in given}


def rows_given(p: Pipeline, length: Callable[[str], int]) -> int:
    """How many rows a call has: those of its inputs, and the output pixels of all pictures; where an axis is ragged,
    the positions that it has bounds of.

    Args:
        length: of a tensor's first dimension.

    Raises:
        InputError: they are unequal, or nothing says how many.
    """
    outermost = next((a for a in p.ragged.values() if a.of not in p.ragged), None)
    if outermost is not None:
        return length(outermost.bounds) - 1
    counts = [(f"input {t.name!r} has", t.name, "", length(t.name)) for t in p.by_role(Role.INPUT)]
    for name, pixels in pictures(p).items():
        counts.append((f"pictures {name!r} make", name, f"{length(name)} x {pixels} = ", length(name) * pixels))
    if not counts:
        raise InputError(f"pipeline {p.name!r} has no input tensor", "add one: its rows are what streams")
    _, first, _, rows = counts[0]
    for what, _, how, others in counts:
        if others != rows:
            raise InputError(
                f"{what} {how}{others} rows, but {first!r} has {rows}", "give all inputs the same number of rows"
            )
    return rows
