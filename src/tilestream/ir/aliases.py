"""Axes that are the same under two names become one: columns of tiles that one op combines element by element."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tilestream.ir.axes import View
from tilestream.ir.pipeline import Pipeline, TileOp
from tilestream.ir.tileops import OPS


def one_name_an_axis(p: Pipeline) -> Pipeline:
    """``p``, in plain form; the axis of a tile that an elementwise op reads whole under another name is renamed to it.

    Ops of rows give every product an axis of its own; the two first layers of a gated block have one all the same.
    """
    names: dict[str, str] = {}
    tiles = p.tiles()

    def now(axis: str) -> str:
        while axis in names:
            axis = names[axis]
        return axis

    for op in (op for s in p.stages for op in s.ops if OPS[op.kind].family in ("unary", "binary")):
        for view in op.views[: len(op.tiles)]:
            for own, at in zip(tiles[view.of].axes, view.at or (), strict=False):
                if len(at.axes) == 1 and not (at.offset or at.index or at.strides):
                    read, mine = now(at.axes[0]), now(own.name)
                    if read != mine:
                        names[mine] = read

    return p.with_stages(tuple(replace(s, ops=tuple(renamed(op, now) for op in s.ops)) for s in p.stages))


def renamed(op: TileOp, name: Callable[[str], str]) -> TileOp:
    """``op`` with every axis under the name that it gets, in what it makes and in what it reads."""

    def under(v: View | str) -> View | str:
        if isinstance(v, str) or v.at is None:
            return v
        return View(v.of, tuple(replace(at, axes=tuple(map(name, at.axes))) for at in v.at))

    out = op.out and replace(op.out, axes=tuple(replace(a, name=name(a.name)) for a in op.out.axes))
    return replace(op, out=out, tiles=tuple(map(under, op.tiles)), tensors=tuple(map(under, op.tensors)))
