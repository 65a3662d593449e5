"""The CUDA snippet of each elementwise tile op: an expression over fp32 operands."""

from __future__ import annotations

from tilestream.errors import CompileError
from tilestream.ir.pipeline import TileOp
from tilestream.ir.tileops import OPS

SOFTPLUS = (("beta", 1.0), ("threshold", 20.0))  # 0 is a threshold like any other
_OF_C = ("tanh", "exp", "expm1", "log", "sin", "cos", "abs", "sqrt", "rsqrt")
"""Names that C++ has for functions of its own: ours end in ``_``. Others are called as the ops are."""


def literal(value: float) -> str:
    """A C++ float literal with the value's exact fp32 bits; infinities and NaN included."""
    if value != value:
        return "__int_as_float(0x7fffffff)"
    if value in (float("inf"), float("-inf")):
        return f"__int_as_float(0x{'7' if value > 0 else 'f'}f800000)"
    return f"{float(value)!r}f" if "e" in repr(float(value)) or "." in repr(float(value)) else f"{float(value)!r}.0f"


def expression(op: TileOp, operands: list[str]) -> str:
    """``operands``: C++ expressions of the tiles, then of the vector parameters."""
    if op.kind == "softplus":
        beta, threshold = (float(op.attr(name, default) or 0) for name, default in SOFTPLUS)
        inverse = 1 / beta if beta else float("inf")
        return f"softplus({operands[0]}, {literal(beta)}, {literal(inverse)}, {literal(threshold)})"
    if op.kind == "cast":
        return operands[0] if op.made.dtype == "f32" else f"Io<{op.made.dtype}>::round({operands[0]})"
    if OPS[op.kind].family not in ("unary", "binary"):
        raise CompileError(f"tile op {op.kind!r} at {op.source} has no CUDA snippet", "use target='reference'")
    scalar = op.attr("scalar")
    args = [*operands] if scalar is None else [*operands, literal(float(scalar))]
    if op.attr("reversed"):
        args.reverse()
    return f"{op.kind}{'_' if op.kind in _OF_C else ''}({', '.join(args)})"
