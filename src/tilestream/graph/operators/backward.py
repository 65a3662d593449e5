"""Derivatives of activations and of softmax, as autograd's graphs have them: row by row, like what they are of."""

from __future__ import annotations

import math

from torch import fx

from tilestream.graph.lowering import Emitter, Operand, dtype_of
from tilestream.graph.nodes import Unsupported, argument, aten, integer, last_dim, number
from tilestream.graph.operators.rules import elementwise, rule
from tilestream.graph.operators.writes import Writes
from tilestream.ir.pipeline import Tile

SIGMOID_IS_ONE = 17.4
"""From here on 1 + exp(-x) is 1 in fp32: exp(-x) is less than half of the last bit, 2^-25."""


def _operands(e: Writes, node: fx.Node) -> tuple[Operand, Tile]:
    """The gradient, and what the derivative is computed from: the input of the activation, or its result."""
    frame = e.frame(node, *node.args[:2])
    return e.operand(node.args[0], frame), e.tile(node.args[1], frame)


@elementwise(aten.threshold_backward)
def threshold_backward(e: Writes, node: fx.Node) -> Tile:
    """The gradient where x > threshold, elsewhere 0: of ``relu`` and ``threshold``."""
    gradient, x = _operands(e, node)
    return e.binary("relu_backward", gradient, _above(e, x, number(node, 2, "threshold", 0.0)), dtype_of(node))


@elementwise(aten.hardtanh_backward)
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


@elementwise(aten.sigmoid_backward)
def sigmoid_backward(e: Writes, node: fx.Node) -> Tile:
    """g y (1 - y), of the result y."""
    gradient, y = _operands(e, node)
    open_ = e.binary("mul", gradient, e.binary("sub", 1.0, y, "f32"), "f32")
    return e.binary("mul", open_, y, dtype_of(node))


@elementwise(aten.tanh_backward)
def tanh_backward(e: Writes, node: fx.Node) -> Tile:
    """g (1 - y y), of the result y."""
    gradient, y = _operands(e, node)
    return e.binary("mul", gradient, e.binary("sub", 1.0, e.unary("square", y, "f32"), "f32"), dtype_of(node))


@elementwise(aten.silu_backward)
def silu_backward(e: Writes, node: fx.Node) -> Tile:
    """g s (1 + x (1 - s)), s the sigmoid of x."""
    gradient, x = _operands(e, node)
    s = e.unary("sigmoid", x, "f32")
    rest = e.binary("add", e.binary("mul", x, e.binary("sub", 1.0, s, "f32"), "f32"), 1.0, "f32")
    return e.binary("mul", gradient, e.binary("mul", s, rest, "f32"), dtype_of(node))


@elementwise(aten.gelu_backward)
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


def _step(e: Writes, x: Tile, low: float, high: float) -> Tile:
    """``high`` where x > 0, ``low`` elsewhere."""
    positive = e.binary("relu_backward", high - low, x, "f32")
    return positive if low == 0.0 else e.binary("add", positive, low, "f32")


@elementwise(aten.leaky_relu_backward)
def leaky_relu_backward(e: Writes, node: fx.Node) -> Tile:
    """The gradient where x > 0, ``slope`` of it elsewhere; of the result as well, whose sign is x's."""
    gradient, x = _operands(e, node)
    slope = number(node, 2, "negative_slope", 0.01)
    if not math.isfinite(slope):
        raise Unsupported("a negative_slope that is not finite")
    return e.binary("mul", gradient, _step(e, x, slope, 1.0), dtype_of(node))


@elementwise(aten.elu_backward)
def elu_backward(e: Writes, node: fx.Node) -> Tile:
    """Of ``scale max(x, 0) + alpha scale (exp(inner min(x, 0)) - 1)``, of x or of the result y: g scale above 0; below,
    g alpha scale inner exp(inner x), which is g inner (y + alpha scale)."""
    frame = e.frame(node, node.args[0], node.args[5])
    gradient, x = e.operand(node.args[0], frame), e.tile(node.args[5], frame)
    alpha, scale, inner = (number(node, at, key, 1.0) for at, key in ((1, "alpha"), (2, "scale"), (3, "input_scale")))
    low = e.binary("minimum", x, 0.0, "f32")
    if node.args[4]:
        slope = e.binary("mul", e.binary("add", low, alpha * scale, "f32"), inner, "f32")
    else:
        slope = e.binary("mul", e.unary("exp", e.binary("mul", low, inner, "f32"), "f32"), alpha * scale * inner, "f32")
    # Above 0 ``low`` is 0 and the slope ``alpha scale inner``: what is missing there is a step.
    slope = e.binary("add", slope, _step(e, x, 0.0, scale - alpha * scale * inner), "f32")
    return e.binary("mul", gradient, slope, dtype_of(node))


@elementwise(aten.softplus_backward)
def softplus_backward(e: Writes, node: fx.Node) -> Tile:
    """g sigmoid(beta x); g itself where beta x > threshold. Where the sigmoid is 1 there, nothing is to be chosen."""
    gradient, x = _operands(e, node)
    beta, threshold = number(node, 2, "beta", 1.0), number(node, 3, "threshold", 20.0)
    scaled = x if beta == 1.0 else e.binary("mul", x, beta, "f32")
    slope = e.unary("sigmoid", scaled, "f32")
    if threshold < SIGMOID_IS_ONE:
        above = e.binary("relu_backward", 1.0, e.binary("sub", scaled, threshold, "f32"), "f32")
        slope = e.binary("maximum", slope, above, "f32")
    return e.binary("mul", gradient, slope, dtype_of(node))


@elementwise(aten.hardsigmoid_backward)
def hardsigmoid_backward(e: Writes, node: fx.Node) -> Tile:
    """g / 6 where -3 < x < 3, elsewhere 0."""
    gradient, x = _operands(e, node)
    above = e.binary("relu_backward", gradient, e.binary("add", x, 3.0, "f32"), "f32")
    inside = e.binary("relu_backward", above, e.binary("sub", 3.0, x, "f32"), "f32")
    return e.binary("div", inside, 6.0, dtype_of(node))


@elementwise(aten.hardswish_backward)
def hardswish_backward(e: Writes, node: fx.Node) -> Tile:
    """0 where x <= -3, g where x >= 3, between them g (x / 3 + 1 / 2)."""
    gradient, x = _operands(e, node)
    slope = e.binary("add", e.binary("div", x, 3.0, "f32"), 0.5, "f32")
    inside = e.binary("relu_backward", slope, e.binary("add", x, 3.0, "f32"), "f32")
    below = e.binary("relu_backward", inside, e.binary("sub", 3.0, x, "f32"), "f32")
    beyond = e.binary("sub", 1.0, e.binary("relu_backward", 1.0, e.binary("sub", 3.0, x, "f32"), "f32"), "f32")
    return e.binary("mul", gradient, e.binary("add", below, beyond, "f32"), dtype_of(node))


@elementwise(aten.mish_backward)
def mish_backward(e: Writes, node: fx.Node) -> Tile:
    """g (t + x s (1 - t t)), t the tanh of softplus(x), s the sigmoid of x."""
    gradient, x = _operands(e, node)
    t = e.unary("tanh", e.unary("softplus", x, "f32", beta=1.0, threshold=20.0), "f32")
    rest = e.binary("sub", 1.0, e.unary("square", t, "f32"), "f32")
    curved = e.binary("mul", e.binary("mul", x, e.unary("sigmoid", x, "f32"), "f32"), rest, "f32")
    return e.binary("mul", gradient, e.binary("add", t, curved, "f32"), dtype_of(node))


@elementwise(aten.log_sigmoid_backward)
def log_sigmoid_backward(e: Writes, node: fx.Node) -> Tile:
    """g sigmoid(-x)."""
    gradient, x = _operands(e, node)
    return e.binary("mul", gradient, e.unary("sigmoid", e.unary("neg", x, "f32"), "f32"), dtype_of(node))


@rule(aten._softmax_backward_data)
def softmax_backward(e: Emitter, node: fx.Node) -> Tile:
    """Of the result y: y (g - sum(g y))."""
    gradient, y = _rows(e, node)
    along = e.emit("sum", 1, "f32", (e.binary("mul", gradient, y, "f32"),))
    return e.binary("mul", e.binary("sub", gradient, along, "f32"), y, dtype_of(node))


@rule(aten._log_softmax_backward_data)
def log_softmax_backward(e: Emitter, node: fx.Node) -> Tile:
    """Of the result y: g - exp(y) sum(g)."""
    gradient, y = _rows(e, node)
    along = e.emit("sum", 1, "f32", (gradient,))
    return e.binary("sub", gradient, e.binary("mul", e.unary("exp", y, "f32"), along, "f32"), dtype_of(node))


def _rows(e: Emitter, node: fx.Node) -> tuple[Tile, Tile]:
    """The gradient and the result of what works along the last dimension."""
    last_dim(node, node.args[1], argument(node, 2, "dim"))
    frame = e.matrix(node.args[1])
    return e.tile(node.args[0], frame), e.tile(node.args[1], frame)


@rule(aten.glu_backward)
def glu_backward(e: Emitter, node: fx.Node) -> Tile:
    """Of x = cat(a, b): cat(g s, g a s (1 - s)), s the sigmoid of b."""
    x = node.args[1]
    last_dim(node, x, integer(node, 2, "dim"))
    whole = e.tile(x, e.matrix(x))
    half, dtype = whole.features // 2, dtype_of(node)
    gradient = e.tile(node.args[0], e.matrix(node.args[0]))
    a, b = (e.emit("slice", half, whole.dtype, (whole,), start=s, stop=s + half) for s in (0, half))
    s = e.unary("sigmoid", b, "f32")
    kept = e.binary("mul", gradient, s, dtype)
    slope = e.binary("mul", e.binary("mul", a, s, "f32"), e.binary("sub", 1.0, s, "f32"), "f32")
    return e.emit("cat", 2 * half, dtype, (kept, e.binary("mul", gradient, slope, dtype)))
