"""Norms over the last dimensions and softmax over one, and their derivatives: sums, and what is done with them."""

from __future__ import annotations

from math import prod

import torch
from torch import fx

from tilestream.graph.nodes import Unsupported, number, packet
from tilestream.ir.pipeline import Tile
from tilestream.studies.kitsune.lowering.dims import Shape
from tilestream.studies.kitsune.lowering.shapes import Shapes, sizes
from tilestream.studies.kitsune.lowering.writer import Ref, Writer, dtype_of, own

aten = torch.ops.aten

FLOAT32_EPS = torch.finfo(torch.float32).eps
"""Where no eps is given, that of the type that torch accumulates in: float32 for all three dtypes."""


def _set(w: Writer, node: fx.Node, index: int, tile: Tile) -> None:
    w.refs[node, index] = Ref(tile.name, own(tile).at or (), tile)


def _rows(w: Writer, node: fx.Node, count: int) -> tuple[Shape, float]:
    """The frame with ``count`` last dimensions left out, and how many elements those have."""
    frame = w.range
    x = node.args[0]
    assert isinstance(x, fx.Node)
    kept = tuple(() if i >= len(frame) - count else axes for i, axes in enumerate(frame))
    return kept, float(prod(sizes(x)[len(frame) - count :]))


def _mean(w: Writer, x: Tile, rows: Shape, count: float) -> Tile:
    return w.binary("mul", w.reduce(x, rows, "f32"), 1.0 / count, "f32")


def _times(w: Writer, a: Tile, b: Tile, dtype: str = "f32") -> Tile:
    return w.binary("mul", a, b, dtype)


# -- forward


def norm_shapes(s: Shapes, node: fx.Node) -> None:
    """Results: the rows; then their statistics, whose normalised dimensions have size 1."""
    x, shape = node.args[0], node.args[1]
    frame = s.dims.new(sizes(x))  # pyright: ignore[reportArgumentType]
    s.make(node, frame)
    s.over(node, frame)
    s.align(x, frame)
    last = len(shape) if isinstance(shape, list | tuple) else 1
    rows = tuple(() if i >= len(frame) - last else axes for i, axes in enumerate(frame))
    s.rows.append(rows)
    results = node.meta["val"]
    for index in range(1, len(results) if isinstance(results, list | tuple) else 1):
        s.make(node, rows, index)
    for vector in node.args[2:4]:
        if isinstance(vector, fx.Node):
            s.align(vector, frame)


def layer_norm(w: Writer, node: fx.Node) -> None:
    x, shape, weight, bias = (*node.args, None, None)[:4]
    assert isinstance(shape, list | tuple)
    rows, count = _rows(w, node, len(shape))
    tile = w.tile(x)
    mean = _mean(w, tile, rows, count)
    centred = w.binary("sub", tile, mean, "f32")
    variance = _mean(w, w.unary("square", centred, "f32"), rows, count)
    root = w.unary("rsqrt", w.binary("add", variance, number(node, 4, "eps", 1e-5), "f32"), "f32")
    y = _times(w, centred, root, dtype_of(node) if weight is None and bias is None else "f32")
    if weight is not None:
        y = _times(w, y, w.tile(weight), dtype_of(node) if bias is None else "f32")
    if bias is not None:
        y = w.binary("add", y, w.tile(bias), dtype_of(node))
    for index, result in enumerate((y, mean, root)):
        _set(w, node, index, result)


def rms_norm(w: Writer, node: fx.Node) -> None:
    x, shape, weight = (*node.args, None)[:3]
    assert isinstance(shape, list | tuple)
    rows, count = _rows(w, node, len(shape))
    tile = w.tile(x)
    mean = _mean(w, w.unary("square", tile, "f32"), rows, count)
    root = w.unary("rsqrt", w.binary("add", mean, number(node, 3, "eps", FLOAT32_EPS), "f32"), "f32")
    y = _times(w, tile, root, dtype_of(node) if weight is None else "f32")
    if weight is not None:
        y = _times(w, y, w.tile(weight), dtype_of(node))
    for index, result in enumerate((y, root)[: 2 if packet(node) is aten._fused_rms_norm else 1]):
        _set(w, node, index, result)


def softmax_shapes(s: Shapes, node: fx.Node) -> None:
    frame = s.dims.new(sizes(node))
    s.make(node, frame)
    s.over(node, frame)
    s.rows.append(_without(frame, _dim(node)))
    for operand in node.all_input_nodes:
        s.align(operand, frame)


def _dim(node: fx.Node) -> object:
    """The dimension over which a softmax, or its derivative, sums."""
    return node.args[1] if packet(node) in (aten._softmax, aten._log_softmax) else node.args[2]


def _without(frame: Shape, dim: object) -> Shape:
    if not isinstance(dim, int):
        raise Unsupported("its dimension is not a number")
    return tuple(() if i == dim % len(frame) else axes for i, axes in enumerate(frame))


def softmax(w: Writer, node: fx.Node) -> None:
    """``exp(x - max) / sum``, and the logarithm of that."""
    rows, dtype = _without(w.range, _dim(node)), dtype_of(node)
    x = w.tile(node.args[0])
    shifted = w.binary("sub", x, w.reduce(x, rows, "f32", "max"), "f32")
    grown = w.unary("exp", shifted, "f32")
    total = w.reduce(grown, rows, "f32")
    if packet(node) is aten._log_softmax:
        _set(w, node, 0, w.binary("sub", shifted, w.unary("log", total, "f32"), dtype))
    else:
        _set(w, node, 0, _times(w, grown, w.unary("reciprocal", total, "f32"), dtype))


# -- backward


def norm_backward_shapes(s: Shapes, node: fx.Node) -> None:
    """Results: the rows' gradient, then those of the vectors that there are."""
    gradient, x, shape, *rest = node.args
    last = len(shape) if isinstance(shape, list | tuple) else 1
    frame = s.dims.new(sizes(x))  # pyright: ignore[reportArgumentType]
    s.make(node, frame)
    s.over(node, frame)
    s.rows.append(frame[: len(frame) - last])
    for operand in (gradient, x, *rest):
        if isinstance(operand, fx.Node):
            s.align(operand, frame)
    for index in range(1, len(node.meta["val"])):
        s.make(node, frame[len(frame) - last :], index)


def layer_norm_backward(w: Writer, node: fx.Node) -> None:
    """dx = r (g - mean(g) - n mean(g n)), n the normalised rows, g the gradient times the weight; sums over rows."""
    gradient, x, shape, mean, root, weight, _, mask = node.args
    assert isinstance(shape, list | tuple) and isinstance(mask, list | tuple)
    g, r = w.tile(gradient), w.tile(root)
    normal = _times(w, w.binary("sub", w.tile(x), w.tile(mean), "f32"), r)
    _norm_backward(w, node, g, normal, r, weight, len(shape), mask, centred=True)


def rms_norm_backward(w: Writer, node: fx.Node) -> None:
    gradient, x, shape, root, weight, mask = node.args
    assert isinstance(shape, list | tuple) and isinstance(mask, list | tuple)
    g, r = w.tile(gradient), w.tile(root)
    _norm_backward(w, node, g, _times(w, w.tile(x), r), r, weight, len(shape), mask, centred=False)


def _norm_backward(w, node, g: Tile, normal: Tile, r: Tile, weight, last: int, mask, centred: bool) -> None:
    features = w.range[len(w.range) - last :]
    if mask[0]:
        rows, count = _rows(w, node, last)
        scaled = g if weight is None else _times(w, g, w.tile(weight))
        inner = _mean(w, _times(w, scaled, normal), rows, count)
        rest = w.binary("sub", scaled, _times(w, normal, inner), "f32")
        if centred:
            rest = w.binary("sub", rest, _mean(w, scaled, rows, count), "f32")
        _set(w, node, 0, _times(w, rest, r, dtype_of(node)))
    if mask[1]:
        _set(w, node, 1, w.reduce(_times(w, g, normal), features, dtype_of(node, 1)))
    if len(mask) > 2 and mask[2]:
        _set(w, node, 2, w.reduce(g, features, dtype_of(node, 2)))


def softmax_backward(w: Writer, node: fx.Node) -> None:
    """``y (g - sum(g y))``; of the logarithm, ``g - exp(y) sum(g)``."""
    gradient, y = node.args[:2]
    rows, dtype = _without(w.range, _dim(node)), dtype_of(node)
    g, y = w.tile(gradient), w.tile(y)
    if packet(node) is aten._log_softmax_backward_data:
        spread = _times(w, w.unary("exp", y, "f32"), w.reduce(g, rows, "f32"))
        _set(w, node, 0, w.binary("sub", g, spread, dtype))
    else:
        inner = w.reduce(_times(w, g, y), rows, "f32")
        _set(w, node, 0, _times(w, y, w.binary("sub", g, inner, "f32"), dtype))
