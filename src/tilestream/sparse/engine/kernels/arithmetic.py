"""The operations of alu, reduce and spacc on float64 at addresses: ``sparse.spec.arithmetic``, compiled."""

from __future__ import annotations

import math

import numpy as np

from tilestream.sparse.engine.cells import copy_cells, ldf, stf
from tilestream.sparse.engine.jit import kernel

BINARY_OPS: tuple[str, ...] = tuple(
    "add sub mul div max min gt ge eq ne keep shift share pow mod atan2 matmul matmul_t".split()
)
UNARY_OPS: tuple[str, ...] = tuple(
    "relu exp log rsqrt sqrt neg abs sigmoid tanh gelu gelu_tanh silu sin cos square reciprocal identity "
    "zeroed add sub rsub mul div rdiv max min gt ge lt le eq ne pick cast "
    "floor ceil trunc round erf tan asin acos atan rowsum rowmax transpose".split()
)
FOLD_OPS: tuple[str, ...] = ("add", "max")

_MATMUL, _MATMUL_T = BINARY_OPS.index("matmul"), BINARY_OPS.index("matmul_t")
_ROWSUM, _ROWMAX, _TRANSPOSE = (UNARY_OPS.index(op) for op in ("rowsum", "rowmax", "transpose"))

_HALF_ROOT = 1.0 / math.sqrt(2.0)
_GELU = math.sqrt(2.0 / math.pi)


@kernel
def _larger(a: float, b: float) -> float:
    """The larger; not-a-number if either is."""
    return a if a > b or a != a else b


@kernel
def _smaller(a: float, b: float) -> float:
    return a if a < b or a != a else b


@kernel
def scalar_binary(op: int, a: float, b: float) -> float:
    """``a op b``."""
    if op == 0:
        return a + b
    if op == 1:
        return a - b
    if op == 3:
        return a / b
    if op == 4:
        return _larger(a, b)
    if op == 5:
        return _smaller(a, b)
    if op == 6:
        return 1.0 if a > b else 0.0
    if op == 7:
        return 1.0 if a >= b else 0.0
    if op == 8:
        return 1.0 if a == b else 0.0
    if op == 9:
        return 1.0 if a != b else 0.0
    if op == 10:
        return a if b != 0.0 else 0.0
    if op == 11:
        return a if a == -math.inf else a - b
    if op == 12:
        return a / b if a != 0.0 or b != 0.0 else 0.0
    if op == 13:
        return a**b
    if op == 14:
        return np.mod(a, b)
    if op == 15:
        return math.atan2(a, b)
    return a * b


@kernel
def binary(op: int, a: int, b: int, result: int, edge: int) -> None:
    """``result = a op b``, on blocks of ``edge``."""
    if edge == 1:
        stf(result, 0, scalar_binary(op, ldf(a, 0), ldf(b, 0)))
    elif op == _MATMUL:
        _matmul(a, b, result, edge)
    elif op == _MATMUL_T:
        for row in range(edge):
            for column in range(edge):
                total = 0.0
                for k in range(edge):
                    total += ldf(a, row * edge + k) * ldf(b, column * edge + k)
                stf(result, row * edge + column, total)
    else:
        for i in range(edge * edge):
            stf(result, i, scalar_binary(op, ldf(a, i), ldf(b, i)))


@kernel
def _matmul(a: int, b: int, result: int, edge: int) -> None:
    for row in range(edge):
        target = result + 8 * row * edge
        for column in range(edge):
            stf(target, column, 0.0)
        for k in range(edge):
            left = ldf(a, row * edge + k)
            source = b + 8 * k * edge
            for column in range(edge):
                stf(target, column, ldf(target, column) + left * ldf(source, column))


@kernel
def _unary(op: int, a: float, s: float) -> float:
    if op == 0:
        return _larger(a, 0.0)
    if op == 1:
        return math.exp(a)
    if op == 2:
        return math.log(a) if a > 0.0 else (-math.inf if a == 0.0 else math.nan)
    if op == 3:
        return 1.0 / math.sqrt(a) if a >= 0.0 else math.nan
    if op == 4:
        return math.sqrt(a) if a >= 0.0 else math.nan
    if op == 5:
        return -a
    if op == 6:
        return abs(a)
    if op == 7:
        return 1.0 / (1.0 + math.exp(-a))
    if op == 8:
        return math.tanh(a)
    if op == 9:
        return 0.5 * a * (1.0 + math.erf(a * _HALF_ROOT))
    if op == 10:
        return 0.5 * a * (1.0 + math.tanh(_GELU * (a + 0.044715 * a * a * a)))
    if op == 11:
        return a / (1.0 + math.exp(-a))
    if op == 12:
        return math.sin(a)
    if op == 13:
        return math.cos(a)
    if op == 14:
        return a * a
    if op == 15:
        return 1.0 / a
    if op == 16:
        return a
    if op == 17:
        return 0.0 if a == -math.inf else a
    if op == 18:
        return a + s
    if op == 19:
        return a - s
    if op == 20:
        return s - a
    if op == 21:
        return a * s
    if op == 22:
        return a / s
    if op == 23:
        return s / a
    if op == 24:
        return _larger(a, s)
    if op == 25:
        return _smaller(a, s)
    return _compared(op, a, s)


@kernel
def _compared(op: int, a: float, s: float) -> float:
    """A comparison with the scalar, as 1 or 0; ``pick``, and ``cast``."""
    if op == 26:
        return 1.0 if a > s else 0.0
    if op == 27:
        return 1.0 if a >= s else 0.0
    if op == 28:
        return 1.0 if a < s else 0.0
    if op == 29:
        return 1.0 if a <= s else 0.0
    if op == 30:
        return 1.0 if a == s else 0.0
    if op == 31:
        return 1.0 if a != s else 0.0
    if op == 32:
        return s if a != 0.0 else 0.0
    if op == 33:
        return rounded(a, s)
    return _function(op, a)


@kernel
def _function(op: int, a: float) -> float:
    """Rounding to whole numbers, and functions of mathematics."""
    if op == 34:
        return np.floor(a)
    if op == 35:
        return np.ceil(a)
    if op == 36:
        return np.trunc(a)
    if op == 37:
        return np.rint(a)
    if op == 38:
        return math.erf(a)
    if op == 39:
        return math.tan(a)
    if op == 40:
        return np.arcsin(a)
    if op == 41:
        return np.arccos(a)
    return math.atan(a)


@kernel
def rounded(a: float, bits: float) -> float:
    """The nearest float of that many significant bits, by way of float32 as PyTorch does."""
    a = float(np.float32(a))
    if bits == 24.0 or a == 0.0 or a - a != 0.0:
        return a
    _, exponent = math.frexp(a)
    lowest = -13 if bits == 11.0 else -125  # of the smallest normal number
    unit = math.ldexp(1.0, max(exponent, lowest) - int(bits))
    a = np.rint(a / unit) * unit
    largest = 65504.0 if bits == 11.0 else 3.3895313892515355e38
    return a if abs(a) <= largest else math.copysign(math.inf, a)


@kernel
def unary(op: int, a: int, scalar: int, result: int, edge: int) -> None:
    """``result = op(a)``, on blocks of ``edge``; ``scalar``: its address."""
    s = ldf(scalar, 0)
    if op < _ROWSUM:
        for i in range(edge * edge):
            stf(result, i, _unary(op, ldf(a, i), s))
        return
    for row in range(edge):
        whole = ldf(a, row * edge)
        for column in range(1, edge):
            one = ldf(a, row * edge + column)
            whole = whole + one if op == _ROWSUM else _larger(whole, one)
        for column in range(edge):
            stf(result, row * edge + column, ldf(a, column * edge + row) if op == _TRANSPOSE else whole)


@kernel
def fold(op: int, value: int, target: int, width: int, fresh: bool) -> None:
    """Add ``value`` to ``target`` or keep the larger, element by element; the first value is taken as it is."""
    if fresh:
        copy_cells(value, target, width)
    elif op == 0:
        for i in range(width):
            stf(target, i, ldf(target, i) + ldf(value, i))
    else:
        for i in range(width):
            stf(target, i, _larger(ldf(target, i), ldf(value, i)))


@kernel
def fold_nothing(op: int, target: int, width: int) -> None:
    """What an empty fiber gives: 0, or -inf as a maximum."""
    for i in range(width):
        stf(target, i, 0.0 if op == 0 else -math.inf)
