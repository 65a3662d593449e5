"""The CUDA snippet of each elementwise tile op: an expression over fp32 operands."""

from __future__ import annotations

from tilestream.errors import CompileError
from tilestream.ir.pipeline import TileOp

SOFTPLUS = (("beta", 1.0), ("threshold", 20.0))  # 0 is a threshold like any other
_CALL = {
    "relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_tanh", "silu": "silu", "sigmoid": "sigmoid", "tanh": "tanh_",
    "gelu_slope": "gelu_slope", "exp": "exp_", "expm1": "expm1_", "log": "log_", "sin": "sin_", "cos": "cos_",
    "neg": "neg", "abs": "abs_", "sqrt": "sqrt_", "rsqrt": "rsqrt_", "reciprocal": "reciprocal", "square": "square",
    "add": "add", "sub": "sub", "mul": "mul", "div": "div", "maximum": "maximum", "minimum": "minimum",
    "relu_backward": "relu_backward",
}  # fmt: skip


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
    if op.kind not in _CALL:
        raise CompileError(f"tile op {op.kind!r} at {op.source} has no CUDA snippet", "use target='reference'")
    scalar = op.attr("scalar")
    args = [*operands] if scalar is None else [*operands, literal(float(scalar))]
    if op.attr("reversed"):
        args.reverse()
    return f"{_CALL[op.kind]}({', '.join(args)})"
