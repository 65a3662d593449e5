"""Functions of a number that LLVM can compute for a vector of them; those of the C library are calls, one a number."""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import njit, types

from tilestream.sparse.cpu.registers import instruction

_LOW, _HIGH = -746.0, 710.0
"""Beyond these an exponential is 0 or infinity."""
_PER_LN2 = 1 / math.log(2)
_LN2, _LN2_REST = 0.6931471803691238, 1.9082149292705877e-10
"""The logarithm of 2 in two parts, of which the first has so few bits that whole multiples of it are exact."""


@instruction
def _from_bits(typing: Any, bits: Any) -> Any:
    """The float64 with the bits of an int64."""
    return types.float64(types.int64), lambda _, builder, __, args: builder.bitcast(args[0], ir.DoubleType())


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
