"""Functions of a number that LLVM can compute for a vector of them; those of the C library are calls, one a number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from tilestream.sparse.cpu.registers import instruction

_LOW, _HIGH = -746.0, 710.0
"""Beyond these an exponential is 0 or infinity."""
_LOW32, _HIGH32, _PER_LN2_32 = np.float32(-104.0), np.float32(89.0), np.float32(1 / math.log(2))
_LN2_32, _LN2_REST32 = np.float32(0.693359375), np.float32(-2.12194440e-4)
_ONE, _HALF, _P3, _P4 = np.float32(1), np.float32(0.5), np.float32(1 / 6), np.float32(1 / 24)
_P5, _P6, _P7 = np.float32(1 / 120), np.float32(1 / 720), np.float32(1 / 5040)
_PER_LN2 = 1 / math.log(2)
_LN2, _LN2_REST = 0.6931471803691238, 1.9082149292705877e-10
"""The logarithm of 2 in two parts, of which the first has so few bits that whole multiples of it are exact."""


@instruction
def _from_bits(typing: Any, bits: Any) -> Any:
    """The float64 with the bits of an int64."""
    return types.float64(types.int64), lambda _, builder, __, args: builder.bitcast(args[0], ir.DoubleType())


@instruction
def _from_bits32(typing: Any, bits: Any) -> Any:
    """The float32 with the bits of an int32."""
    return types.float32(types.int32), lambda _, builder, __, args: builder.bitcast(args[0], ir.FloatType())


@njit(error_model="numpy")
def exp32(x: Any) -> Any:
    """The same of a float32, within 2 units in the last place."""
    x = _HIGH32 if x > _HIGH32 else x
    x = _LOW32 if x < _LOW32 else x
    whole = np.float32(math.floor(x * _PER_LN2_32 + _HALF))
    r = (x - whole * _LN2_32) - whole * _LN2_REST32
    y = (((((_P7 * r + _P6) * r + _P5) * r + _P4) * r + _P3) * r + _HALF) * r * r + r + _ONE
    n = np.int32(whole)
    half = n >> np.int32(1)
    first = _from_bits32(np.int32((half + np.int32(127)) << np.int32(23)))
    return y * first * _from_bits32(np.int32((n - half + np.int32(127)) << np.int32(23)))


@njit(error_model="numpy")
def power(x: float, y: float) -> float:
    """``x ** y``, of floats; not a number where that would be complex."""
    return x**y


@njit(error_model="numpy")
def exp(x: float) -> float:
    """The exponential within 1 unit in the last place: 2 to a whole power times a series for what is left."""
    x = _HIGH if x > _HIGH else x
    x = _LOW if x < _LOW else x
    whole = math.floor(x * _PER_LN2 + 0.5)
    r = (x - whole * _LN2) - whole * _LN2_REST
    y = 1 / 6227020800.0
    y = y * r + 1 / 479001600.0
    y = y * r + 1 / 39916800.0
    y = y * r + 1 / 3628800.0
    y = y * r + 1 / 362880.0
    y = y * r + 1 / 40320.0
    y = y * r + 1 / 5040.0
    y = y * r + 1 / 720.0
    y = y * r + 1 / 120.0
    y = y * r + 1 / 24.0
    y = y * r + 1 / 6.0
    y = y * r + 0.5
    y = y * r * r + r + 1.0
    half = int(whole) >> 1  # in two steps, since a power of 2 alone may be out of range where the result is not
    return y * _from_bits((half + 1023) << 52) * _from_bits((int(whole) - half + 1023) << 52)
