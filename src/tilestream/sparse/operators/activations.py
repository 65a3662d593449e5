"""Activations made of simpler operations, as PyTorch defines them."""

from __future__ import annotations

import math

from tilestream.errors import SparseError
from tilestream.sparse.operators.arithmetic import clamp
from tilestream.sparse.operators.registry import operator
from tilestream.sparse.recorder import Condition, Recorder, View


def _positive(rec: Recorder, x: View) -> View:
    return rec.unary("relu", x, "_positive")


def _exponential(rec: Recorder, x: View, alpha: float, inside: float) -> View:
    """``alpha (exp(inside min(x, 0)) - 1)``."""
    low = rec.unary("min", x, "_negative", 0.0)
    low = rec.unary("mul", low, "_inside", inside) if inside != 1 else low
    return rec.unary("mul", rec.unary("sub", rec.unary("exp", low, "_exp"), "_less", 1.0), "_scaled", alpha)


@operator("elu")
def _elu(rec: Recorder, x: View, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> View:
    low = _exponential(rec, x, alpha * scale, input_scale)
    high = _positive(rec, x)
    return rec.binary("add", rec.unary("mul", high, "_scale", float(scale)) if scale != 1 else high, low)


@operator("celu")
def _celu(rec: Recorder, x: View, alpha: float = 1.0) -> View:
    return rec.binary("add", _positive(rec, x), _exponential(rec, x, alpha, 1 / alpha))


@operator("selu")
def _selu(rec: Recorder, x: View) -> View:
    return _elu(rec, x, 1.6732632423543772, 1.0507009873554805)


@operator("softplus")
def softplus(rec: Recorder, x: View, beta: float = 1.0, threshold: float = 20.0) -> View:
    """``log(1 + exp(beta x)) / beta``, and ``x`` itself beyond the threshold."""
    scaled = rec.unary("mul", x, "_beta", float(beta)) if beta != 1 else x
    made = _log_one_plus_exp(rec, scaled)
    made = rec.unary("div", made, "_made", float(beta)) if beta != 1 else made
    above = rec.truth(Condition(rec.unary("gt", scaled, "_above", float(threshold)), True))
    below = rec.unary("eq", above, "_below", 0.0)
    return rec.binary("add", rec.binary("keep", x, above, "_linear"), rec.binary("keep", made, below, "_curved"))


def _log_one_plus_exp(rec: Recorder, x: View) -> View:
    """``max(x, 0) + log(1 + exp(-|x|))``, which overflows nowhere."""
    small = rec.unary("exp", rec.unary("neg", rec.unary("abs", x, "_size"), "_minus"), "_exp")
    return rec.binary("add", _positive(rec, x), rec.unary("log", rec.unary("add", small, "_plus", 1.0), "_log"), "_sum")


@operator("log_sigmoid")
def _log_sigmoid(rec: Recorder, x: View) -> View:
    return rec.unary("neg", _log_one_plus_exp(rec, rec.unary("neg", x, "_flipped")))


@operator("mish")
def _mish(rec: Recorder, x: View) -> View:
    return rec.binary("mul", x, rec.unary("tanh", _log_one_plus_exp(rec, x), "_tanh"))


@operator("hardsigmoid")
def hardsigmoid(rec: Recorder, x: View) -> View:
    """``clamp(x / 6 + 1 / 2, 0, 1)``."""
    return rec.unary("div", clamp(rec, rec.unary("add", x, "_moved", 3.0), 0.0, 6.0), "_sixth", 6.0)


@operator("hardswish")
def _hardswish(rec: Recorder, x: View) -> View:
    return rec.binary("mul", x, hardsigmoid(rec, x))


@operator("relu6")
def _relu6(rec: Recorder, x: View) -> View:
    return clamp(rec, x, 0.0, 6.0)


@operator("softsign")
def _softsign(rec: Recorder, x: View) -> View:
    return rec.binary("share", x, rec.unary("add", rec.unary("abs", x, "_size"), "_plus", 1.0))


@operator("prelu")
def _prelu(rec: Recorder, x: View, weight: View) -> View:
    if len(weight.shape) == 1 and weight.shape[0] > 1 and len(x.shape) > 2:
        after = len(x.shape) - 2
        weight = View(weight.tensor, (*weight.dims, *[None] * after), (*weight.shape, *[1] * after))
    low = rec.unary("min", x, "_negative", 0.0)
    return rec.binary("add", _positive(rec, x), rec.binary("mul", low, weight, "_scaled"))


@operator("threshold")
def _threshold(rec: Recorder, x: View, threshold: float, value: float) -> View:
    above = rec.unary("gt", x, "_above", float(threshold))
    kept = rec.binary("keep", x, above, "_kept")
    if value == 0:
        return kept
    return rec.binary("add", kept, rec.unary("pick", rec.unary("eq", above, "_below", 0.0), "_value", float(value)))


@operator("glu")
def _glu(rec: Recorder, x: View, dim: int = -1) -> View:
    dim %= len(x.shape)
    half = x.shape[dim] // 2
    if 2 * half != x.shape[dim]:
        raise SparseError(f"glu of {x.shape[dim]} along dimension {dim}", "give an even number")
    first, second = rec.slice(x, dim, 0, half), rec.slice(x, dim, half, 2 * half)
    return rec.binary("mul", first, rec.unary("sigmoid", second, "_gate"))


@operator("log1p")
def _log1p(rec: Recorder, x: View) -> View:
    return rec.unary("log", rec.unary("add", x, "_plus", 1.0))


@operator("expm1")
def _expm1(rec: Recorder, x: View) -> View:
    return rec.unary("sub", rec.unary("exp", x, "_exp"), "", 1.0)


@operator("exp2")
def _exp2(rec: Recorder, x: View) -> View:
    return rec.unary("exp", rec.unary("mul", x, "_scaled", math.log(2.0)))


@operator("sign", "sgn")
def _sign(rec: Recorder, x: View) -> View:
    return rec.binary("sub", rec.unary("gt", x, "_above", 0.0), rec.unary("lt", x, "_below", 0.0))
