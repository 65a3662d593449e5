"""Products of matrices: a linear layer forward, its dX and dW, and batches of products of activations."""

from __future__ import annotations

import torch
from torch import fx

from tilestream.graph.nodes import Unsupported, number, packet
from tilestream.studies.kitsune.lowering.dims import Shape
from tilestream.studies.kitsune.lowering.shapes import Shapes, sizes
from tilestream.studies.kitsune.lowering.writer import Ref, Writer, dtype_of, own

aten = torch.ops.aten

BIASED = (aten.addmm, aten.baddbmm)
PRODUCTS = (aten.mm, aten.bmm, aten.linear, *BIASED)


def _operands(node: fx.Node) -> tuple[object, object, object]:
    """Left, right and what is added; a linear's right operand is a weight ``[out, in]``."""
    if packet(node) in BIASED:
        return node.args[1], node.args[2], node.args[0]
    return node.args[0], node.args[1], node.args[2] if len(node.args) > 2 else None


def _sides(node: fx.Node, frame: Shape) -> tuple[Shape, Shape]:
    """The operands' dimensions in ``frame``: rows (a batch before them), columns, and what is summed over."""
    *rows, columns, inner = frame
    left = (*rows, inner)
    if packet(node) is aten.linear:
        return left, (columns, inner)
    return left, (*rows[:-1], inner, columns)


def shapes(s: Shapes, node: fx.Node) -> None:
    left, right, bias = _operands(node)
    if not isinstance(left, fx.Node):
        raise Unsupported("an operand is not a tensor")
    frame = s.dims.new((*sizes(node), sizes(left)[-1]))
    s.make(node, frame[:-1])
    s.over(node, frame, features=frame[-2])
    for operand, side in zip((left, right), _sides(node, frame), strict=True):
        s.align(operand, side)
    if bias is not None:
        s.align(bias, frame[:-1])


def write(w: Writer, node: fx.Node) -> None:
    left, right, bias = _operands(node)
    shape = w.shapes[node, 0]
    views = [w.factor(x, side) for x, side in zip((left, right), _sides(node, w.range), strict=True)]
    scaled = number(node, 4, "alpha", 1.0) if packet(node) in BIASED else 1.0
    weight = number(node, 3, "beta", 1.0) if packet(node) in BIASED else 1.0
    more = bias is not None and weight != 0.0
    tile = w.product(views, shape, "f32" if more or scaled != 1.0 else dtype_of(node))
    if scaled != 1.0:
        tile = w.binary("mul", tile, scaled, "f32" if more else dtype_of(node))
    if more:
        other = w.tile(bias, shape)
        if weight != 1.0:
            other = w.binary("mul", other, weight, "f32")
        tile = w.binary("add", tile, other, dtype_of(node))
    w.refs[node, 0] = Ref(tile.name, own(tile).at or (), tile)
