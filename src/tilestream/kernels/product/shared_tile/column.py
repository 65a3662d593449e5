"""A result of one column gets an axis for it: what divides columns then finds them, all one of them."""

from __future__ import annotations

from dataclasses import replace

from tilestream.ir.axes import At, Axis, View
from tilestream.ir.derive import WRITES
from tilestream.ir.once import once
from tilestream.ir.pipeline import Pipeline, TileOp

COLUMN = ".column"


@once
def with_column(written: Pipeline) -> Pipeline:
    """``written``, one stage in plain form; if its last product makes ``[rows]`` of a weight ``[1, depth]``, that and
    what is made of it are ``[rows, 1]``.

    A tile of one column has no axis of its own (``Tile.of``), and a shared tile divides the columns of its result.
    """
    stage = written.stages[0]
    product = next((op for op in reversed(stage.ops) if op.kind == "product" and op.out is not None), None)
    if product is None or product.out is None or len(product.out.axes) != 1 or len(product.tensors) != 1:
        return written
    column = Axis(product.out.name + COLUMN, 1)
    made = {product.out.name}
    ops: list[TileOp] = []
    for op in stage.ops:
        if op is product:
            ops.append(_of_columns(op, column, made))
        elif not made.isdisjoint(op.ins):
            if op.out is not None:
                made.add(op.out.name)
            ops.append(_of_columns(op, column, made))
        else:
            ops.append(op)
    return written.with_stages((replace(stage, ops=tuple(ops)), *written.stages[1:]))


def _of_columns(op: TileOp, column: Axis, made: set[str]) -> TileOp:
    """``op`` with ``column`` as the last axis of what it makes, and of the tiles among its operands that are ``made``;
    of tensors, the dimension without an axis is the column."""

    def over(view: View | str, is_tensor: bool) -> View:
        assert isinstance(view, View)  # as everywhere in plain form
        at = view.at or ()
        if is_tensor:
            return View(view.of, tuple(replace(a, axes=(column.name,)) if not a.axes else a for a in at))
        return View(view.of, (*at, At((column.name,)))) if view.of in made else view

    out = replace(op.out, axes=(*op.out.axes, column)) if op.out is not None and op.kind not in WRITES else op.out
    tiles = tuple(over(v, False) for v in op.tiles)
    return replace(op, out=out, tiles=tiles, tensors=tuple(over(v, True) for v in op.tensors))
