"""The plainest ragged pipeline: rows named by an order, reduced at each node, and what they are added to."""

from __future__ import annotations

from functools import cache

from tilestream.ir.axes import At, Axis, Level, Loop, Spread, View, along
from tilestream.ir.pipeline import Pipeline, Role, Stage, Tensor, Tile, TileOp

MOST_FEATURES = 1024
"""Of a row that one launch reduces: a lane has registers for so many."""
WITH_BASE = {"sum": "add", "max": "maximum", "min": "minimum", "mul": "mul"}
NODES, EDGES = Axis("nodes"), Axis("edges", of="nodes", bounds="starts")


@cache
def reduction(how: str, features: int, dtype: str, base: bool, order: bool = True, busy: bool = True) -> Pipeline:
    """``y[nodes, features]``: the rows ``rows[order]`` of each node reduced in fp32, with ``base`` if there is one.

    Of no rows 0, of products 1, where there is no base. Without an order rows lie side by side. ``busy``: a list
    says which nodes have many.
    """
    f = Axis("f", features)
    own = (NODES, f)
    empty = (("empty", 0.0),) if how in ("max", "min") and not base else ()
    edge = At(("edges",), index="order" if order else "")
    ops = [
        TileOp("copy", Tile("row", (EDGES, f), dtype), (), (View("rows", (edge, At(("f",)))),)),
        TileOp("product", Tile("total", own, "f32"), (along("row", ("edges", "f")),), (), empty, combine=how),
    ]
    tensors = [Tensor("rows", Role.INPUT, (EDGES, f), dtype)]
    if order:
        tensors = [Tensor("rows", Role.PARAMETER, (Axis("rows.rows"), f), dtype)]
        tensors += [Tensor("order", Role.INPUT, (EDGES,), "i32")]
    bounds = ("starts", "starts.busy") if busy else ("starts",)
    tensors += [Tensor(n, Role.PARAMETER, (Axis(f"{n}.rows"),), "i32") for n in bounds]
    made = "total"
    if base:
        made = "result"
        ops.append(TileOp("copy", Tile("before", own, dtype), (), (along("base", ("nodes", "f")),)))
        ops.append(
            TileOp(WITH_BASE[how], Tile(made, own, "f32"), tuple(along(n, ("nodes", "f")) for n in ("total", "before")))
        )
        tensors.append(Tensor("base", Role.INPUT, own, dtype))
    ops.append(TileOp("store", None, (along(made, ("nodes", "f")),), (along("y", ("nodes", "f")),)))
    tensors.append(Tensor("y", Role.OUTPUT, own, dtype))
    stage = Stage("all", tuple(ops), (Loop("nodes", 8), Loop("edges", 8)), (Spread(Level.GRID, 264, ("nodes",)),))
    return Pipeline(f"segment_{how}", tuple(tensors), (stage,))
