"""Elementwise operators, casts, and views that keep rows and features."""

from __future__ import annotations

import math

import torch
from torch import fx

from tilestream.graph.lowering import Emitter, dtype_of
from tilestream.graph.nodes import Unsupported, argument, first_alone, number, packet, permutation, tensor_of, value
from tilestream.graph.operators.rules import SHAPES, elementwise, rule
from tilestream.graph.operators.writes import Writes
from tilestream.graph.sizes import product, same_size
from tilestream.ir.dtypes import DTYPES
from tilestream.ir.pipeline import Tile

aten = torch.ops.aten

_CASTS = (aten._to_copy, torch.ops.prims.convert_element_type)
UNARY = {
    getattr(aten, kind): kind
    for kind in (
        *("relu", "silu", "sigmoid", "tanh", "exp", "expm1", "log", "sin", "cos"),
        *("neg", "abs", "sqrt", "rsqrt", "reciprocal"),
    )
}
"""Operators that are called as their tile ops are."""
_PAIRS = {aten.mul: "mul", aten.maximum: "maximum", aten.minimum: "minimum"}


@elementwise(*UNARY)
def unary(e: Writes, node: fx.Node, kind: str = "", **attrs: float | int | str) -> Tile:
    """One tile in, one tile of the same shape out; ``kind`` by the table if not given."""
    return e.unary(kind or UNARY[packet(node)], e.tile(node.args[0]), dtype_of(node), **attrs)


@elementwise(aten.gelu)
def gelu(e: Writes, node: fx.Node) -> Tile:
    return unary(e, node, "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu")


@elementwise(aten.softplus)
def softplus(e: Writes, node: fx.Node) -> Tile:
    return unary(e, node, "softplus", beta=number(node, 1, "beta", 1.0), threshold=number(node, 2, "threshold", 20.0))


@rule(*_CASTS)
def cast(e: Emitter, node: fx.Node) -> Tile:
    x = node.args[0]
    source, result = value(x), value(node)
    if source is None or result is None or source.device != result.device:
        raise Unsupported("copies between devices")
    return identity(e, node) if source.dtype == result.dtype else unary(e, node, "cast")


@rule(*SHAPES)
def identity(e: Emitter, node: fx.Node) -> Tile:
    """Another shape of the same elements in the same order: no operation at all."""
    x = node.args[0]
    tile, before, fake = e.whole(x), tensor_of(x), tensor_of(node)
    if product(fake.shape) != product(before.shape):
        raise Unsupported("repeats rows or features")
    if tile.features == 1 and not _keeps_rows(before, fake):
        raise Unsupported("changes which elements make a row")
    return tile


def _keeps_rows(before: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether a view of a column has its rows for rows: it is a column, or what leaves out the dimension of size 1.

    A column in another shape could go on as one, but what comes next most likely works along the new last dimension.
    """
    if result.dim() and same_size(result.shape[-1], 1):
        return True
    if not before.dim() or not same_size(before.shape[-1], 1):
        return True
    dims = zip(before.shape, result.shape, strict=False)
    return before.dim() == result.dim() + 1 and all(same_size(a, b) for a, b in dims)


@rule(aten.permute, aten.transpose, aten.t)
def permute(e: Emitter, node: fx.Node) -> Tile:
    """A permutation that moves only dimensions of size 1 keeps the order of the elements: a view like any other."""
    before, dims = value(node.args[0]), permutation(node)
    if before is None or dims is None:
        raise Unsupported("an operand is not a tensor")
    wide = [d for d in dims if not same_size(before.shape[d], 1)]
    if wide != sorted(wide):
        raise Unsupported("permutes rows or features")
    return identity(e, node)


@elementwise(aten.elu, aten.celu)
def elu(e: Writes, node: fx.Node) -> Tile:
    """``elu``, ``selu``, ``celu``: scale max(x, 0) + alpha scale (exp(input_scale min(x, 0)) - 1)."""
    alpha, scale = number(node, 1, "alpha", 1.0), number(node, 2, "scale", 1.0)
    inner = number(node, 3, "input_scale", 1.0)
    if packet(node) is aten.celu:
        inner = 1.0 / alpha
    x = e.tile(node.args[0])
    low = _scaled(e, e.binary("minimum", x, 0.0, "f32"), inner)
    low = _scaled(e, e.unary("expm1", low, "f32"), alpha * scale)
    high = _scaled(e, e.binary("maximum", x, 0.0, "f32"), scale)
    return e.binary("add", high, low, dtype_of(node))


def _scaled(e: Writes, tile: Tile, factor: float) -> Tile:
    return tile if factor == 1.0 else e.binary("mul", tile, factor, "f32")


def only_first(node: fx.Node) -> None:
    """Raise unless of several results only the first is used."""
    if not first_alone(node):
        raise Unsupported("its statistics are used too")


@rule(aten._native_batch_norm_legit_no_training)
def batch_norm(e: Emitter, node: fx.Node) -> Tile:
    """BatchNorm with running statistics on ``[rows, features]``: vectors only."""
    x, scale, shift, mean, variance = node.args[:5]
    fake = value(x)
    if fake is None or fake.dim() != 2:
        raise Unsupported("its channels are not the last dimension")
    only_first(node)
    frame = e.natural(x)
    vector = ("vector", frame.features)
    rstd = e.parameter(variance, (vector, ("rstd", number(node, 6, "eps", 1e-5))), (frame.features,), "f32")
    dtype = DTYPES[node.meta["val"][0].dtype]
    tile = e.binary("sub", e.tile(x), e.vector(mean), "f32")
    tile = e.binary("mul", tile, rstd, "f32")
    for kind, other in (("mul", scale), ("add", shift)):
        if other is not None:
            tile = e.binary(kind, tile, e.vector(other), "f32")
    return e.unary("cast", tile, dtype)


@elementwise(*_PAIRS)
def binary(e: Writes, node: fx.Node, kind: str = "") -> Tile:
    """Two operands, one of them at least a tile; ``kind`` by the table if not given."""
    frame = e.frame(node, *node.args[:2])
    a, b = (e.operand(x, frame) for x in node.args[:2])
    return e.binary(kind or _PAIRS[packet(node)], a, b, dtype_of(node))


@elementwise(aten.add, aten.sub, aten.rsub)
def add(e: Writes, node: fx.Node) -> Tile:
    """``self + alpha other``, also ``sub`` and ``rsub`` (``other - alpha self``)."""
    left, right = node.args[:2] if packet(node) is not aten.rsub else node.args[1::-1]
    alpha = number(node, 2, "alpha", 1.0)
    frame = e.frame(node, left, right)
    a, b = e.operand(left, frame), e.operand(right, frame)
    if alpha != 1.0:
        if isinstance(b, str):
            raise Unsupported("alpha scales a parameter")
        b = _scaled(e, b, alpha) if isinstance(b, Tile) else b * alpha
    return e.binary("add" if packet(node) is aten.add else "sub", a, b, dtype_of(node))


@elementwise(aten.div)
def divide(e: Writes, node: fx.Node) -> Tile:
    if node.kwargs.get("rounding_mode") is not None:
        raise Unsupported("division with a rounding mode")
    return binary(e, node, "div")


@elementwise(aten.pow)
def power(e: Writes, node: fx.Node) -> Tile:
    exponent = node.args[1]
    kinds = {1: "cast", 2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    if isinstance(exponent, int | float) and exponent in kinds:
        return unary(e, node, kinds[exponent])
    if exponent == 3:
        x = e.tile(node.args[0])
        return e.binary("mul", e.unary("square", x, "f32"), x, dtype_of(node))
    raise Unsupported("only powers -1, -0.5, 0.5, 1, 2 and 3 are tile ops")


@elementwise(aten.clamp, aten.clamp_min, aten.clamp_max, aten.hardtanh)
def clamp(e: Writes, node: fx.Node) -> Tile:
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
            tile = e.binary(kind, tile, e.operand(bound, frame), dtype_of(node))
    return tile


@elementwise(aten.leaky_relu)
def leaky_relu(e: Writes, node: fx.Node) -> Tile:
    """max(x, 0) + slope min(x, 0); for slopes in (0, 1], max(x, slope x). Infinities go as in eager."""
    slope = number(node, 1, "negative_slope", 0.01)
    if not math.isfinite(slope):
        raise Unsupported("a negative_slope that is not finite")
    x = e.tile(node.args[0])
    if 0 < slope <= 1:
        return e.binary("maximum", x, e.binary("mul", x, slope, "f32"), dtype_of(node))
    low = e.binary("mul", e.binary("minimum", x, 0.0, "f32"), slope, "f32")
    return e.binary("add", e.binary("maximum", x, 0.0, "f32"), low, dtype_of(node))


@elementwise(aten.hardsigmoid, aten.hardswish)
def hard(e: Writes, node: fx.Node) -> Tile:
    """``hardsigmoid`` and ``hardswish``."""
    x = e.tile(node.args[0])
    gate: Tile = x
    for kind, scalar in (("add", 3.0), ("maximum", 0.0), ("minimum", 6.0)):
        gate = e.binary(kind, gate, scalar, "f32")
    if packet(node) is aten.hardswish:
        gate = e.binary("mul", gate, x, "f32")
    return e.binary("div", gate, 6.0, dtype_of(node))


@elementwise(aten.mish)
def mish(e: Writes, node: fx.Node) -> Tile:
    x = e.tile(node.args[0])
    gate = e.unary("tanh", e.unary("softplus", x, "f32", beta=1.0, threshold=20.0), "f32")
    return e.binary("mul", x, gate, dtype_of(node))


@elementwise(aten.addcmul)
def addcmul(e: Writes, node: fx.Node) -> Tile:
    base, left, right = node.args[:3]
    frame = e.frame(node, base, left, right)
    scale = number(node, 3, "value", 1.0)
    a, b, c = (e.operand(x, frame) for x in (left, right, base))
    both = e.binary("mul", a, b, "f32")
    return e.binary("add", _scaled(e, both, scale), c, dtype_of(node))


@elementwise(aten.sgn, aten.sign)
def sign(e: Writes, node: fx.Node) -> Tile:
    """1 where x > 0, -1 where x < 0, 0 elsewhere."""
    x = e.tile(node.args[0])
    above = e.binary("relu_backward", 1.0, x, "f32")
    return e.binary("sub", above, e.binary("relu_backward", 1.0, e.unary("neg", x, "f32"), "f32"), dtype_of(node))
