"""Derivatives of activations, as autograd's graphs have them: row by row, like the activations themselves."""

from __future__ import annotations

import math

from torch import fx

from tilestream.graph.lowering import Operand, dtype_of
from tilestream.graph.nodes import Unsupported, number
from tilestream.graph.operators.writes import Writes
from tilestream.ir.pipeline import Tile


def _operands(e: Writes, node: fx.Node) -> tuple[Operand, Tile]:
    """The gradient, and what the derivative is computed from: the input of the activation, or its result."""
    frame = e.frame(node, *node.args[:2])
    return e.operand(node.args[0], frame), e.tile(node.args[1], frame)


def threshold_backward(e: Writes, node: fx.Node) -> Tile:
    """The gradient where x > threshold, elsewhere 0: of ``relu`` and ``threshold``."""
    gradient, x = _operands(e, node)
    return e.binary("relu_backward", gradient, _above(e, x, number(node, 2, "threshold", 0.0)), dtype_of(node))


def hardtanh_backward(e: Writes, node: fx.Node) -> Tile:
    """The gradient where low < x < high, elsewhere 0."""
    gradient, x = _operands(e, node)
    low, high = number(node, 2, "min_val", -1.0), number(node, 3, "max_val", 1.0)
    if not math.isfinite(high):
        raise Unsupported("a bound that is not finite")
    inside = e.binary("relu_backward", gradient, _above(e, x, low), "f32")
    return e.binary("relu_backward", inside, e.binary("sub", high, x, "f32"), dtype_of(node))


def _above(e: Writes, x: Tile, bound: float) -> Tile:
    """Positive exactly where x > bound."""
    if not math.isfinite(bound):
        raise Unsupported("a bound that is not finite")
    return x if bound == 0.0 else e.binary("sub", x, bound, "f32")


def sigmoid_backward(e: Writes, node: fx.Node) -> Tile:
    """g y (1 - y), of the result y."""
    gradient, y = _operands(e, node)
    open_ = e.binary("mul", gradient, e.binary("sub", 1.0, y, "f32"), "f32")
    return e.binary("mul", open_, y, dtype_of(node))


def tanh_backward(e: Writes, node: fx.Node) -> Tile:
    """g (1 - y y), of the result y."""
    gradient, y = _operands(e, node)
    return e.binary("mul", gradient, e.binary("sub", 1.0, e.unary("square", y, "f32"), "f32"), dtype_of(node))


def silu_backward(e: Writes, node: fx.Node) -> Tile:
    """g s (1 + x (1 - s)), s the sigmoid of x."""
    gradient, x = _operands(e, node)
    s = e.unary("sigmoid", x, "f32")
    rest = e.binary("add", e.binary("mul", x, e.binary("sub", 1.0, s, "f32"), "f32"), 1.0, "f32")
    return e.binary("mul", gradient, e.binary("mul", s, rest, "f32"), dtype_of(node))


def gelu_backward(e: Writes, node: fx.Node) -> Tile:
    """g times the derivative of gelu; of the tanh approximation, with u = k (x + c x^3) and t = tanh(u),
    (1 + t) / 2 + x u' (1 - t t) / 2."""
    gradient, x = _operands(e, node)
    if node.kwargs.get("approximate", "none") == "none":
        return e.binary("mul", gradient, e.unary("gelu_slope", x, "f32"), dtype_of(node))
    k, c = math.sqrt(2 / math.pi), 0.044715
    cube = e.binary("mul", e.binary("mul", e.unary("square", x, "f32"), k * c, "f32"), x, "f32")
    linear = e.binary("mul", x, k, "f32")
    t = e.unary("tanh", e.binary("add", linear, cube, "f32"), "f32")
    slope = e.binary("add", linear, e.binary("mul", cube, 3.0, "f32"), "f32")
    curved = e.binary("mul", slope, e.binary("sub", 1.0, e.unary("square", t, "f32"), "f32"), "f32")
    twice = e.binary("add", e.binary("add", t, 1.0, "f32"), curved, "f32")
    return e.binary("mul", gradient, e.binary("mul", twice, 0.5, "f32"), dtype_of(node))
