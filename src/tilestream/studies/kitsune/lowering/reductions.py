"""Sums, means and maxima over any dimensions: over features, over a batch's rows, over heads."""

from __future__ import annotations

from math import prod

import torch
from torch import fx

from tilestream.graph.nodes import argument
from tilestream.studies.kitsune.lowering.shapes import Shapes, dims_of, sizes
from tilestream.studies.kitsune.lowering.writer import Ref, Writer, dtype_of, own

aten = torch.ops.aten

REDUCTIONS = {aten.sum: "sum", aten.mean: "mean", aten.amax: "max", aten.amin: "min"}


def _over(node: fx.Node) -> tuple[list[int], bool]:
    """The dimensions that are reduced, and whether they stay as ones."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    return dims_of(argument(node, 1, "dim"), len(sizes(x))), bool(argument(node, 2, "keepdim", False))


def shapes(s: Shapes, node: fx.Node) -> None:
    over, stay = _over(node)
    frame = s.dims.new(sizes(node.args[0]))  # pyright: ignore[reportArgumentType]
    kept = tuple(() if i in over else axes for i, axes in enumerate(frame) if stay or i not in over)
    s.make(node, kept)
    s.over(node, frame)
    s.align(node.args[0], frame)


def write(w: Writer, node: fx.Node, kind: str) -> None:
    over, _ = _over(node)
    kept = [() if i in over else axes for i, axes in enumerate(w.range)]
    x, dtype = w.tile(node.args[0]), dtype_of(node)
    if kind == "min":
        tile = w.unary("neg", w.reduce(w.unary("neg", x, x.dtype), kept, dtype, "max"), dtype)
    elif kind == "mean":
        count = prod(sizes(node.args[0])[i] for i in over)  # pyright: ignore[reportArgumentType]
        tile = w.binary("mul", w.reduce(x, kept, "f32"), 1.0 / count, dtype)
    else:
        tile = w.reduce(x, kept, dtype, kind)
    w.refs[node, 0] = Ref(tile.name, own(tile).at or (), tile)
