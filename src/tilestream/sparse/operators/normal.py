"""Reductions, and what is made of them: softmax and the norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tilestream.errors import SparseError
from tilestream.sparse.operators.arithmetic import number
from tilestream.sparse.operators.registry import OPERATORS, Lowering, NoLowering, operator
from tilestream.sparse.recorder import Recorder, View


@operator("softmax", "_softmax")
def softmax(rec: Recorder, x: View, dim: int, *_: Any, safe: bool = False, **__: Any) -> View:
    """``safe``: 0 where everything is minus infinity, as in attention; PyTorch's softmax is not a number there."""
    largest = rec.reduce(x, [dim], True, "max", "_max")
    powers = rec.unary("exp", rec.binary("shift" if safe else "sub", x, largest, "_sub"), "_exp")
    return rec.binary("share", powers, rec.reduce(powers, [dim], True, "add", "_sum"))


@operator("_safe_softmax")
def _safe_softmax(rec: Recorder, x: View, dim: int, *_: Any, **__: Any) -> View:
    return softmax(rec, x, dim, safe=True)


@operator("log_softmax", "_log_softmax")
def _log_softmax(rec: Recorder, x: View, dim: int, *_: Any, **__: Any) -> View:
    moved = rec.binary("sub", x, rec.reduce(x, [dim], True, "max", "_max"), "_sub")
    total = rec.reduce(rec.unary("exp", moved, "_exp"), [dim], True, "add", "_sum")
    return rec.binary("sub", moved, rec.unary("log", total, "_log"))


@operator("layer_norm")
def _layer_norm(
    rec: Recorder,
    x: View,
    shape: Sequence[int],
    weight: View | None = None,
    bias: View | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> View:
    dims, count = list(range(-len(shape), 0)), math.prod(shape)
    mean = rec.unary("div", rec.reduce(x, dims, True, "add", "_sum"), "_mean", float(count))
    centred = rec.binary("sub", x, mean, "_centred")
    squares = rec.reduce(rec.unary("square", centred, "_square"), dims, True, "add", "_squares")
    return _normalised(rec, centred, squares, count, weight, bias, eps)


@operator("rms_norm")
def _rms_norm(
    rec: Recorder,
    x: View,
    shape: Sequence[int],
    weight: View | None = None,
    eps: float | None = None,
    *,
    given: torch.dtype,
) -> View:
    dims, count = list(range(-len(shape), 0)), math.prod(shape)
    squares = rec.reduce(rec.unary("square", x, "_square"), dims, True, "add", "_squares")
    return _normalised(rec, x, squares, count, weight, None, torch.finfo(given).eps if eps is None else eps)


def _normalised(
    rec: Recorder, x: View, squares: View, count: int, weight: View | None, bias: View | None, eps: float
) -> View:
    variance = rec.unary("add", rec.unary("div", squares, "_variance", float(count)), "_eps", float(eps))
    made = rec.binary("mul", x, rec.unary("rsqrt", variance, "_rsqrt"), "_norm")
    made = rec.binary("mul", made, weight, "_weight") if weight is not None else made
    return rec.binary("add", made, bias, "_bias") if bias is not None else made


def _dims(x: View, dims: Any) -> list[int]:
    if dims is None or dims == []:
        return list(range(len(x.shape)))
    return [dims] if isinstance(dims, int) else list(dims)


@operator("sum")
def _sum(rec: Recorder, x: View, dim: Any = None, keepdim: bool = False, **_: Any) -> View:
    return rec.reduce(x, _dims(x, dim), keepdim)


@operator("mean")
def _mean(rec: Recorder, x: View, dim: Any = None, keepdim: bool = False, **_: Any) -> View:
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    return rec.unary("div", rec.reduce(x, dims, keepdim, "add", "_sum"), "", float(count))


@operator("amax")
def _amax(rec: Recorder, x: View, dim: Any = None, keepdim: bool = False) -> View:
    return rec.reduce(x, _dims(x, dim), keepdim, "max")


def _extreme(op: str, fold: Lowering, find: Any) -> Lowering:
    """Of all elements, of two tensors, or along a dimension: then where it is as well."""

    def lower(rec: Recorder, x: View, dim: Any = None, keepdim: bool = False) -> View | list[View]:
        if isinstance(dim, View):
            return rec.binary(op, x, dim)
        made = fold(rec, x, dim, keepdim)
        return made if dim is None else [made, _places(rec, x, find, dim, keepdim, made.shape)]

    return lower


def _places(rec: Recorder, x: View, find: Any, dim: int, keepdim: bool, shape: tuple[int, ...]) -> View:
    """Where the largest or smallest are; left out where nothing reads it."""
    return rec.eager(f"aten.{find.__name__}", [(x, torch.float64)], shape, lambda one: find(one, dim, keepdim))


@operator("prod")
def _prod(rec: Recorder, x: View, dim: int | None = None, keepdim: bool = False, **_: Any) -> View:
    """Halves multiplied until one is left: nothing that accumulates knows products."""
    if not x.shape:
        return x
    if dim is None:
        x, dim = rec.reshape(x, (math.prod(x.shape),)), 0
    shape, dim, at = x.shape, dim % len(x.shape), rec.at
    if not shape[dim]:
        raise NoLowering("a product of nothing", "leave it out")
    while (size := x.shape[dim]) > 1:
        rec.at = f"{at}_{size}"  # moves lie between the steps: a region each
        half = size // 2
        made = rec.binary("mul", rec.slice(x, dim, 0, half), rec.slice(x, dim, half, 2 * half))
        x = made if size % 2 == 0 else rec.cat([made, rec.slice(x, dim, size - 1, size)], dim)
    rec.at = at
    return x if keepdim else rec.reshape(x, (*shape[:dim], *shape[dim + 1 :]))


@operator("amin")
def _amin(rec: Recorder, x: View, dim: Any = None, keepdim: bool = False) -> View:
    largest = rec.reduce(rec.unary("neg", x, "_neg"), _dims(x, dim), keepdim, "max", "_max")
    return rec.unary("neg", largest)


OPERATORS["max"] = _extreme("max", _amax, torch.argmax)
OPERATORS["min"] = _extreme("min", _amin, torch.argmin)


def _statistics(rec: Recorder, x: View) -> tuple[View, View]:
    """Mean and variance of each channel over a batch, [channels]."""
    dims = [d for d in range(len(x.shape)) if d != 1]
    count = float(math.prod(x.shape[d] for d in dims))
    mean = rec.unary("div", rec.reduce(x, dims, True, "add", "_total"), "_mean", count)
    squares = rec.unary("square", rec.binary("sub", x, mean, "_apart"), "_square")
    variance = rec.unary("div", rec.reduce(squares, dims, False, "add", "_squares"), "_variance", count)
    return rec.reshape(mean, (x.shape[1],)), variance


@operator("batch_norm")
def _batch_norm(
    rec: Recorder,
    x: View,
    weight: View | None,
    bias: View | None,
    mean: View | None,
    variance: View | None,
    training: bool,
    momentum: float,
    eps: float,
    *_: Any,
) -> View:
    if training and mean is not None:
        raise SparseError("batch_norm in train mode, which changes its statistics", "call .eval() on the module first")
    if mean is None or variance is None:
        mean, variance = _statistics(rec, x)
    after = len(x.shape) - 2

    def spread(one: View) -> View:
        return View(one.tensor, (*one.dims, *[None] * after), (*one.shape, *[1] * after))

    scale = rec.unary("rsqrt", rec.unary("add", variance, "_eps", float(eps)), "_rsqrt")
    made = rec.binary("mul", rec.binary("sub", x, spread(mean), "_centred"), spread(scale), "_norm")
    made = rec.binary("mul", made, spread(weight), "_weight") if weight is not None else made
    return rec.binary("add", made, spread(bias), "_bias") if bias is not None else made


@operator("instance_norm")
def _instance_norm(
    rec: Recorder,
    x: View,
    weight: View | None,
    bias: View | None,
    mean: View | None,
    variance: View | None,
    of_input: bool,
    momentum: float,
    eps: float,
    *_: Any,
) -> View:
    if not of_input:
        return _batch_norm(rec, x, weight, bias, mean, variance, False, momentum, eps)
    return _group_norm(rec, x, x.shape[1], weight, bias, eps)


@operator("group_norm")
def _group_norm(
    rec: Recorder,
    x: View,
    groups: int,
    weight: View | None = None,
    bias: View | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> View:
    rows = rec.reshape(x, (x.shape[0], groups, math.prod(x.shape[1:]) // groups))
    made = rec.reshape(_layer_norm(rec, rows, rows.shape[-1:], None, None, eps), x.shape)
    after = len(x.shape) - 2
    for op, one in (("mul", weight), ("add", bias)):
        if one is not None:
            spread = View(one.tensor, (*one.dims, *[None] * after), (*one.shape, *[1] * after))
            made = rec.binary(op, made, spread, f"_{op}")
    return made


@operator("linalg_vector_norm", "norm")
def _norm(rec: Recorder, x: View, order: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> View:
    dims, order = _dims(x, dim), 2 if order is None else float(order)
    if order == 2:
        return rec.unary("sqrt", rec.reduce(rec.unary("square", x, "_square"), dims, keepdim, "add", "_sum"))
    size = rec.unary("abs", x, "_abs")
    if order == 1:
        return rec.reduce(size, dims, keepdim)
    if order == math.inf:
        return rec.reduce(size, dims, keepdim, "max")
    if order == 0:
        return rec.reduce(rec.unary("ne", x, "_some", 0.0), dims, keepdim)
    if order == -math.inf:
        return _amin(rec, size, dims, keepdim)
    powers = rec.binary("pow", size, number(rec, order), "_power")
    return rec.binary("pow", rec.reduce(powers, dims, keepdim, "add", "_sum"), number(rec, 1 / order))


@operator("var")
def variance(rec: Recorder, x: View, dim: Any = None, correction: Any = 1, keepdim: bool = False, **_: Any) -> View:
    """The mean square distance from the mean, over ``n - correction``."""
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    correction = int(correction) if correction is not None else 1
    mean = rec.unary("div", rec.reduce(x, dims, True, "add", "_sum"), "_mean", float(count))
    squares = rec.unary("square", rec.binary("sub", x, mean, "_centred"), "_square")
    total = rec.reduce(squares, dims, keepdim, "add", "_squares")
    if count == correction:
        raise SparseError("the variance of one value", "use correction=0")
    return rec.unary("div", total, "", float(count - correction))


@operator("std")
def _std(rec: Recorder, x: View, dim: Any = None, correction: Any = 1, keepdim: bool = False, **_: Any) -> View:
    return rec.unary("sqrt", variance(rec, x, dim, correction, keepdim))


@operator("logsumexp")
def _logsumexp(rec: Recorder, x: View, dim: Any, keepdim: bool = False) -> View:
    dims = _dims(x, dim)
    largest = rec.unary("zeroed", rec.reduce(x, dims, True, "max", "_max"), "_some")
    finite = rec.unary("lt", rec.unary("abs", largest, "_size"), "_finite", math.inf)
    largest = rec.binary("keep", largest, finite, "_largest")  # what is infinite stays so: nothing is taken off
    total = rec.reduce(rec.unary("exp", rec.binary("sub", x, largest, "_sub"), "_exp"), dims, True, "add", "_sum")
    made = rec.binary("add", rec.unary("log", total, "_log"), largest)
    if keepdim:
        return made
    return rec.reshape(made, tuple(s for d, s in enumerate(made.shape) if d not in {x % len(made.shape) for x in dims}))
