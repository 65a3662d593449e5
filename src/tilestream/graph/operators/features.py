"""Operators along the features of a row: cat, slices, reductions, norms, softmax."""

from __future__ import annotations

import operator

import torch
from torch import fx

from tilestream.graph.lowering import Emitter, dtype_of
from tilestream.graph.nodes import Unsupported, argument, aten, integer, is_slice, last_dim, number, packet, tensor_of
from tilestream.graph.operators.elementwise import identity, only_first
from tilestream.graph.operators.linear import linear
from tilestream.graph.operators.rules import REDUCTIONS, rule
from tilestream.graph.rewrites.maxima import is_of_groups
from tilestream.graph.sizes import same_size
from tilestream.ir.dtypes import DTYPES
from tilestream.ir.pipeline import Tile
from tilestream.ir.tileops import GROUP


@rule(*REDUCTIONS)
def reduction(e: Emitter, node: fx.Node) -> Tile:
    """``sum``, ``mean``, ``amax``, ``amin`` over the features; ``amax`` over the rows that ``split_maxima`` groups."""
    x, kind = node.args[0], REDUCTIONS[packet(node)]
    if kind == "max" and is_of_groups(node):
        tile = e.tile(x, e.matrix(x))
        return e.emit("max_rows", tile.features // GROUP, dtype_of(node), (tile,))
    last_dim(node, x, argument(node, 1, "dim"))
    frame = e.matrix(x)
    tile, dtype = e.tile(x, frame), dtype_of(node)
    if kind == "min":
        return e.unary("neg", e.emit("max", 1, dtype, (e.unary("neg", tile, tile.dtype),)), dtype)
    return e.emit(kind, 1, dtype, (tile,))


@rule(aten.var)
def variance(e: Emitter, node: fx.Node) -> Tile:
    """``var`` with a correction: mean, difference, square, mean, as many operations in fp32."""
    x = node.args[0]
    last_dim(node, x, argument(node, 1, "dim"))
    frame = e.matrix(x)
    correction = node.kwargs.get("correction")
    unbiased = 1.0 if correction is None else correction
    if node.target is not aten.var.correction or not isinstance(unbiased, int | float) or frame.features <= unbiased:
        raise Unsupported("too few features for its correction")
    tile = e.tile(x, frame)
    centre = e.emit("mean", 1, "f32", (tile,))
    off = e.binary("sub", tile, centre, "f32")
    squares = e.emit("sum", 1, "f32", (e.unary("square", off, "f32"),))
    return e.binary("div", squares, float(frame.features - unbiased), dtype_of(node))


@rule(aten._softmax, aten._log_softmax)
def softmax(e: Emitter, node: fx.Node) -> Tile:
    x = node.args[0]
    last_dim(node, x, node.args[1])
    frame = e.matrix(x)
    tile = e.tile(x, frame)
    if packet(node) is aten._softmax:
        return e.emit("softmax", frame.features, dtype_of(node), (tile,))
    shifted = e.binary("sub", tile, e.emit("max", 1, "f32", (tile,)), "f32")
    total = e.emit("sum", 1, "f32", (e.unary("exp", shifted, "f32"),))
    return e.binary("sub", shifted, e.unary("log", total, "f32"), dtype_of(node))


@rule(aten.cat)
def cat(e: Emitter, node: fx.Node) -> Tile:
    parts = node.args[0]
    if not isinstance(parts, list | tuple):
        raise Unsupported("its operands are not a list")
    last_dim(node, node, argument(node, 1, "dim", 0))
    frame = e.frame(node)
    tiles = []
    for part in parts:
        own = e.matrix(part)
        if own.rows != frame.rows:
            raise Unsupported("joins different numbers of rows")
        tiles.append(e.tile(part, own))
    if len(tiles) > 64:
        raise Unsupported("more than 64 parts")
    dtype = dtype_of(node)
    cut = [t if t.dtype == dtype else e.unary("cast", t, dtype) for t in tiles]
    return e.emit("cat", frame.features, dtype, tuple(cut))


def part(e: Emitter, node: fx.Node, x: object, start: int, stop: int) -> Tile:
    """Features ``start`` to ``stop``: of a linear, by its weight's rows; of anything else, by a slice."""
    frame = e.matrix(x)
    if start >= stop:
        raise Unsupported("takes no features")
    own = e.values.get(x) if isinstance(x, fx.Node) else None
    if own is not None and own.tile.name in e.deferred:
        key = (own.tile.name, start, stop)
        if key not in e.parts:
            e.parts[key] = linear(e, e.deferred[own.tile.name], (start, stop))
        return e.parts[key]
    tile = e.tile(x, frame)
    if start == 0 and stop == frame.features:
        return tile
    key = (tile.name, start, stop)
    if key not in e.parts:
        e.parts[key] = e.emit("slice", stop - start, dtype_of(node), (tile,), start=start, stop=stop)
    return e.parts[key]


@rule(aten.slice)
def slice_(e: Emitter, node: fx.Node) -> Tile:
    x = node.args[0]
    fake, result = tensor_of(x), tensor_of(node)
    dim = integer(node, 1, "dim", 0)
    if not is_slice(node):
        if same_size(fake.shape[dim], result.shape[dim]):
            return identity(e, node)
        raise Unsupported("cuts rows")
    if number(node, 4, "step", 1) != 1:
        raise Unsupported("a slice with a step")
    bounds = [_bound(node, 2, "start"), _bound(node, 3, "end")]
    start, stop, _ = slice(*bounds).indices(e.matrix(x).features)
    return part(e, node, x, start, stop)


def _bound(node: fx.Node, position: int, key: str) -> int | None:
    """A bound of a slice, a number or none."""
    return None if argument(node, position, key) is None else integer(node, position, key)


@rule(aten.select)
def select(e: Emitter, node: fx.Node) -> Tile:
    x = node.args[0]
    last_dim(node, x, node.args[1])
    index = integer(node, 2, "index") % e.matrix(x).features
    return part(e, node, x, index, index + 1)


@rule(operator.getitem)
def getitem(e: Emitter, node: fx.Node) -> Tile:
    """The first of several results; parts of a split are slices by now."""
    producer, index = node.args[0], node.args[1]
    assert isinstance(producer, fx.Node)
    if index != 0 or packet(producer) in (aten.split, aten.split_with_sizes):
        raise Unsupported("only the first result is a tile")
    return e.first(producer)


# -- norms --------------------------------------------------------------------------------------


@rule(aten.native_layer_norm)
def layer_norm(e: Emitter, node: fx.Node) -> Tile:
    only_first(node)
    return _norm(e, node, "layer_norm", node.args[2:4])


@rule(aten._fused_rms_norm, aten.rms_norm)
def rms_norm(e: Emitter, node: fx.Node) -> Tile:
    if packet(node) is aten._fused_rms_norm:
        only_first(node)
    return _norm(e, node, "rms_norm", (argument(node, 2, "weight"),))


def _norm(e: Emitter, node: fx.Node, kind: str, affine: tuple[object, ...]) -> Tile:
    x, shape = node.args[0], node.args[1]
    frame = e.matrix(x)
    if not isinstance(shape, list | tuple) or list(shape) != [frame.features]:
        raise Unsupported("normalises more than the last dimension")
    # With no eps given, torch takes that of the type it accumulates in: float32 for all three dtypes.
    eps = number(node, 3 if kind == "rms_norm" else 4, "eps", torch.finfo(torch.float32).eps)
    tile = e.tile(x, frame)
    params = tuple(e.vector(p) for p in affine if p is not None)
    attrs: dict[str, float | int | str] = {"eps": eps}
    if kind == "layer_norm":
        attrs["affine"] = "".join(c for c, p in zip("wb", affine, strict=True) if p is not None)
    first = node.meta["val"]
    dtype = DTYPES[(first[0] if isinstance(first, list | tuple) else first).dtype]
    return e.emit(kind, frame.features, dtype, (tile,), params, **attrs)


@rule(aten.log_sigmoid_forward)
def log_sigmoid(e: Emitter, node: fx.Node) -> Tile:
    only_first(node)
    x = e.tile(node.args[0])
    soft = e.unary("softplus", e.unary("neg", x, x.dtype), "f32", beta=1.0, threshold=20.0)
    return e.unary("neg", soft, x.dtype)


@rule(aten.glu)
def glu(e: Emitter, node: fx.Node) -> Tile:
    x = node.args[0]
    last_dim(node, x, argument(node, 1, "dim", -1))
    half = e.matrix(x).features // 2
    gate = part(e, node, x, half, 2 * half)
    kept = part(e, node, x, 0, half)
    return e.binary("mul", kept, e.unary("sigmoid", gate, "f32"), dtype_of(node))
