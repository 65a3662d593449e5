"""How pixels at taps come: which taps share a box of bulk copies, where it lies, and what neither way can address."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilestream.errors import VerifyError
from tilestream.ir.pipeline import Pipeline, TileOp
from tilestream.ir.taps import Tap

MOST_STRIDE = 8  # of the im2col mode
CORNERS = (-128, 127)  # how far a box may lie from a picture, of four dimensions
MOST_OFFSET = 255  # of a tap from the lowest
MOST_CORNER = 2**16 - 1  # of an input pixel, as lanes keep it

Pair = tuple[int, int]


@dataclass(frozen=True)
class Grid:
    """The taps of one convolution over pictures of ``size`` (height, width), side by side: rows of ``across`` taps.

    Attributes:
        step: (y, x) from one tap to the next.
    """

    taps: tuple[Tap, ...]
    size: Pair
    across: int
    step: Pair

    @staticmethod
    def of(taps: Sequence[Tap], size: Pair) -> Grid | None:
        """None where ``taps`` are no rows of a window, one behind the other."""
        first = taps[0]
        across = sum(t.y == first.y for t in taps)
        step = (taps[across].y - first.y if across < len(taps) else 1, taps[1].x - first.x if across > 1 else 1)
        want = tuple(
            Tap(
                first.height, first.width, first.stride_y, first.stride_x,
                first.y + k // across * step[0], first.x + k % across * step[1],
            )
            for k in range(len(taps))
        )  # fmt: skip
        return Grid(want, size, across, step) if want == tuple(taps) else None

    @property
    def corners(self) -> tuple[Pair, Pair]:
        """(x, y) where the box of bulk copies begins and ends (``corners``)."""
        return corners(self.taps[0], lowest(self.taps[0], self.taps), self.size)

    @property
    def why_not_in_bulk(self) -> str:
        """Why bulk copies cannot bring some tap's pixels; empty if they can."""
        return next(filter(None, (why_not_in_bulk(t, self.taps, self.size) for t in self.taps)), "")


def lowest(tap: Tap, taps: Iterable[Tap]) -> Pair:
    """(y, x) where the box begins that ``tap`` shares with those of ``taps`` of its strides."""
    same = [t for t in taps if (t.stride_y, t.stride_x) == (tap.stride_y, tap.stride_x)]
    return min(t.y for t in same), min(t.x for t in same)


def corners(tap: Tap, begin: Pair, size: Pair) -> tuple[Pair, Pair]:
    """(x, y) of where a box that begins at ``begin`` (y, x) does so beside the first pixel of pictures of ``size``
    (height, width), and where it ends beside the last."""
    sides = zip(begin, (tap.stride_y, tap.stride_x), (tap.height, tap.width), size, strict=True)
    end_y, end_x = (first + stride * (count - 1) - (n - 1) for first, stride, count, n in sides)
    return (begin[1], begin[0]), (end_x, end_y)


def why_not_in_bulk(tap: Tap, taps: Iterable[Tap], size: Pair) -> str:
    """Why bulk copies cannot bring a tap's pixels; empty if they can."""
    begin = lowest(tap, taps)
    offset = max(tap.y - begin[0], tap.x - begin[1])
    first, last = corners(tap, begin, size)
    if max(tap.stride_y, tap.stride_x) > MOST_STRIDE:
        return f"strides of {tap.stride_y} x {tap.stride_x} are more than {MOST_STRIDE}"
    if offset > MOST_OFFSET:
        return f"a tap lies {offset} > {MOST_OFFSET} pixels behind the first"
    if min(*first, *last) < CORNERS[0] or max(*first, *last) > CORNERS[1]:
        return f"a box lies {first} before and {last} behind the picture, beyond {CORNERS[0]} to {CORNERS[1]}"
    return ""


def check_tap(op: TileOp, tap: Tap, pipeline: Pipeline) -> None:
    """Raise ``VerifyError`` where kernels cannot address a load's pixels."""
    name = op.params[0]
    height, width = pipeline.tensor(name).shape[:2]
    where = f"load at {op.source or name}"
    far = max(tap.stride_y * (tap.height - 1), tap.stride_x * (tap.width - 1))
    if far > MOST_CORNER:
        raise VerifyError(f"{where} reads pixels up to {far} > {MOST_CORNER} from a corner", "cut the pictures")
    beside = [t for s in pipeline.stages for o in s.ops if o.params[:1] == (name,) and (t := Tap.of(o)) is not None]
    reason = why_not_in_bulk(tap, beside, (height, width)) if tap.bulk else ""
    if reason:
        raise VerifyError(f"{where} copies pixels in bulk, and {reason}", "copy them by lanes (bulk=0)")
