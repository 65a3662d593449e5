"""The operations of ``alu``, ``reduce`` and ``spacc``, on float64 scalars and on [block, block] tiles.

All work on each element, but for ``matmul`` (a b), ``matmul_t`` (a b^T), ``rowsum``, ``rowmax`` and ``transpose``,
which mix the elements of a tile; of scalars, the first two are a product and the others change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import erf

Value = Any
"""A float or a float64 [block, block] tile."""


def _matmul(a: Value, b: Value) -> Value:
    return a @ b if np.ndim(a) else a * b


def _matmul_t(a: Value, b: Value) -> Value:
    return a @ b.T if np.ndim(a) else a * b


def _rows(fold: Callable[..., Value]) -> Callable[[Value, float], Value]:
    """Each row of a tile filled with its sum or maximum."""
    return lambda a, _: np.broadcast_to(fold(a, axis=1, keepdims=True), a.shape) if np.ndim(a) else a


def rounded(a: Value, bits: int) -> Value:
    """``a`` as the nearest float of that many significant bits, ties to even, by way of float32 as PyTorch does."""
    with np.errstate(over="ignore"):
        a = np.float32(a)
        if bits == 11:
            a = np.float16(a)
        elif bits == 8:
            word = np.asarray(a).view(np.uint32)
            even = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
            a = np.where(np.isnan(a), np.float32(math.nan), even.view(np.float32))
    return np.float64(a)


BINARY: dict[str, Callable[[Value, Value], Value]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "matmul": _matmul,
    "matmul_t": _matmul_t,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "gt": lambda a, b: np.where(a > b, 1.0, 0.0),
    "ge": lambda a, b: np.where(a >= b, 1.0, 0.0),
    "eq": lambda a, b: np.where(a == b, 1.0, 0.0),
    "ne": lambda a, b: np.where(a != b, 1.0, 0.0),
    "keep": lambda a, b: np.where(b != 0.0, a, 0.0),
    "shift": lambda a, b: np.where(a == -math.inf, a, a - b),
    "share": lambda a, b: np.where((a == 0.0) & (b == 0.0), 0.0, np.divide(a, b)),
    "pow": np.power,
    "mod": np.mod,
    "atan2": np.arctan2,
}

UNARY: dict[str, Callable[[Value, float], Value]] = {
    "relu": lambda a, _: np.maximum(a, 0.0),
    "exp": lambda a, _: np.exp(a),
    "log": lambda a, _: np.log(a),
    "rsqrt": lambda a, _: 1.0 / np.sqrt(a),
    "sqrt": lambda a, _: np.sqrt(a),
    "neg": lambda a, _: -a,
    "abs": lambda a, _: np.abs(a),
    "sigmoid": lambda a, _: 1.0 / (1.0 + np.exp(-a)),
    "tanh": lambda a, _: np.tanh(a),
    "gelu": lambda a, _: 0.5 * a * (1.0 + erf(a / math.sqrt(2.0))),
    "gelu_tanh": lambda a, _: 0.5 * a * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (a + 0.044715 * a * a * a))),
    "silu": lambda a, _: a / (1.0 + np.exp(-a)),
    "sin": lambda a, _: np.sin(a),
    "cos": lambda a, _: np.cos(a),
    "square": lambda a, _: a * a,
    "reciprocal": lambda a, _: np.divide(1.0, a),
    "floor": lambda a, _: np.floor(a),
    "ceil": lambda a, _: np.ceil(a),
    "trunc": lambda a, _: np.trunc(a),
    "round": lambda a, _: np.rint(a),
    "erf": lambda a, _: erf(a),
    "tan": lambda a, _: np.tan(a),
    "asin": lambda a, _: np.arcsin(a),
    "acos": lambda a, _: np.arccos(a),
    "atan": lambda a, _: np.arctan(a),
    "identity": lambda a, _: a,
    "zeroed": lambda a, _: np.where(a == -math.inf, 0.0, a),
    "add": lambda a, s: a + s,
    "sub": lambda a, s: a - s,
    "rsub": lambda a, s: s - a,
    "mul": lambda a, s: a * s,
    "div": lambda a, s: np.divide(a, s),
    "rdiv": lambda a, s: np.divide(s, a),
    "max": lambda a, s: np.maximum(a, s),
    "min": lambda a, s: np.minimum(a, s),
    "gt": lambda a, s: np.where(a > s, 1.0, 0.0),
    "ge": lambda a, s: np.where(a >= s, 1.0, 0.0),
    "lt": lambda a, s: np.where(a < s, 1.0, 0.0),
    "le": lambda a, s: np.where(a <= s, 1.0, 0.0),
    "eq": lambda a, s: np.where(a == s, 1.0, 0.0),
    "ne": lambda a, s: np.where(a != s, 1.0, 0.0),
    "pick": lambda a, s: np.where(a != 0.0, s, 0.0),
    "cast": lambda a, s: rounded(a, int(s)),
    "rowsum": _rows(np.sum),
    "rowmax": _rows(np.max),
    "transpose": lambda a, _: np.transpose(a),
}
"""On (value, the node's ``scalar``)."""


REDUCE: dict[str, tuple[Callable[[Value, Value], Value], float]] = {
    "add": (lambda a, b: a + b, 0.0),
    "max": (np.maximum, -math.inf),
}
"""How two values are folded, and what an empty fiber gives."""
