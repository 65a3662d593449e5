"""One row: CTAs of the grid divide the columns of all products, and each makes all of the row that these read."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from tilestream.devices import Device
from tilestream.ir.aliases import renamed
from tilestream.ir.axes import ROWS, Level, Loop, Spread
from tilestream.ir.pipeline import Pipeline, Stage, TileOp
from tilestream.ir.plain import plain
from tilestream.kernels.one_row.model import find

DEPTH = "depth"


def divide_columns(program: Pipeline, device: Device) -> Pipeline:
    """One stage that takes a row at a time, its columns over as many CTAs as have equally many.

    Raises:
        VerifyError: the program is nothing that a launch of one row computes.
    """
    row, written = find(program), plain(program)
    widest = max(g.columns for g in row.groups)
    ctas = min(ceil(widest / ceil(widest / device.sms)), *(g.columns for g in row.groups))
    axes = {op: g.axis for g in row.groups for op in (*g.products, *g.behind, *g.stores) if op not in row.front}

    def under(op: TileOp) -> TileOp:
        """All columns have one name: those of products that are behind it, or what products sum over."""

        def named(axis: str) -> str:
            summed = op.kind == "product" and axis not in op.result_axes
            return axis if axis == ROWS.name else DEPTH if summed else axes.get(op, DEPTH)

        return renamed(op, named)

    mesh = (Spread(Level.GRID, ctas, tuple(g.axis for g in row.groups)),)
    stage = Stage("shared", tuple(map(under, written.stages[0].ops)), (Loop(ROWS.name, 1),), mesh)
    return replace(written, stages=(stage,), strategy="one row")
