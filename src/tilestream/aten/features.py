"""Operators along the features of a row: cat, slices, reductions, norms, softmax."""

from __future__ import annotations

import operator

import torch
from torch import fx

from tilestream.aten.elementwise import identity
from tilestream.aten.linear import linear
from tilestream.aten.nodes import argument, integer, is_slice, last_dim, number, packet
from tilestream.capture import same_size, value
from tilestream.dtypes import DTYPES
from tilestream.emitter import Emitter, Unsupported, Value, dtype_of

aten = torch.ops.aten


def reduction(e: Emitter, node: fx.Node, kind: str) -> Value:
    """``sum``, ``mean``, ``amax``, ``amin`` over the features."""
    x = node.args[0]
    last_dim(node, x, argument(node, 1, "dim"))
    frame = e.natural(x)
    if frame.dropped:
        raise Unsupported("works along rows")
    tile, dtype = e.tile(x), dtype_of(node)
    if kind == "min":
        negative = e.emit("neg", frame.features, tile.dtype, (tile,))
        out = e.emit("neg", 1, dtype, (e.emit("max", 1, dtype, (negative,)),))
    else:
        out = e.emit(kind, 1, dtype, (tile,))
    return Value(out, frame.rows, dropped=not argument(node, 2, "keepdim", False))


def variance(e: Emitter, node: fx.Node) -> Value:
    """``var`` with a correction: mean, difference, square, mean, as many operations in fp32."""
    x = node.args[0]
    last_dim(node, x, argument(node, 1, "dim"))
    frame = e.natural(x)
    correction = node.kwargs.get("correction")
    unbiased = 1.0 if correction is None else correction
    if frame.dropped or not isinstance(unbiased, int | float) or frame.features <= unbiased:
        raise Unsupported("works along rows, or on too few features")
    tile = e.tile(x)
    centre = e.emit("mean", 1, "f32", (tile,))
    off = e.binary("sub", tile, centre, frame.features, "f32")
    squares = e.emit("sum", 1, "f32", (e.emit("square", frame.features, "f32", (off,)),))
    out = e.binary("div", squares, float(frame.features - unbiased), 1, dtype_of(node))
    return Value(out, frame.rows, dropped=not node.kwargs.get("keepdim", False))


def softmax(e: Emitter, node: fx.Node) -> Value:
    x = node.args[0]
    last_dim(node, x, node.args[1])
    frame = e.natural(x)
    if frame.dropped:
        raise Unsupported("works along rows")
    tile = e.tile(x)
    if packet(node) is aten._softmax:
        return Value(e.emit("softmax", frame.features, dtype_of(node), (tile,)), frame.rows)
    shifted = e.binary("sub", tile, e.emit("max", 1, "f32", (tile,)), frame.features, "f32")
    total = e.emit("sum", 1, "f32", (e.emit("exp", frame.features, "f32", (shifted,)),))
    out = e.binary("sub", shifted, e.emit("log", 1, "f32", (total,)), frame.features, dtype_of(node))
    return Value(out, frame.rows)


def cat(e: Emitter, node: fx.Node) -> Value:
    parts = node.args[0]
    if not isinstance(parts, list | tuple):
        raise Unsupported("its operands are not a list")
    last_dim(node, node, argument(node, 1, "dim", 0))
    frame = e.frame(node)
    tiles = []
    for part in parts:
        own = e.natural(part)
        if own.rows != frame.rows or own.dropped:
            raise Unsupported("joins different numbers of rows")
        tiles.append(e.tile(part))
    if len(tiles) > 64:
        raise Unsupported("more than 64 parts")
    dtype = dtype_of(node)
    cut = [t if t.dtype == dtype else e.emit("cast", t.features, dtype, (t,)) for t in tiles]
    return Value(e.emit("cat", frame.features, dtype, tuple(cut)), frame.rows)


def part(e: Emitter, node: fx.Node, x: object, start: int, stop: int, dropped: bool = False) -> Value:
    """Features ``start`` to ``stop``: of a linear, by its weight's rows; of anything else, by a slice."""
    frame = e.natural(x)
    if frame.dropped:
        raise Unsupported("cuts rows")
    if start >= stop:
        raise Unsupported("takes no features")
    own = e.values.get(x) if isinstance(x, fx.Node) else None
    if own is not None and own.tile.name in e.deferred:
        key = (own.tile.name, start, stop)
        if key not in e.parts:
            e.parts[key] = linear(e, e.deferred[own.tile.name], (start, stop)).tile
        return Value(e.parts[key], frame.rows, dropped)
    tile = e.tile(x)
    if start == 0 and stop == frame.features:
        return Value(tile, frame.rows, dropped)
    key = (tile.name, start, stop)
    if key not in e.parts:
        e.parts[key] = e.emit("slice", stop - start, dtype_of(node), (tile,), start=start, stop=stop)
    return Value(e.parts[key], frame.rows, dropped)


def slice_(e: Emitter, node: fx.Node) -> Value:
    x = node.args[0]
    fake, result = value(x) if isinstance(x, fx.Node) else None, value(node)
    assert fake is not None and result is not None
    dim = integer(node, 1, "dim", 0)
    if not is_slice(node):
        if same_size(fake.shape[dim], result.shape[dim]):
            return identity(e, node)
        raise Unsupported("cuts rows")
    if number(node, 4, "step", 1) != 1:
        raise Unsupported("a slice with a step")
    size = e.natural(x).features
    start, stop, _ = slice(argument(node, 2, "start"), argument(node, 3, "end")).indices(size)
    return part(e, node, x, start, stop)


def select(e: Emitter, node: fx.Node) -> Value:
    x = node.args[0]
    last_dim(node, x, node.args[1])
    size = e.natural(x).features
    index = integer(node, 2, "index") % size
    return part(e, node, x, index, index + 1, dropped=True)


def getitem(e: Emitter, node: fx.Node) -> Value:
    """The first of several results; parts of a split are slices by now."""
    producer, index = node.args[0], node.args[1]
    assert isinstance(producer, fx.Node)
    if index != 0 or packet(producer) in (aten.split, aten.split_with_sizes):
        raise Unsupported("only the first result is a tile")
    return e.first(producer)


# -- norms --------------------------------------------------------------------------------------


def _only_first(node: fx.Node) -> None:
    if any(u.target is not operator.getitem or u.args[1] != 0 for u in node.users):
        raise Unsupported("its statistics are used too")


def layer_norm(e: Emitter, node: fx.Node) -> Value:
    _only_first(node)
    return _norm(e, node, "layer_norm", node.args[2:4])


def rms_norm(e: Emitter, node: fx.Node) -> Value:
    if packet(node) is aten._fused_rms_norm:
        _only_first(node)
    return _norm(e, node, "rms_norm", (argument(node, 2, "weight"),))


def _norm(e: Emitter, node: fx.Node, kind: str, affine: tuple[object, ...]) -> Value:
    x, shape = node.args[0], node.args[1]
    frame = e.natural(x)
    if frame.dropped or not isinstance(shape, list | tuple) or list(shape) != [frame.features]:
        raise Unsupported("normalises more than the last dimension")
    # With no eps given, torch takes that of the type it accumulates in: float32 for all three dtypes.
    eps = number(node, 3 if kind == "rms_norm" else 4, "eps", torch.finfo(torch.float32).eps)
    tile = e.tile(x)
    params = tuple(e.vector(p) for p in affine if p is not None)
    attrs: dict[str, float | int | str] = {"eps": eps}
    if kind == "layer_norm":
        attrs["affine"] = "".join(c for c, p in zip("wb", affine, strict=True) if p is not None)
    first = node.meta["val"]
    dtype = DTYPES[(first[0] if isinstance(first, list | tuple) else first).dtype]
    return Value(e.emit(kind, frame.features, dtype, (tile,), params, **attrs), frame.rows)


def log_sigmoid(e: Emitter, node: fx.Node) -> Value:
    _only_first(node)
    frame = e.natural(node.args[0])
    x = e.tile(node.args[0])
    minus = e.emit("neg", frame.features, x.dtype, (x,))
    soft = e.emit("softplus", frame.features, "f32", (minus,), beta=1.0, threshold=20.0)
    return Value(e.emit("neg", frame.features, x.dtype, (soft,)), frame.rows, frame.dropped)


def glu(e: Emitter, node: fx.Node) -> Value:
    x = node.args[0]
    last_dim(node, x, argument(node, 1, "dim", -1))
    half = e.natural(x).features // 2
    gate = part(e, node, x, half, 2 * half)
    kept = part(e, node, x, 0, half)
    open_ = e.emit("sigmoid", half, "f32", (gate.tile,))
    return Value(e.binary("mul", kept.tile, open_, half, dtype_of(node)), kept.rows)
