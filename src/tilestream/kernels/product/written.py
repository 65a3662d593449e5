"""Programs as the finder reads them: in plain form, each axis for one use, and an axis for a result of one column."""

from __future__ import annotations

from dataclasses import replace

from tilestream.ir.aliases import one_name_an_axis, renamed
from tilestream.ir.axes import At, Axis, View
from tilestream.ir.derive import WRITES, sums
from tilestream.ir.once import once
from tilestream.ir.pipeline import Pipeline, TileOp
from tilestream.ir.plain import plain
from tilestream.ir.tileops import OPS
from tilestream.kernels.product.block import made_from

AGAIN = ".again"


@once
def written_out(program: Pipeline) -> Pipeline:
    """``program`` in plain form, each of its axes under one name and for one use; every split of it asks for this."""
    return own_sum(one_name_an_axis(plain(own_residual(program))))


def own_residual(program: Pipeline) -> Pipeline:
    """``program``, one stage of row ops; what is behind its last product loads and adds for itself what is in front of
    the first as well.

    ``x + W2 act(W1 norm(x))`` sums over the columns of ``x`` and adds its columns to the result: one axis would be
    both what a shared tile sums over and what it divides. Elementwise ops over loads are repeated. A norm is not, so a
    block whose residual is a norm's result stays as it is.
    """
    if len(program.stages) != 1:
        return program
    stage = program.stages[0]
    makers = stage.makers
    last = next((op for op in reversed(stage.ops) if op.kind == "linear"), None)
    if last is None or last.out is None:
        return program
    inside = made_from(last.out.name, makers)
    behind = {last.out.name}
    copies: dict[str, TileOp] = {}
    ops: list[TileOp] = []
    for op in stage.ops:
        if op is not last and not behind.isdisjoint(op.ins):
            for name in (n for n in op.ins if n in inside and n not in behind):
                reached = made_from(name, makers)
                if not all(_repeatable(makers[n]) for n in reached):
                    return program
                for each in stage.ops:
                    if each.out is not None and each.out.name in reached and each.out.name not in copies:
                        copies[each.out.name] = _renamed(each, reached)
                        ops.append(copies[each.out.name])
            op = op.reading({n: n + AGAIN for n in copies})
            if op.out is not None:
                behind.add(op.out.name)
        ops.append(op)
    return program.with_stages((replace(stage, ops=tuple(ops)),)) if copies else program


def own_sum(written: Pipeline) -> Pipeline:
    """``written``, in plain form; products of rows that are made in front of them sum over columns of another name.

    Groups that divide the sum of a layer would divide the sums of the norm in front of it as well. Where two layers
    are, groups divide the second's, and nothing is renamed.
    """
    stage = written.stages[0]
    makers = stage.makers
    products = [op for op in stage.ops if op.kind == "product" and op.out is not None]
    made = {op.out.name for op in products if op.out is not None}
    if not products or any(not made.isdisjoint(made_from(op.ins[0], makers)) for op in products if op.ins):
        return written
    if any(len(op.ins) != 1 or op.ins[0] not in makers or len(sums(op)) != 1 for op in products):
        return written
    if all(makers[op.ins[0]].kind == "load" for op in products):
        return written
    (old,) = sums(products[0])
    own = written.tensor(products[0].params[0]).axes[-1].name

    ops = tuple(renamed(op, lambda a: own if a == old else a) if op.kind == "product" else op for op in stage.ops)
    return written.with_stages((replace(stage, ops=ops), *written.stages[1:]))


def _repeatable(op: TileOp) -> bool:
    return op.kind == "load" or OPS[op.kind].family in ("unary", "binary")


def _renamed(op: TileOp, names: set[str]) -> TileOp:
    return replace(op.reading({n: n + AGAIN for n in names}), out=replace(op.made, name=op.made.name + AGAIN))


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
        if op is product or not made.isdisjoint(op.ins):
            if op.out is not None:
                made.add(op.out.name)
            op = _of_columns(op, column, made)
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
