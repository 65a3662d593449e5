"""Functions of mathematics made of those that a stream's arithmetic has."""

from __future__ import annotations

import math
from typing import Any

from tilestream.sparse.operators.registry import NoLowering, operator
from tilestream.sparse.recorder import Condition, Recorder, View


@operator("log2")
def _log2(rec: Recorder, x: View) -> View:
    return rec.unary("div", rec.unary("log", x, "_log"), "", math.log(2.0))


@operator("log10")
def _log10(rec: Recorder, x: View) -> View:
    return rec.unary("div", rec.unary("log", x, "_log"), "", math.log(10.0))


def _powers(rec: Recorder, x: View) -> tuple[View, View]:
    return rec.unary("exp", x, "_up"), rec.unary("exp", rec.unary("neg", x, "_minus"), "_down")


@operator("sinh")
def _sinh(rec: Recorder, x: View) -> View:
    return rec.unary("mul", rec.binary("sub", *_powers(rec, x), "_apart"), "", 0.5)


@operator("cosh")
def _cosh(rec: Recorder, x: View) -> View:
    return rec.unary("mul", rec.binary("add", *_powers(rec, x), "_both"), "", 0.5)


@operator("atanh")
def _atanh(rec: Recorder, x: View) -> View:
    """``log((1 + x) / (1 - x)) / 2``."""
    ratio = rec.binary("div", rec.unary("add", x, "_above", 1.0), rec.unary("rsub", x, "_below", 1.0), "_ratio")
    return rec.unary("mul", rec.unary("log", ratio, "_log"), "", 0.5)


@operator("atan2", "arctan2")
def _atan2(rec: Recorder, y: View, x: View) -> View:
    return rec.binary("atan2", y, x)


@operator("hypot")
def _hypot(rec: Recorder, x: View, y: View) -> View:
    total = rec.binary("add", rec.unary("square", x, "_first"), rec.unary("square", y, "_second"), "_sum")
    return rec.unary("sqrt", total)


@operator("round")
def _round(rec: Recorder, x: View, decimals: int = 0) -> View:
    """To the nearest, halves to even."""
    if decimals == 0:
        return rec.unary("round", x)
    scale = 10.0 ** abs(decimals)
    there, back = ("mul", "div") if decimals > 0 else ("div", "mul")
    return rec.unary(back, rec.unary("round", rec.unary(there, x, "_scaled", scale), "_rounded"), "", scale)


@operator("isfinite")
def _isfinite(rec: Recorder, x: View) -> Condition:
    """``x - x`` is 0 there, and not a number elsewhere."""
    return Condition(rec.unary("eq", rec.binary("sub", x, x, "_gone"), "", 0.0), True)


@operator("rrelu")
def _rrelu(rec: Recorder, x: View, lower: float = 0.125, upper: float = 1 / 3, training: bool = False, *_: Any) -> View:
    if training:
        raise NoLowering("rrelu in training", "use leaky_relu")
    return rec.binary("max", x, rec.unary("mul", x, "_scaled", (lower + upper) / 2))
