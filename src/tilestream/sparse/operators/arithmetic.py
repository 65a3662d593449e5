"""Arithmetic on every element."""

from __future__ import annotations

from typing import Any

import torch

from tilestream.errors import SparseError
from tilestream.sparse.operators.gathers import carried, scaled
from tilestream.sparse.operators.registry import OPERATORS, Lowering, operator
from tilestream.sparse.recorder import Recorder, View


def _pass(rec: Recorder, x: Any, *_: Any, **__: Any) -> Any:
    return x


# What a cast means is said by the result's dtype (``dtypes.settled``).
for _name in "clone contiguous detach alias lift_fresh_copy type_as lift_fresh to _to_copy".split():
    OPERATORS[_name] = _pass


@operator("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
def _dropout(rec: Recorder, x: Any, rate: float, train: bool, *_: Any) -> Any:
    if train and rate > 0:
        raise SparseError(f"dropout of {rate:g} in train mode draws random numbers", "call .eval() on the module first")
    return x


def _unary(name: str) -> Lowering:
    return lambda rec, x, *_: rec.unary(name, x)


for _name in (
    "relu exp log rsqrt sqrt neg abs sigmoid tanh silu sin cos square reciprocal "
    "floor ceil trunc erf tan asin acos atan"
).split():
    OPERATORS[_name] = _unary(_name)


@operator("gelu")
def _gelu(rec: Recorder, x: View, approximate: str = "none") -> View:
    return rec.unary("gelu_tanh" if approximate == "tanh" else "gelu", x)


@operator("leaky_relu")
def _leaky_relu(rec: Recorder, x: View, negative_slope: float = 0.01) -> View:
    part = "max" if negative_slope <= 1 else "min"
    return rec.binary(part, x, rec.unary("mul", x, "_scaled", negative_slope))


@operator("pow")
def _pow(rec: Recorder, x: View, exponent: Any) -> View:
    names = {2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal", 1: "identity"}
    if isinstance(x, View) and not isinstance(exponent, View):
        if exponent in names:
            return rec.unary(names[exponent], x)
        if float(exponent).is_integer() and 0 < abs(exponent) <= 16:
            made = rec.unary("identity", x, "_first")
            for _ in range(abs(int(exponent)) - 1):
                made = rec.binary("mul", made, x, "_times")
            return made if exponent > 0 else rec.unary("reciprocal", made)
    x, exponent = (one if isinstance(one, View) else number(rec, one) for one in (x, exponent))
    return rec.binary("pow", x, exponent)


@operator("clamp", "clamp_min", "hardtanh", "clip")
def clamp(rec: Recorder, x: View, low: Any = None, high: Any = None) -> View:
    """``min(max(x, low), high)``; each bound a number, a tensor, or none."""
    if low is not None:
        x = rec.binary("max", x, low, "_low") if isinstance(low, View) else rec.unary("max", x, "_low", float(low))
    if high is not None:
        x = rec.binary("min", x, high, "") if isinstance(high, View) else rec.unary("min", x, "", float(high))
    return x


@operator("clamp_max")
def _clamp_max(rec: Recorder, x: View, high: Any) -> View:
    return clamp(rec, x, None, high)


def number(rec: Recorder, value: float) -> View:
    """A number as a tensor without dimensions."""
    return rec.known(torch.tensor(float(value), dtype=torch.float64), "_number")


@operator("remainder")
def remainder(rec: Recorder, x: Any, y: Any, suffix: str = "") -> View:
    """What a quotient that is rounded down leaves, of the divisor's sign."""
    x, y = (one if isinstance(one, View) else number(rec, one) for one in (x, y))
    return rec.binary("mod", x, y, suffix)


@operator("fmod")
def fmod(rec: Recorder, x: Any, y: Any, suffix: str = "") -> View:
    """What a quotient that is rounded towards 0 leaves, of the dividend's sign."""
    x, y = (one if isinstance(one, View) else number(rec, one) for one in (x, y))
    size = rec.binary("mod", rec.unary("abs", x, "_size"), rec.unary("abs", y, "_by"), "_left")
    below = rec.unary("lt", x, "_below", 0.0)
    sign = rec.unary("rsub", rec.unary("mul", below, "_twice", 2.0), "_sign", 1.0)
    return rec.binary("mul", size, sign, suffix)


def _rounded(rec: Recorder, x: Any, y: Any, mode: str) -> View:
    """A quotient without what it leaves: the division of the rest is whole up to rounding, which then is harmless."""
    x, y = (one if isinstance(one, View) else number(rec, one) for one in (x, y))
    left = (remainder if mode == "floor" else fmod)(rec, x, y, "_rest")
    return rec.unary("round", rec.binary("div", rec.binary("sub", x, left, "_whole"), y, "_quotient"))


def _arithmetic(op: str, reversed_op: str) -> Lowering:
    def lower(rec: Recorder, x: Any, y: Any, alpha: float = 1, rounding_mode: str | None = None) -> View:
        if rounding_mode is not None:
            return _rounded(rec, x, y, rounding_mode)
        if alpha != 1:
            y = rec.unary("mul", y, "_alpha", float(alpha)) if isinstance(y, View) else y * alpha
        if isinstance(x, View) and isinstance(y, View):
            made = rec.divide(x, y) if op == "div" else rec.binary(op, x, y)
            return carried(rec, op, x, y, made)
        if isinstance(x, View):
            made = rec.unary(op, x, "", float(y))
            return scaled(rec, op, x, float(y), made)
        made = rec.unary(reversed_op, y, "", float(x))
        return scaled(rec, op, y, float(x), made) if op == "mul" else made

    return lower


for _name, _back in (("add", "add"), ("sub", "rsub"), ("mul", "mul"), ("div", "rdiv")):
    OPERATORS[_name] = _arithmetic(_name, _back)
OPERATORS["maximum"], OPERATORS["minimum"] = _arithmetic("max", "max"), _arithmetic("min", "min")


@operator("rsub")
def _rsub(rec: Recorder, x: View, y: Any, alpha: float = 1) -> View:
    return OPERATORS["sub"](rec, y, x) if alpha == 1 else OPERATORS["sub"](rec, y, x, alpha)


@operator("lerp")
def _lerp(rec: Recorder, x: View, y: View, weight: Any) -> View:
    way = rec.binary("sub", y, x, "_way")
    if isinstance(weight, View):
        return rec.binary("add", x, rec.binary("mul", way, weight, "_part"))
    return rec.binary("add", x, rec.unary("mul", way, "_part", float(weight)))


def _third(op: str) -> Lowering:
    def lower(rec: Recorder, x: View, y: View, z: View, value: float = 1) -> View:
        part = rec.divide(y, z, "_part") if op == "div" else rec.binary(op, y, z, "_part")
        return rec.binary("add", x, part if value == 1 else rec.unary("mul", part, "_value", float(value)))

    return lower


OPERATORS["addcmul"], OPERATORS["addcdiv"] = _third("mul"), _third("div")
