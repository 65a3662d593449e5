"""One row: CTAs of the grid divide the columns of all products, and each makes all of the row that these read."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from tilestream.devices import Device
from tilestream.ir.aliases import renamed
from tilestream.ir.axes import ROWS, Level, Loop, Spread
from tilestream.ir.pipeline import Pipeline, Stage, TileOp
from tilestream.ir.plain import plain
from tilestream.kernels.one_row.model import OneRow, find

DEPTH = "depth"


def divide_columns(program: Pipeline, device: Device) -> Pipeline:
    """One stage that takes a row at a time, its columns over as many CTAs as have equally many.

    Raises:
        VerifyError: the program is nothing that a launch of one row computes.
    """
    row, written = find(program), plain(program)
    ctas = ceil(row.columns / ceil(row.columns / device.sms))
    ctas = min(ctas, *(g.columns for g in row.groups))
    axes = {op: g.axis for g in row.groups for op in (*g.behind, *g.stores)}
    ops = tuple(_under(op, row, axes.get(op, DEPTH)) for op in written.stages[0].ops)
    mesh = (Spread(Level.GRID, ctas, tuple(g.axis for g in row.groups)),)
    stage = Stage("shared", ops, (Loop(ROWS.name, 1),), mesh)
    return replace(written, stages=(stage,), strategy="one row")


def _under(op: TileOp, row: OneRow, axis: str) -> TileOp:
    """An op with all of its columns under one name: those of products that are behind it, or what products sum over."""
    own = next((g.axis for g in row.groups if op in g.products), "")
    columns = {a.name for a in op.made.axes} if own else set[str]()
    return renamed(op, lambda a: a if a == ROWS.name else own if a in columns else axis)
