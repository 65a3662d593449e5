"""A softmax written as maximum, difference, exponential, sum and division becomes one sum: one pass over the edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilestream.ir.axes import View
from tilestream.ir.derive import sums
from tilestream.ir.pipeline import Pipeline, Stage, TileOp
from tilestream.plan.passes.cleaning import remove_dead_ops

VANISHES = 2.0**-25
"""Beside a sum of ``exp(s - max s)``, which is 1 at least, no less than this changes an fp32."""


def weigh_by_softmax(p: Pipeline) -> Pipeline:
    """``p``, in plain form, with ``combine="softmax"`` for sums of ``e v / sum e``, where ``e = exp(s - max s)``.

    The division may stand before the sum or behind it; behind it only with a small number beside the divisor, or a sum
    of nothing would have been 0 / 0. Where something else needs the exponentials too, they stay, and so does the sum:
    the passes over edges are made anyway. Values that are rounded on the way keep their rounding, and stay too.
    """
    for number, stage in enumerate(p.stages):
        found = _softmaxes(stage)
        for exponential in dict.fromkeys(name for name, _ in found.values()):
            ops = tuple(
                found[op][1] if op in found and found[op][0] == exponential else op for op in p.stages[number].ops
            )
            stages = [replace(s, ops=ops) if n == number else s for n, s in enumerate(p.stages)]
            weighed = remove_dead_ops(p.with_stages(tuple(stages)))
            if exponential not in weighed.tiles():
                p = weighed
    return p


def _softmaxes(stage: Stage) -> dict[TileOp, tuple[str, TileOp]]:
    """Of each op that weighs values by a softmax: its exponentials, and the op that it is."""
    found = ((op, _softmax(stage, op)) for op in stage.ops)
    return {op: made for op, made in found if made is not None}


def _softmax(stage: Stage, op: TileOp) -> tuple[str, TileOp] | None:
    """What ``op`` is if it is a sum of weighted values, or such a sum over the sum of the weights."""
    if _is_sum(op):
        return _weighted(stage, op)
    if op.kind != "div" or len(op.tiles) != 2 or op.attr("reversed"):
        return None
    total = _plain(stage, op.views[0])
    if total is None or not _is_sum(total) or total.result_axes != op.result_axes:
        return None
    divisor = _sum_of_exponentials(stage, op.views[1], guarded=True)
    if divisor is None or sums(total) != sums(divisor):
        return None
    exponential = next((v for v in _factors(stage, total) if v.of == divisor.ins[0]), None)
    if exponential is None:
        return None
    values = [v for v in _factors(stage, total) if v is not exponential]
    return _made(stage, op, exponential, values) if values else None


def _weighted(stage: Stage, op: TileOp) -> tuple[str, TileOp] | None:
    """Of a sum over edges: one of its factors is ``e / sum e`` over the same."""
    factors = _factors(stage, op)
    for weight in factors:
        quotient = _plain(stage, weight)
        if quotient is None or quotient.kind != "div" or len(quotient.tiles) != 2 or quotient.attr("reversed"):
            continue
        divisor = _sum_of_exponentials(stage, quotient.views[1])
        values = [v for v in factors if v is not weight]
        over = divisor is not None and sums(divisor) == sums(op)
        if divisor is not None and over and values and divisor.ins[0] == quotient.ins[0]:
            return _made(stage, op, quotient.views[0], values)
    return None


def _made(stage: Stage, op: TileOp, exponential: View, values: Sequence[View]) -> tuple[str, TileOp]:
    """The sum of ``values`` by the softmax of the score under the exponential."""
    score = stage.makers[stage.makers[exponential.of].ins[0]].views[0]
    tiles = (score, *(v for v in values if v.of in stage.makers or v.of in stage.taken()))
    tensors = tuple(v for v in values if v not in tiles)
    made = replace(op, kind="product", tiles=tiles, tensors=tensors, attrs=(), combine="softmax")
    return exponential.of, made


def _factors(stage: Stage, op: TileOp) -> list[View]:
    """What a sum multiplies, through products element by element that it alone may need."""
    made: list[View] = []
    for view in op.views:
        maker = _plain(stage, view)
        if maker is not None and maker.kind == "mul" and len(maker.views) == 2 and not maker.attrs:
            made += maker.views
        else:
            made.append(view)
    return made


def _sum_of_exponentials(stage: Stage, view: View, guarded: bool = False) -> TileOp | None:
    """The sum of ``exp(s - max s)`` under a divisor, with or, where it must be, without a small number beside."""
    maker = _plain(stage, view)
    if maker is not None and maker.kind in ("add", "maximum"):
        beside = maker.attr("scalar")
        if not isinstance(beside, int | float) or not 0 < beside <= VANISHES:
            return None
        maker = _plain(stage, maker.views[0])
    elif guarded:
        return None
    exponential = _plain(stage, maker.views[0]) if maker is not None and _is_sum(maker) else None
    if maker is None or exponential is None or len(maker.views) != 1 or exponential.kind != "exp":
        return None
    difference = _plain(stage, exponential.views[0])
    if difference is None or difference.kind != "sub" or len(difference.tiles) != 2 or difference.attrs:
        return None
    most = _plain(stage, difference.views[1])
    if most is None or most.kind != "product" or most.combine != "max" or len(most.views) != 1:
        return None
    return maker if most.views[0] == difference.views[0] and sums(most) == sums(maker) else None


def _plain(stage: Stage, view: View) -> TileOp | None:
    """What makes a tile that is read where it was made, and is not rounded on the way."""
    maker = stage.makers.get(view.of)
    if maker is None or maker.out is None or maker.out.dtype != "f32" or maker.kind == "cast":
        return None
    own = all(at.axes == (axis.name,) for at, axis in zip(view.at or (), maker.out.axes, strict=True))
    return maker if own and not any(at.offset or at.strides or at.index for at in view.at or ()) else None


def _is_sum(op: TileOp) -> bool:
    return op.kind == "product" and op.combine == "sum" and bool(sums(op))
