"""What each tile op computes: one small table a family, on ``[64, features]`` tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tilestream.ir.columns import first_column
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.pipeline import Tile, TileOp
from tilestream.ir.taps import Tap
from tilestream.ir.tileops import GROUP, OPS

# torch.nn.functional's own defaults, for ops built by hand without these attributes.
EPS = 1e-5
SOFTPLUS_BETA = 1.0
SOFTPLUS_THRESHOLD = 20.0


@dataclass(frozen=True)
class Arithmetic:
    """The type that ops compute in, and whether values are rounded to their tile's dtype."""

    dtype: torch.dtype
    rounds: bool

    def widen(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)

    def stored(self, x: Tensor, dtype: str) -> Tensor:
        """``x`` as memory holds it: rounded to nearest even, or untouched where nothing is rounded."""
        return x.to(TORCH_DTYPES[dtype]) if self.rounds else x

    def rounded(self, x: Tensor, dtype: str) -> Tensor:
        return self.widen(self.stored(x, dtype))


WORKING = Arithmetic(torch.float32, rounds=True)
FLOAT64 = Arithmetic(torch.float64, rounds=False)
ARITHMETIC = {"working": WORKING, "float64": FLOAT64}


def arithmetic_of(tensors: Iterable[Tensor]) -> Arithmetic:
    """That of tensors as they are: nothing is rounded where all that are no indices are in float64."""
    exact = all(t.dtype == torch.float64 for t in tensors if t.is_floating_point())
    return FLOAT64 if exact else WORKING


def _number(op: TileOp, name: str, default: float) -> float:
    return float(op.attr(name, default) or 0)


def _softplus(x: Tensor, op: TileOp) -> Tensor:
    beta, threshold = _number(op, "beta", SOFTPLUS_BETA), _number(op, "threshold", SOFTPLUS_THRESHOLD)
    return functional.softplus(x, beta, threshold)


UNARY: dict[str, Callable[[Tensor, TileOp], Tensor]] = {
    "relu": lambda x, _: torch.relu(x),
    "gelu": lambda x, _: functional.gelu(x),
    "gelu_tanh": lambda x, _: functional.gelu(x, approximate="tanh"),
    "silu": lambda x, _: functional.silu(x),
    "sigmoid": lambda x, _: torch.sigmoid(x),
    "tanh": lambda x, _: torch.tanh(x),
    "softplus": _softplus,
    "gelu_slope": lambda x, _: torch.special.ndtr(x) + x * torch.exp(-0.5 * x * x) * (0.5 / math.pi) ** 0.5,
    "exp": lambda x, _: torch.exp(x),
    "expm1": lambda x, _: torch.expm1(x),
    "log": lambda x, _: torch.log(x),
    "sin": lambda x, _: torch.sin(x),
    "cos": lambda x, _: torch.cos(x),
    "neg": lambda x, _: -x,
    "abs": lambda x, _: torch.abs(x),
    "sqrt": lambda x, _: torch.sqrt(x),
    "rsqrt": lambda x, _: torch.rsqrt(x),
    "reciprocal": lambda x, _: torch.reciprocal(x),
    "square": lambda x, _: x * x,
}

BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "relu_backward": lambda a, b: torch.where(b <= 0, 0.0, a),
}

REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(1, keepdim=True),
    "mean": lambda x: x.mean(1, keepdim=True),
    "max": lambda x: x.amax(1, keepdim=True),
}


def _max_rows(x: Tensor) -> Tensor:
    """``[16 n, features]`` to as many rows of a sixteenth: the maxima of 16 rows lie where those rows lay."""
    whole = functional.pad(x, (0, 0, 0, -x.shape[0] % GROUP), value=-math.inf)
    return whole.view(-1, GROUP, x.shape[1]).amax(1).view(-1, x.shape[1] // GROUP)[: x.shape[0]]


LAYOUT: dict[str, Callable[[Sequence[Tensor], TileOp], Tensor]] = {
    "cat": lambda xs, _: torch.cat(list(xs), 1),
    "slice": lambda xs, op: xs[0][:, int(_number(op, "start", 0)) : int(_number(op, "stop", xs[0].shape[1]))],
    "max_rows": lambda xs, _: _max_rows(xs[0]),
}


def affine(op: TileOp) -> str:
    """Which of weight and bias a layer_norm's params are: 'wb', 'w', 'b' or ''."""
    return str(op.attr("affine", "wb"[: len(op.params)]))


def _layer_norm(x: Tensor, params: Sequence[Tensor], op: TileOp) -> Tensor:
    by_letter = dict(zip(affine(op), params, strict=True))
    return functional.layer_norm(x, (x.shape[1],), by_letter.get("w"), by_letter.get("b"), _number(op, "eps", EPS))


def _rms_norm(x: Tensor, params: Sequence[Tensor], op: TileOp) -> Tensor:
    return functional.rms_norm(x, (x.shape[1],), params[0] if params else None, _number(op, "eps", EPS))


NORM: dict[str, Callable[[Tensor, Sequence[Tensor], TileOp], Tensor]] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "softmax": lambda x, _params, _op: torch.softmax(x, 1),
}


def pixels(pictures: Tensor, tap: Tap, rows: Tensor) -> Tensor:
    """What ``rows``, numbers of output pixels, take of ``pictures`` at ``tap``, ``[rows, channels]``; zero outside."""
    image, row = rows // tap.pixels, rows % tap.pixels
    y, x = tap.stride_y * (row // tap.width) + tap.y, tap.stride_x * (row % tap.width) + tap.x
    height, width = pictures.shape[1:3]
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    taken = pictures[image, y.clamp(0, height - 1), x.clamp(0, width - 1)]
    return torch.where(inside[:, None], taken, torch.zeros_like(taken))


def elementwise(op: TileOp, operands: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """A unary or binary ``op`` of operands that broadcast; its scalar is of ``dtype``."""
    if op.kind in UNARY:
        return UNARY[op.kind](operands[0], op)
    scalar = op.attr("scalar")
    if scalar is not None:
        operands = [*operands, torch.tensor(float(scalar), dtype=dtype)]
    a, b = reversed(operands) if op.attr("reversed") else operands
    return BINARY[op.kind](a, b)


def evaluate(
    op: TileOp, ins: Sequence[Tensor], tiles: Sequence[Tile], params: Sequence[Tensor], arithmetic: Arithmetic
) -> Tensor:
    """The result of ``op`` (any but load and store) on tiles ``ins``, ``[64, features]``, and whole ``params``.

    ``tiles`` describes ``ins``: a linear rounds its operand to the dtype of its tile.
    """
    family = OPS[op.kind].family
    if family == "linear":
        first = first_column(op)
        part = [p[first : first + op.made.features] for p in params]
        return functional.linear(arithmetic.rounded(ins[0], tiles[0].dtype), *part)
    if op.kind == "cast":
        return arithmetic.rounded(ins[0], op.made.dtype)
    if family in ("unary", "binary"):
        return elementwise(op, [*ins, *params], arithmetic.dtype)
    if family == "reduce":
        return REDUCE[op.kind](ins[0])
    if family == "norm":
        return NORM[op.kind](ins[0], params, op)
    return LAYOUT[op.kind](ins, op)
