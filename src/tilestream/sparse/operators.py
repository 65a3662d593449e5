"""What each ATen operator is as an einsum program. A new operator is one function here.

A function takes the recorder and the operator's arguments: tensors as ``View`` (comparisons as ``Condition``),
everything else as Python numbers and lists, and gives a ``View``, a ``Condition`` or a list of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilestream.errors import SparseError
from tilestream.sparse.recorder import Condition, Recorder, View

Lowering = Callable[..., Any]
OPERATORS: dict[str, Lowering] = {}
"""By the operator's name without overload (``aten.add``)."""

_MINUS_INFINITY = -1e9
"""A mask's fill at or below this counts as minus infinity: its exponential is 0 beside any score."""


def operator(*names: str) -> Callable[[Lowering], Lowering]:
    def register(function: Lowering) -> Lowering:
        OPERATORS.update(dict.fromkeys((f"aten.{name}" for name in names), function))
        return function

    return register


def _pass(rec: Recorder, x: Any, *_: Any, **__: Any) -> Any:
    return x


OPERATORS["aten._assert_tensor_metadata"] = lambda *_, **__: None  # export's own check


for _name in "clone contiguous detach alias dropout native_dropout lift_fresh_copy _to_copy type_as lift_fresh".split():
    OPERATORS[f"aten.{_name}"] = _pass


@operator("to")
def _to(rec: Recorder, x: Any, *args: Any, **kwargs: Any) -> Any:
    if torch.bool in (*args, *kwargs.values()) and isinstance(x, View):
        return Condition(x, True)
    return x


def _unary(name: str) -> Lowering:
    return lambda rec, x, *_: rec.unary(name, x)


for _name in "relu exp log rsqrt sqrt neg abs sigmoid tanh silu sin cos square reciprocal".split():
    OPERATORS[f"aten.{_name}"] = OPERATORS[f"aten.{_name}_"] = _unary(_name)


@operator("gelu")
def _gelu(rec: Recorder, x: View, approximate: str = "none") -> View:
    return rec.unary("gelu_tanh" if approximate == "tanh" else "gelu", x)


@operator("leaky_relu")
def _leaky_relu(rec: Recorder, x: View, negative_slope: float = 0.01) -> View:
    return rec.binary("max", x, rec.unary("mul", x, "_scaled", negative_slope))


@operator("pow")
def _pow(rec: Recorder, x: View, exponent: float) -> View:
    names = {2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal", 1: "identity"}
    if isinstance(exponent, View) or exponent not in names:
        raise SparseError(f"pow with exponent {exponent}", f"use one of {', '.join(map(str, names))}")
    return rec.unary(names[exponent], x)


@operator("clamp", "clamp_min", "clamp_max", "hardtanh")
def _clamp(rec: Recorder, x: View, low: float | None = None, high: float | None = None) -> View:
    x = rec.unary("max", x, "_low", float(low)) if low is not None else x
    return rec.unary("min", x, "", float(high)) if high is not None else x


def _arithmetic(op: str, reversed_op: str) -> Lowering:
    def lower(rec: Recorder, x: Any, y: Any, alpha: float = 1, **_: Any) -> View:
        if alpha != 1:
            y = rec.unary("mul", y, "_alpha", float(alpha)) if isinstance(y, View) else y * alpha
        if isinstance(x, View) and isinstance(y, View):
            return rec.binary(op, x, y)
        return rec.unary(op, x, "", float(y)) if isinstance(x, View) else rec.unary(reversed_op, y, "", float(x))

    return lower


for _name, _back in (("add", "add"), ("sub", "rsub"), ("mul", "mul"), ("div", "rdiv")):
    OPERATORS[f"aten.{_name}"] = OPERATORS[f"aten.{_name}_"] = _arithmetic(_name, _back)
OPERATORS["aten.maximum"], OPERATORS["aten.minimum"] = _arithmetic("max", "max"), _arithmetic("min", "min")


@operator("rsub")
def _rsub(rec: Recorder, x: View, y: Any, alpha: float = 1) -> View:
    return OPERATORS["aten.sub"](rec, y, x) if alpha == 1 else OPERATORS["aten.sub"](rec, y, x, alpha)


# -- contractions -----------------------------------------------------------------------------------------------------


@operator("matmul", "mm", "bmm", "mv", "dot")
def _matmul(rec: Recorder, x: View, y: View, suffix: str = "") -> View:
    batch = "abcdefgh"[: max(len(x.shape), len(y.shape)) - 2] if max(len(x.shape), len(y.shape)) > 2 else ""
    left = [*batch[len(batch) - max(len(x.shape) - 2, 0) :], *(["i"] if len(x.shape) > 1 else []), "k"]
    right = [*batch[len(batch) - max(len(y.shape) - 2, 0) :], "k", *(["j"] if len(y.shape) > 1 else [])]
    result = [*batch, *(["i"] if len(x.shape) > 1 else []), *(["j"] if len(y.shape) > 1 else [])]
    return rec.contract([left, right], [x, y], result, suffix)


@operator("linear")
def _linear(rec: Recorder, x: View, weight: View, bias: View | None = None) -> View:
    batch = list("abcdefgh"[: len(x.shape) - 1]) if len(x.shape) > 2 else ["i"] * (len(x.shape) - 1)
    made = rec.contract([[*batch, "k"], ["j", "k"]], [x, weight], [*batch, "j"])
    return made if bias is None else _grouped(rec, "_bias", lambda: rec.binary("add", made, bias))


def _grouped(rec: Recorder, suffix: str, make: Callable[[], View]) -> View:
    """A part of an operator that is a region of its own when nothing is fused."""
    before = rec.at
    rec.at = before + suffix
    made = make()
    rec.at = before
    return made


@operator("addmm")
def _addmm(rec: Recorder, bias: View, x: View, y: View, beta: float = 1, alpha: float = 1) -> View:
    made = _matmul(rec, x, y)
    made = rec.unary("mul", made, "_alpha", float(alpha)) if alpha != 1 else made
    bias = rec.unary("mul", bias, "_beta", float(beta)) if beta != 1 else bias
    return _grouped(rec, "_bias", lambda: rec.binary("add", made, bias))


@operator("einsum")
def _einsum(rec: Recorder, equation: str, operands: Sequence[View], **_: Any) -> View:
    text = equation.replace(" ", "")
    left, arrow, result = text.partition("->")
    terms = left.split(",")
    if "." in text:
        raise SparseError(f"einsum {equation!r} with an ellipsis", "write all indices")
    if any(len(set(t)) != len(t) for t in terms):
        raise SparseError(f"einsum {equation!r} takes a diagonal", "take it before")
    if not arrow:
        joined = "".join(terms)
        result = "".join(sorted(c for c in set(joined) if joined.count(c) == 1))
    return rec.contract([list(t) for t in terms], operands, list(result))


@operator("scaled_dot_product_attention")
def _attention(
    rec: Recorder,
    q: View,
    k: View,
    v: View,
    mask: View | Condition | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
    **_: Any,
) -> View:
    if causal:
        raise SparseError("attention with is_causal", "pass the triangular mask as a sparse boolean tensor")
    scores = _grouped(rec, "_scores", lambda: _matmul(rec, q, _swap(k)))
    factor = scale if scale is not None else 1 / math.sqrt(q.shape[-1])
    scores = _grouped(rec, "_scale", lambda: rec.unary("mul", scores, "", factor))
    if isinstance(mask, Condition):
        scores = _grouped(rec, "_mask", lambda: _masked(rec, scores, mask, -math.inf))
    elif mask is not None:
        scores = _grouped(rec, "_mask", lambda: rec.binary("add", scores, mask))
    weights = _grouped(rec, "_softmax", lambda: _softmax(rec, scores, -1))
    return _matmul(rec, weights, v)


def _swap(x: View) -> View:
    return View(x.tensor, (*x.dims[:-2], x.dims[-1], x.dims[-2]), (*x.shape[:-2], x.shape[-1], x.shape[-2]))


# -- normalisations and reductions ------------------------------------------------------------------------------------


@operator("softmax", "_softmax", "_safe_softmax")
def _softmax(rec: Recorder, x: View, dim: int, *_: Any, **__: Any) -> View:
    largest = rec.reduce(x, [dim], True, "max", "_max")
    powers = rec.unary("exp", rec.binary("sub", x, largest, "_sub"), "_exp")
    return rec.binary("div", powers, rec.reduce(powers, [dim], True, "add", "_sum"))


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
    rec: Recorder, x: View, shape: Sequence[int], weight: View | None = None, eps: float | None = None
) -> View:
    dims, count = list(range(-len(shape), 0)), math.prod(shape)
    squares = rec.reduce(rec.unary("square", x, "_square"), dims, True, "add", "_squares")
    return _normalised(rec, x, squares, count, weight, None, torch.finfo(torch.float32).eps if eps is None else eps)


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


@operator("amax", "max")
def _amax(rec: Recorder, x: View, dim: Any = None, keepdim: bool = False) -> View:
    if isinstance(dim, View):
        return rec.binary("max", x, dim)
    return rec.reduce(x, _dims(x, dim), keepdim, "max")


@operator("amin")
def _amin(rec: Recorder, x: View, dim: Any = None, keepdim: bool = False) -> View:
    largest = rec.reduce(rec.unary("neg", x, "_neg"), _dims(x, dim), keepdim, "max", "_max")
    return rec.unary("neg", largest)


# -- masks ------------------------------------------------------------------------------------------------------------


def _compared(stored: bool) -> Lowering:
    def lower(rec: Recorder, x: View, other: Any) -> Condition:
        if isinstance(other, View) or other != 0:
            raise SparseError(f"a comparison with {other}", "compare a mask with 0")
        return Condition(x, stored)

    return lower


OPERATORS["aten.eq"], OPERATORS["aten.ne"] = _compared(False), _compared(True)


@operator("logical_not", "bitwise_not")
def _not(rec: Recorder, x: View | Condition) -> Condition:
    return Condition(x.view, not x.stored) if isinstance(x, Condition) else Condition(x, False)


def _masked(rec: Recorder, x: View, keep: Condition, fill: float) -> View:
    """``x`` where the mask stores something, ``fill`` elsewhere."""
    if not keep.stored:
        raise SparseError("a mask that keeps what it does not store", "store the mask of what is kept")
    if fill != 0 and fill > _MINUS_INFINITY:
        raise SparseError(f"a mask that fills with {fill:g}", "fill with 0 or minus infinity")
    rec.compress(keep.view.tensor)
    return rec.binary("mask", x, keep.view, "", fill=0.0 if fill == 0 else -math.inf)


@operator("masked_fill", "masked_fill_")
def _masked_fill(rec: Recorder, x: View, condition: View | Condition, fill: float) -> View:
    return _masked(rec, x, _not(rec, condition), float(fill))


@operator("where")
def _where(rec: Recorder, condition: View | Condition, x: Any, y: Any) -> View:
    condition = condition if isinstance(condition, Condition) else Condition(condition, True)
    if isinstance(x, View) and isinstance(y, (int, float)):
        return _masked(rec, x, condition, float(y))
    if isinstance(y, View) and isinstance(x, (int, float)):
        return _masked(rec, y, _not(rec, condition), float(x))
    raise SparseError("where of two tensors", "use a number on one side")


# -- shapes -----------------------------------------------------------------------------------------------------------


@operator("view", "reshape", "_unsafe_view", "flatten", "unsqueeze", "squeeze", "view_as", "unflatten")
def _reshape(rec: Recorder, x: View, *_: Any, shape: tuple[int, ...]) -> View:
    return rec.reshape(x, shape)


@operator("transpose", "swapaxes")
def _transpose(rec: Recorder, x: View, a: int, b: int) -> View:
    order = list(range(len(x.shape)))
    order[a], order[b] = order[b], order[a]
    return _permute(rec, x, order)


@operator("t", "numpy_T", "mT", "adjoint")
def _t(rec: Recorder, x: View) -> View:
    return _swap(x) if len(x.shape) > 1 else x


@operator("permute")
def _permute(rec: Recorder, x: View, order: Sequence[int]) -> View:
    return View(x.tensor, tuple(x.dims[d] for d in order), tuple(x.shape[d] for d in order))


@operator("expand", "expand_as", "broadcast_to")
def _expand(rec: Recorder, x: View, *_: Any, shape: tuple[int, ...], **__: Any) -> View:
    return View(x.tensor, (None,) * (len(shape) - len(x.shape)) + x.dims, shape)


@operator("slice", "narrow")
def _slice(
    rec: Recorder, x: View, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> View:
    first, last, step = slice(start, end, step).indices(x.shape[dim])
    return rec.slice(x, dim % len(x.shape), first, last, step)


@operator("select")
def _select(rec: Recorder, x: View, dim: int, index: int) -> View:
    dim, index = dim % len(x.shape), index % x.shape[dim]
    one = rec.slice(x, dim, index, index + 1)
    return rec.reshape(one, one.shape[:dim] + one.shape[dim + 1 :])


@operator("split", "split_with_sizes", "chunk")
def _split(rec: Recorder, x: View, sizes: Any, dim: int = 0, *, shape: list[tuple[int, ...]]) -> list[View]:
    dim, at, parts = dim % len(x.shape), 0, []
    for one in shape:
        parts.append(rec.slice(x, dim, at, at + one[dim]))
        at += one[dim]
    return parts


@operator("unbind")
def _unbind(rec: Recorder, x: View, dim: int = 0) -> list[View]:
    return [_select(rec, x, dim, n) for n in range(x.shape[dim])]


@operator("cat")
def _cat(rec: Recorder, parts: Sequence[View], dim: int = 0) -> View:
    return rec.cat(parts, dim % len(parts[0].shape))


@operator("stack")
def _stack(rec: Recorder, parts: Sequence[View], dim: int = 0) -> View:
    dim %= len(parts[0].shape) + 1
    return rec.cat([rec.reshape(p, (*p.shape[:dim], 1, *p.shape[dim:])) for p in parts], dim)
