"""Elementwise operators, casts, and views that keep rows and features."""

from __future__ import annotations

import operator

import torch
from torch import fx

from tilestream.aten.nodes import argument, number, packet
from tilestream.capture import expression, product, same_size, value
from tilestream.dtypes import DTYPES
from tilestream.emitter import Emitter, Unsupported, Value, dtype_of
from tilestream.ir import Tile

aten = torch.ops.aten

UNARY = {
    aten.relu: "relu",
    aten.silu: "silu",
    aten.sigmoid: "sigmoid",
    aten.tanh: "tanh",
    aten.exp: "exp",
    aten.log: "log",
    aten.sin: "sin",
    aten.cos: "cos",
    aten.neg: "neg",
    aten.abs: "abs",
    aten.sqrt: "sqrt",
    aten.rsqrt: "rsqrt",
    aten.reciprocal: "reciprocal",
}


def unary(e: Emitter, node: fx.Node, kind: str, **attrs: float | int | str) -> Value:
    """One tile in, one tile of the same shape out."""
    x = node.args[0]
    frame = e.natural(x)
    return Value(e.emit(kind, frame.features, dtype_of(node), (e.tile(x),), (), **attrs), frame.rows, frame.dropped)


def gelu(e: Emitter, node: fx.Node) -> Value:
    return unary(e, node, "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu")


def softplus(e: Emitter, node: fx.Node) -> Value:
    return unary(e, node, "softplus", beta=number(node, 1, "beta", 1.0), threshold=number(node, 2, "threshold", 20.0))


def cast(e: Emitter, node: fx.Node) -> Value:
    x = node.args[0]
    source, result = value(x) if isinstance(x, fx.Node) else None, value(node)
    if source is None or result is None or source.device != result.device:
        raise Unsupported("copies between devices")
    return identity(e, node) if source.dtype == result.dtype else unary(e, node, "cast")


def identity(e: Emitter, node: fx.Node) -> Value:
    """Another shape of the same rows and features: no operation at all."""
    x = node.args[0]
    own, fake = e.natural(x), value(node)
    assert fake is not None
    tile = e.tile(x)
    if fake.dim() and product(fake.shape[:-1]) == own.rows and expression(fake.shape[-1]) == own.features:
        return Value(tile, own.rows)
    if own.features == 1 and product(fake.shape) == own.rows and _drops(x, fake):
        return Value(tile, own.rows, dropped=True)
    raise Unsupported("changes which elements make a row")


def _drops(x: object, result: torch.Tensor) -> bool:
    """Whether a view of a column only leaves its last dimension out, or has none to leave out."""
    before = value(x) if isinstance(x, fx.Node) else None
    if before is None or not same_size(before.shape[-1], 1) or before.dim() != result.dim() + 1:
        return before is not None and not same_size(before.shape[-1], 1)
    return all(same_size(a, b) for a, b in zip(before.shape, result.shape, strict=False))


def permute(e: Emitter, node: fx.Node) -> Value:
    """A permutation that moves only dimensions of size 1: no operation at all."""
    x = node.args[0]
    before = value(x) if isinstance(x, fx.Node) else None
    if before is None:
        raise Unsupported("an operand is not a tensor")
    dims = list(range(before.dim()))
    if packet(node) is aten.permute:
        order = argument(node, 1, "dims")
        dims = [int(d) % before.dim() for d in order] if isinstance(order, list | tuple) else dims
    elif before.dim() > 1:
        a, b = (0, 1) if packet(node) is aten.t else (int(str(d)) % before.dim() for d in node.args[1:3])
        dims[a], dims[b] = dims[b], dims[a]
    wide = [d for d in dims if not same_size(before.shape[d], 1)]
    if wide != sorted(wide):
        raise Unsupported("permutes rows or features")
    own = e.natural(x)
    return Value(e.tile(x), own.rows, own.dropped)


def elu(e: Emitter, node: fx.Node) -> Value:
    """``elu``, ``selu``, ``celu``: scale max(x, 0) + alpha scale (exp(input_scale min(x, 0)) - 1)."""
    alpha, scale = number(node, 1, "alpha", 1.0), number(node, 2, "scale", 1.0)
    inner = number(node, 3, "input_scale", 1.0)
    if packet(node) is aten.celu:
        inner = 1.0 / alpha
    frame = e.natural(node.args[0])
    x = e.tile(node.args[0])
    low: Tile = e.binary("minimum", x, 0.0, frame.features, "f32")
    for kind, scalar in (("mul", inner), ("exp", None), ("sub", 1.0), ("mul", alpha * scale)):
        if scalar is None:
            low = e.emit(kind, frame.features, "f32", (low,))
        elif (kind, scalar) != ("mul", 1.0):
            low = e.binary(kind, low, scalar, frame.features, "f32")
    high = e.binary("maximum", x, 0.0, frame.features, "f32")
    if scale != 1.0:
        high = e.binary("mul", high, scale, frame.features, "f32")
    return Value(e.binary("add", high, low, frame.features, dtype_of(node)), frame.rows, frame.dropped)


def batch_norm(e: Emitter, node: fx.Node) -> Value:
    """BatchNorm with running statistics on ``[rows, features]``: vectors only."""
    x, scale, shift, mean, variance = node.args[:5]
    fake = value(x) if isinstance(x, fx.Node) else None
    if fake is None or fake.dim() != 2:
        raise Unsupported("its channels are not the last dimension")
    if any(u.target is not operator.getitem or u.args[1] != 0 for u in node.users):
        raise Unsupported("its statistics are used too")
    frame = e.natural(x)
    vector = ("vector", frame.features)
    rstd = e.parameter(variance, (vector, ("rstd", number(node, 6, "eps", 1e-5))), (frame.features,), "f32")
    dtype = DTYPES[node.meta["val"][0].dtype]
    tile = e.binary("sub", e.tile(x), e.vector(mean), frame.features, "f32")
    tile = e.binary("mul", tile, rstd, frame.features, "f32")
    for kind, other in (("mul", scale), ("add", shift)):
        if other is not None:
            tile = e.binary(kind, tile, e.vector(other), frame.features, "f32")
    return Value(e.emit("cast", frame.features, dtype, (tile,)), frame.rows, frame.dropped)


def binary(e: Emitter, node: fx.Node, kind: str, left: object, right: object) -> Value:
    """Two operands, one of them at least a tile."""
    frame = e.frame(node, left, right)
    a, b = e.operand(left, frame), e.operand(right, frame)
    return Value(e.binary(kind, a, b, frame.features, dtype_of(node)), frame.rows, frame.dropped)


def add(e: Emitter, node: fx.Node, kind: str = "add", swapped: bool = False) -> Value:
    """``self + alpha other``, also ``sub`` and ``rsub`` (``other - alpha self``)."""
    left, right = node.args[0], node.args[1]
    alpha = number(node, 2, "alpha", 1.0)
    if swapped:
        left, right = right, left
    frame = e.frame(node, left, right)
    a, b = e.operand(left, frame), e.operand(right, frame)
    if alpha != 1.0:
        if isinstance(b, str):
            raise Unsupported("alpha scales a parameter")
        b = e.binary("mul", b, alpha, b.features, "f32") if isinstance(b, Tile) else b * alpha
    return Value(e.binary(kind, a, b, frame.features, dtype_of(node)), frame.rows, frame.dropped)


def divide(e: Emitter, node: fx.Node) -> Value:
    if node.kwargs.get("rounding_mode") is not None:
        raise Unsupported("division with a rounding mode")
    return binary(e, node, "div", node.args[0], node.args[1])


def power(e: Emitter, node: fx.Node) -> Value:
    exponent = node.args[1]
    kinds = {2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    if isinstance(exponent, int | float) and exponent in kinds:
        return unary(e, node, kinds[exponent])
    if exponent == 3:
        x = e.tile(node.args[0])
        frame = e.natural(node.args[0])
        square = e.emit("square", frame.features, "f32", (x,))
        return Value(e.binary("mul", square, x, frame.features, dtype_of(node)), frame.rows, frame.dropped)
    raise Unsupported("only powers -1, -0.5, 0.5, 2 and 3 are tile ops")


def clamp(e: Emitter, node: fx.Node) -> Value:
    """``clamp``, ``clamp_min``, ``clamp_max`` and ``hardtanh``: maximum, then minimum."""
    low, high = argument(node, 1, "min"), argument(node, 2, "max")
    if packet(node) is aten.hardtanh:
        low, high = number(node, 1, "min_val", -1.0), number(node, 2, "max_val", 1.0)
    if packet(node) is aten.clamp_max:
        low, high = None, node.args[1]
    frame = e.frame(node, node.args[0])
    tile = e.tile(node.args[0], frame)
    for kind, bound in (("maximum", low), ("minimum", high)):
        if bound is not None:
            tile = e.binary(kind, tile, e.operand(bound, frame), frame.features, dtype_of(node))
    return Value(tile, frame.rows, frame.dropped)


def leaky_relu(e: Emitter, node: fx.Node) -> Value:
    slope = number(node, 1, "negative_slope", 0.01)
    if not 0 <= slope <= 1:
        raise Unsupported("a negative_slope outside 0 to 1")
    frame = e.natural(node.args[0])
    x = e.tile(node.args[0])
    scaled = e.binary("mul", x, slope, frame.features, "f32")
    return Value(e.binary("maximum", x, scaled, frame.features, dtype_of(node)), frame.rows, frame.dropped)


def hard(e: Emitter, node: fx.Node) -> Value:
    """``hardsigmoid`` and ``hardswish``."""
    frame = e.natural(node.args[0])
    x = e.tile(node.args[0])
    gate: Tile = x
    for kind, scalar in (("add", 3.0), ("maximum", 0.0), ("minimum", 6.0)):
        gate = e.binary(kind, gate, scalar, frame.features, "f32")
    if packet(node) is aten.hardswish:
        gate = e.binary("mul", gate, x, frame.features, "f32")
    return Value(e.binary("div", gate, 6.0, frame.features, dtype_of(node)), frame.rows, frame.dropped)


def mish(e: Emitter, node: fx.Node) -> Value:
    frame = e.natural(node.args[0])
    x = e.tile(node.args[0])
    gate = e.emit("softplus", frame.features, "f32", (x,), beta=1.0, threshold=20.0)
    gate = e.emit("tanh", frame.features, "f32", (gate,))
    return Value(e.binary("mul", x, gate, frame.features, dtype_of(node)), frame.rows, frame.dropped)


def addcmul(e: Emitter, node: fx.Node) -> Value:
    base, left, right = node.args[:3]
    frame = e.frame(node, base, left, right)
    scale = number(node, 3, "value", 1.0)
    a, b, c = (e.operand(x, frame) for x in (left, right, base))
    widths = [x.features if isinstance(x, Tile) else frame.features for x in (a, b)]
    both = e.binary("mul", a, b, max(widths), "f32")
    if scale != 1.0:
        both = e.binary("mul", both, scale, both.features, "f32")
    return Value(e.binary("add", both, c, frame.features, dtype_of(node)), frame.rows, frame.dropped)
