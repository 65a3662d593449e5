"""What operators mean for what is not stored: the value there, and how their operands are joined."""

from __future__ import annotations

import math

from tilestream.errors import SparseError
from tilestream.sparse.einsum import Statement

_UNARY = {
    "relu": lambda x: max(x, 0.0),
    "exp": lambda x: 0.0 if x == -math.inf else math.exp(x),
    "log": lambda x: -math.inf if x == 0 else math.nan,
    "rsqrt": lambda x: math.inf if x == 0 else x**-0.5,
    "sqrt": lambda x: x**0.5 if x >= 0 else math.nan,
    "neg": lambda x: -x if x else 0.0,
    "abs": abs,
    "sigmoid": lambda x: 0.0 if x == -math.inf else 1 / (1 + math.exp(-x)),
    "tanh": math.tanh,
    "gelu": lambda x: 0.0 if x in (0.0, -math.inf) else math.nan,
    "gelu_tanh": lambda x: 0.0 if x in (0.0, -math.inf) else math.nan,
    "silu": lambda x: 0.0 if x in (0.0, -math.inf) else math.nan,
    "sin": lambda x: math.sin(x) if math.isfinite(x) else math.nan,
    "cos": lambda x: math.cos(x) if math.isfinite(x) else math.nan,
    "square": lambda x: x * x,
    "reciprocal": lambda x: math.inf if x == 0 else 1 / x,
    "floor": lambda x: x,
    "ceil": lambda x: x,
    "trunc": lambda x: x,
    "round": lambda x: x,
    "erf": lambda x: math.erf(x),
    "tan": lambda x: math.tan(x) if math.isfinite(x) else math.nan,
    "asin": lambda x: 0.0 if x == 0 else math.nan,
    "acos": lambda x: math.acos(x) if x == 0 else math.nan,
    "atan": math.atan,
    "identity": lambda x: x,
    "zeroed": lambda x: 0.0 if x == -math.inf else x,
    "copy": lambda x: x,
    "transpose": lambda x: x,
}
_WITH_SCALAR = {
    "add": lambda x, s: x + s,
    "sub": lambda x, s: x - s,
    "rsub": lambda x, s: s - x,
    "mul": lambda x, s: x * s,
    "div": lambda x, s: x / s if s else math.nan,
    "rdiv": lambda x, s: s / x if x else math.nan,
    "max": max,
    "min": min,
    "gt": lambda x, s: float(x > s),
    "ge": lambda x, s: float(x >= s),
    "lt": lambda x, s: float(x < s),
    "le": lambda x, s: float(x <= s),
    "eq": lambda x, s: float(x == s),
    "ne": lambda x, s: float(x != s),
    "pick": lambda x, s: s if x else 0.0,
    "cast": lambda x, _: x,
}
_NOT_OF_ZEROS = ("ge", "eq", "div", "pow", "mod")
"""Operators that do not make 0 of what neither operand stores (0 over 0 is not a number): results store everything."""

_LESS, _OVER = ("sub", "shift"), ("div", "share")


def is_unary(statement: Statement) -> bool:
    return len(statement.operands) == 1


def fill_after(statement: Statement, fills: list[float]) -> tuple[float, bool]:
    """The value of a result where nothing is stored, and whether everything must be stored for that to hold.

    Every tensor's fill is 0 or minus infinity. An operator that would make it something else (``exp`` of 0) has its
    operand completed: every coordinate is stored then.

    Raises:
        SparseError: what is not stored is minus infinity and the operator has no use for it.
    """
    op, first = statement.op, fills[0]
    if is_unary(statement):
        scalar = statement.scalar
        after = _WITH_SCALAR[op](first, scalar) if scalar is not None else _UNARY[op](first)
        fill, complete = (after, False) if after in (0.0, first) else (0.0, True)
        if complete and first != 0:
            raise _unfit(statement, first)
    elif op == "mask":
        fill, complete = statement.fill, False
        if first == -math.inf:
            fill = -math.inf
    elif first == -math.inf:
        fill, complete = -math.inf, False
        inside = set(statement.operands[1].indices) < set(statement.operands[0].indices)
        if op not in ("add", *_LESS, *_OVER) or (fills[1] != 0 and not (op in _LESS and inside)):
            raise _unfit(statement, first)
    else:
        fill, complete = 0.0, op in _NOT_OF_ZEROS
        if fills[1] != 0:
            raise _unfit(statement, fills[1])
    if statement.reduced and fill == -math.inf and statement.reduction == "add":
        raise _unfit(statement, fill)
    return fill, complete


def _unfit(statement: Statement, fill: float) -> SparseError:
    where = f" ({statement.source})" if statement.source else ""
    return SparseError(
        f"{statement}{where}: what its operand does not store is {fill:g}, of which {statement.op} makes nothing",
        "apply exp, softmax or a max to a masked tensor before anything else",
    )
