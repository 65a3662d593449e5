"""The tile operations: one table. Meaning: ``reference``; cost: ``cost``; CUDA: ``cuda/snippets``.

A binary operation combines a tile with a second tile, with a row vector parameter, or with the
scalar attribute ``scalar``. ``reversed=1`` swaps the operands (``2 - x``). Tiles of one feature are
columns and broadcast over the features of the other operand; a vector of one element broadcasts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilestream.errors import IRError


@dataclass(frozen=True)
class OpSpec:
    """Signature and cost of one kind of tile op.

    ``flops`` counts the instructions that the generated code issues an element of the widest operand (``linear`` is
    counted from its weight instead); ``transcendental`` those of them that go to the special function unit. A test
    holds both against the machine code.
    """

    family: str  # memory | linear | unary | binary | reduce | rows | norm | layout
    ins: tuple[int, int]  # least and most tiles taken
    params: tuple[int, int]  # least and most tensors taken
    attrs: tuple[str, ...] = ()
    flops: float = 1
    transcendental: float = 0
    doc: str = ""

    @property
    def lanes(self) -> float:
        """Instructions of the fp32 lanes: those that are not the special function unit's."""
        return self.flops - self.transcendental

    def misfit(self, op: Any) -> IRError | None:
        """The error of a ``TileOp`` whose operands or attributes do not fit this signature."""
        where = op.source or op.kind
        for what, got, (least, most) in (("tiles", op.ins, self.ins), ("tensors", op.params, self.params)):
            if not least <= len(got) <= most:
                want = str(least) if least == most else f"{least} to {most}"
                return IRError(f"{op.kind} at {where} takes {want} {what}, got {len(got)}", "fix the operands")
        for name, _ in op.attrs:
            if name not in self.attrs:
                return IRError(
                    f"{op.kind} at {where} has no attribute {name!r}", f"it has: {', '.join(self.attrs) or 'none'}"
                )
        if self.family == "binary" and len(op.ins) + len(op.params) + (op.attr("scalar") is not None) != 2:
            return IRError(
                f"{op.kind} at {where} needs exactly two operands", "give two tiles, or one with a vector or a scalar"
            )
        if (op.out is None) != (op.kind in ("store", "store_add")):
            return IRError(f"{op.kind} at {where}: only a store has no result", "give it an out tile")
        return None


def _unary(flops: float = 1, transcendental: float = 0, doc: str = "", attrs: tuple[str, ...] = ()) -> OpSpec:
    return OpSpec("unary", (1, 1), (0, 0), attrs, flops, transcendental, doc)


def _binary(doc: str, flops: float = 1, transcendental: float = 0) -> OpSpec:
    return OpSpec("binary", (1, 2), (0, 1), ("scalar", "reversed"), flops, transcendental, doc)


def _reduce(doc: str) -> OpSpec:
    return OpSpec("reduce", (1, 1), (0, 0), (), 1, 0, doc)


GROUP = 16
"""Rows that ``max_rows`` takes together: those of one warp."""

FIRST = "first"
"""Attribute of a linear or a store that makes or writes a part of the columns: the first of them. Of the weight's rows
and the bias the linear takes those that belong to the part; all parts of a layer read the whole operand."""

PLAIN = {"product", "copy", "fill", "store_add"}
"""Kinds that ops of rows are not made of: they stand where every operand has coordinates."""

OPS: dict[str, OpSpec] = {
    "load": OpSpec(
        "memory",
        (0, 0),
        (1, 2),
        ("height", "width", "stride_y", "stride_x", "y", "x", "bulk", "own"),
        flops=0,
        doc="rows of an input, of a table at the places an index names (own: by who computes with them), or pixels of"
        " pictures at a tap",
    ),
    "store": OpSpec(
        "memory",
        (1, 1),
        (1, 3),
        (FIRST,),
        flops=0,
        doc="rows of an output tensor, rounded to its dtype; with receivers and bounds, what the rows of a node sum to",
    ),
    "linear": OpSpec(
        "linear", (1, 1), (1, 2), (FIRST,), flops=0, doc="x @ weight.T (+ bias); weight [out, in], fp32 accumulation"
    ),
    "relu": _unary(1, 0, "max(x, 0)"),
    "gelu": _unary(14, 2, "x Phi(x), by erf"),
    "gelu_tanh": _unary(23, 2, "x Phi(x), tanh approximation"),
    "silu": _unary(4, 2, "x sigmoid(x)"),
    "sigmoid": _unary(4, 2, "1 / (1 + exp(-x))"),
    "tanh": _unary(17, 2, "tanh(x)"),
    "softplus": _unary(12, 2, "log(1 + exp(beta x)) / beta, x above threshold / beta", ("beta", "threshold")),
    "gelu_slope": _unary(20, 2, "the derivative of gelu, Phi(x) + x phi(x)"),
    "exp": _unary(2, 1, "exp(x)"),
    "expm1": _unary(12, 1, "exp(x) - 1, exact near 0"),
    "log": _unary(4, 1, "log(x)"),
    "sin": _unary(12, 0, "sin(x)"),
    "cos": _unary(14, 0, "cos(x)"),
    "neg": _unary(1, 0, "-x"),
    "abs": _unary(1, 0, "|x|"),
    "sqrt": _unary(4, 1, "sqrt(x)"),
    "rsqrt": _unary(4, 1, "1 / sqrt(x)"),
    "reciprocal": _unary(7, 1, "1 / x"),
    "square": _unary(1, 0, "x x"),
    "cast": _unary(1, 0, "rounded to the dtype of the result"),
    "add": _binary("a + b"),
    "sub": _binary("a - b"),
    "mul": _binary("a b"),
    "div": _binary("a / b", 7, 1),
    "maximum": _binary("the larger, NaN if either is"),
    "minimum": _binary("the smaller, NaN if either is"),
    "relu_backward": _binary("a, but 0 where b <= 0", 2),
    "product": OpSpec(
        "plain",
        (0, 3),
        (0, 3),
        ("empty",),
        flops=0,
        doc="operands multiplied, summed over what the result lacks; empty: a maximum or minimum of nothing",
    ),
    "copy": OpSpec("plain", (0, 1), (0, 1), flops=0, doc="an operand under other coordinates"),
    "fill": OpSpec("plain", (0, 0), (0, 0), ("value",), flops=0, doc="the attribute value everywhere; 1 unless given"),
    "store_add": OpSpec("memory", (1, 1), (1, 1), flops=0, doc="added to an output tensor, which starts as zeros"),
    "cat": OpSpec("layout", (1, 64), (0, 0), flops=0, doc="concatenation along features"),
    "slice": OpSpec("layout", (1, 1), (0, 0), ("start", "stop"), 0, 0, "features start to stop"),
    "max_rows": OpSpec(
        "rows",
        (1, 1),
        (0, 0),
        flops=1,
        doc="the maximum of every 16 rows, NaN if any is: of 64 n features those of 16 rows become 16 rows of 4 n",
    ),
    "sum": _reduce("sum over features, one feature"),
    "mean": _reduce("mean over features, one feature"),
    "max": _reduce("maximum over features, one feature, NaN if any is"),
    "layer_norm": OpSpec(
        "norm",
        (1, 1),
        (0, 2),
        ("eps", "affine"),
        8,
        0,
        "LayerNorm; params weight, bias as affine says: 'wb', 'w', 'b' or ''",
    ),
    "rms_norm": OpSpec("norm", (1, 1), (0, 1), ("eps",), 5, 0, "RMSNorm; param weight"),
    "softmax": OpSpec("norm", (1, 1), (0, 0), (), 5, 1, "softmax over features"),
}
