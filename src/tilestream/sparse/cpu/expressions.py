"""The operations of a statement as expressions of the generated code."""

from __future__ import annotations

import math

from tilestream.sparse.einsum import Statement

_BINARY = {
    "add": "({a} + {b})",
    "sub": "({a} - {b})",
    "mul": "({a} * {b})",
    "div": "({a} / {b})",
    "max": "({a} if {a} > {b} or {a} != {a} else {b})",
    "min": "({a} if {a} < {b} or {a} != {a} else {b})",
    "gt": "(1.0 if {a} > {b} else 0.0)",
    "ge": "(1.0 if {a} >= {b} else 0.0)",
    "eq": "(1.0 if {a} == {b} else 0.0)",
    "ne": "(1.0 if {a} != {b} else 0.0)",
    "keep": "({a} if {b} != 0.0 else 0.0)",
    "shift": "({a} if {a} == -math.inf else {a} - {b})",
    "share": "({a} / {b} if {a} != 0.0 or {b} != 0.0 else 0.0)",
    "pow": "power({a}, {b})",
    "mod": "np.mod({a}, {b})",
    "atan2": "math.atan2({a}, {b})",
}
_UNARY = {
    "relu": "({a} if {a} > 0.0 or {a} != {a} else 0.0)",
    "exp": "exp({a})",
    "log": "(math.log({a}) if {a} > 0.0 else (-math.inf if {a} == 0.0 else math.nan))",
    "rsqrt": "(1.0 / math.sqrt({a}) if {a} >= 0.0 else math.nan)",
    "sqrt": "(math.sqrt({a}) if {a} >= 0.0 else math.nan)",
    "neg": "(-{a})",
    "abs": "abs({a})",
    "sigmoid": "(1.0 / (1.0 + exp(-{a})))",
    "tanh": "math.tanh({a})",
    "gelu": "(0.5 * {a} * (1.0 + math.erf({a} * 0.7071067811865476)))",
    "gelu_tanh": "(0.5 * {a} * (1.0 + math.tanh(0.7978845608028654 * ({a} + 0.044715 * {a} * {a} * {a}))))",
    "silu": "({a} / (1.0 + exp(-{a})))",
    "sin": "math.sin({a})",
    "cos": "math.cos({a})",
    "square": "({a} * {a})",
    "reciprocal": "(1.0 / {a})",
    "floor": "np.floor({a})",
    "ceil": "np.ceil({a})",
    "trunc": "np.trunc({a})",
    "round": "np.rint({a})",
    "erf": "math.erf({a})",
    "tan": "np.tan({a})",
    "asin": "np.arcsin({a})",
    "acos": "np.arccos({a})",
    "atan": "math.atan({a})",
    "identity": "{a}",
    "zeroed": "(0.0 if {a} == -math.inf else {a})",
    "copy": "{a}",
    "transpose": "{a}",
}
_SCALAR = {
    **{name: text for name, text in _BINARY.items() if name not in ("keep", "pow", "mod", "atan2")},
    "rsub": "({b} - {a})",
    "rdiv": "({b} / {a})",
    "lt": "(1.0 if {a} < {b} else 0.0)",
    "le": "(1.0 if {a} <= {b} else 0.0)",
    "pick": "({b} if {a} != 0.0 else 0.0)",
    "cast": "rounded({a}, {b})",
}
COSTLY = tuple("exp log sigmoid tanh gelu gelu_tanh silu sin cos pow atan2 erf tan asin acos atan".split())
"""Operations that are better done once and kept."""


def number(x: float) -> str:
    """A float as code."""
    if math.isinf(x):
        return "math.inf" if x > 0 else "-math.inf"
    return "math.nan" if x != x else repr(float(x))


def expression(statement: Statement, operands: list[str]) -> str:
    """A statement's value before its reduction; operands are names."""
    op = statement.op
    if op == "mask":
        return operands[0]
    if statement.scalar is not None:
        return _SCALAR[op].format(a=operands[0], b=number(statement.scalar))
    if len(operands) == 1:
        return _UNARY[op].format(a=operands[0])
    return _BINARY[op].format(a=operands[0], b=operands[1])
