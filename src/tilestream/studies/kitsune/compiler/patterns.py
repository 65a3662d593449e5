"""The libraries of patterns: regular expressions over the operators of a graph in order (Kitsune 3.1).

Every operator is one letter. Lower case ``l`` is a linear without a bias; in the backward graph letters are lower case.

====== ==================================== ====== =====================================
letter forward                              letter backward
====== ==================================== ====== =====================================
L, l   linear with, without bias            x, w   dX and dW of a linear
A      elementwise with one operand         b      sum of a bias's gradient
M, R   elementwise product, sum of two      e      derivative of an activation
C      concatenation (not excluded)         m, a   elementwise product, sum of two
B, S   batched product, softmax             d, s   batched product, softmax's derivative
D, N   reduction over features, norm        g, n   other reductions, derivative of a norm
F      fused attention                      f      its derivative
``|``  excluded, or none of these           ``|``
====== ==================================== ====== =====================================
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from tilestream.studies.kitsune.compiler.operators import Kind, Operator, OperatorGraph

OTHER = "|"


@dataclass(frozen=True)
class Pattern:
    """One entry of a library. ``holds`` may refuse a match for what letters do not say."""

    name: str
    regex: re.Pattern[str]
    about: str
    holds: Callable[[Sequence[Operator], OperatorGraph], bool] = lambda ops, graph: True


def letter(op: Operator, graph: OperatorGraph) -> str:
    """The letter of an operator that no rule excludes."""
    if op.phase == "backward":
        return _backward(op, graph)
    if op.kind is Kind.LINEAR:
        return "L" if biased(op) else "l"
    if op.kind is Kind.ELEMENTWISE:
        if len(streamed(op, graph)) == 1:
            return "A"
        return "M" if op.label.startswith("mul") else "R" if op.label.startswith("add") else OTHER
    return {
        Kind.BMM: "B",
        Kind.SOFTMAX: "S",
        Kind.REDUCTION: "D",
        Kind.NORM: "N",
        Kind.CAT: "C",
        Kind.ATTENTION: "F",
    }.get(op.kind, OTHER)


def _backward(op: Operator, graph: OperatorGraph) -> str:
    if op.kind is Kind.LINEAR:
        return "w" if op.over_rows else "x"
    if op.kind is Kind.REDUCTION:
        return "b" if op.over_rows else "g"
    if op.kind is Kind.ELEMENTWISE:
        if "backward" in op.target:
            return "e"
        return "m" if op.label.startswith("mul") else "a" if op.label.startswith("add") else OTHER
    return {Kind.BMM: "d", Kind.SOFTMAX: "s", Kind.NORM: "n", Kind.ATTENTION: "f"}.get(op.kind, OTHER)


def biased(op: Operator) -> bool:
    return len(op.inputs) >= 3


def streamed(op: Operator, graph: OperatorGraph) -> list[str]:
    """The values that an operator streams: all operands but parameters, each once."""
    return list(dict.fromkeys(x.value for x in op.inputs if not graph.values[x.value].is_parameter))


def width(op: Operator, graph: OperatorGraph) -> int:
    """Features of an operator's first result."""
    shape = graph.values[op.outputs[0]].shape
    return shape[-1] if shape else 1


ONE_TILE = 128
"""Columns of a GEMM's tile: a row that fits can be the next product's operand without leaving the CTA."""


def _narrow(ops: Sequence[Operator], graph: OperatorGraph) -> bool:
    return all(width(op, graph) <= ONE_TILE for op in ops[:-1])


def _in_memory_anyway(ops: Sequence[Operator], graph: OperatorGraph) -> bool:
    """Whether all that the concatenation joins is in memory whatever is fused.

    That is so for values that other operators read as well, or that one made which is never fused. Otherwise the
    chain that makes the value ends here, and its kernel could as well write to where the concatenation puts it.
    """
    join = ops[0]
    for value in streamed(join, graph):
        producer = graph.producer(value)
        if producer is None:
            return False
        shared = len(graph.consumers(value)) > 1
        if not shared and producer.kind in (Kind.LINEAR, Kind.ELEMENTWISE, Kind.NORM):
            return False
    return True


def _any_order(first: str, rest: str) -> str:
    return f"(?:{'|'.join(first + ''.join(p) for p in permutations(rest))})"


RMS_NORM = Pattern("rms norm", re.compile("AD[AM]{2,4}"), "square, mean, reciprocal root, products")

KITSUNE = (
    RMS_NORM,
    Pattern("attention", re.compile("B[AMR]*SB"), "scores, scale and mask, softmax, values: scores stay on the chip"),
    Pattern("gated ffn", re.compile("[Ll]A[Ll]M[Ll]"), "two linears whose results are multiplied, and one behind them"),
    Pattern(
        "mlp",
        re.compile("C?[Ll]A(?:C?[Ll]|A|C$)*N?"),
        "linears and activations, concatenations between them, a norm at the end (paper, Fig. 2a)",
    ),
    Pattern(
        "mlp backward",
        re.compile(f"{_any_order('[en]', 'xwb')}"),
        "an activation's or a norm's derivative, sent to dX, dW and the bias's sum at once (Fig. 2c, 8e)",
    ),
    Pattern("attention backward", re.compile("d+sd+"), "products, softmax's derivative, products"),
    Pattern(
        "gated ffn backward",
        re.compile("(?:xw|wx)mm(?:(?:xw|wx)e|e(?:xw|wx))(?:xw|wx)a"),
        "down's dX and dW, the gate's derivative, dX and dW of gate and up",
    ),
)
"""What the paper's spatial pipelines are made of. Earlier entries win.

In the backward graph every layer is a pipeline of its own: with that the traffic of Table 2's training rows comes out
(DLRM 25.0 %, paper 25.1 %), with whole chains of layers in one pipeline it does not (34.5 %).
"""

DEEP = tuple(
    replace(p, regex=re.compile(f"(?:{p.regex.pattern})+"), about=f"{p.about}, layer after layer")
    if p.name == "mlp backward"
    else p
    for p in KITSUNE
)
"""Beyond the paper: consecutive layers of the backward graph in one pipeline, so that dX stays on the chip."""

HELD = 512
"""Columns of the widest tile that both warpgroups of a CTA hold together (``ir.verify.WIDEST``)."""


def _held(ops: Sequence[Operator], graph: OperatorGraph) -> bool:
    return all(width(op, graph) <= HELD for op in ops)


VERTICAL = (
    RMS_NORM,
    Pattern(
        "narrow mlp",
        re.compile("(?:LA)+LN"),
        "layers whose rows fit one tile of a GEMM: back-to-back products in one CTA (BOLT, Welder)",
        _narrow,
    ),
    Pattern(
        "concatenation, linear, activation",
        re.compile("CLA"),
        "a GEMM that reads its operand from several tensors",
        _in_memory_anyway,
    ),
    Pattern("linear, activation", re.compile("LA"), "the epilogue that GEMM libraries have: bias and activation"),
)
"""What vertical fusion (TensorRT, AStitch, Welder; the paper's model of them) puts into one kernel, forward only."""

WHOLE = (
    RMS_NORM,
    *(
        replace(p, name="whole mlp", about="all layers of rows that one CTA holds", holds=_held)
        for p in KITSUNE
        if p.name == "mlp"
    ),
    *(p for p in VERTICAL if p.name in ("concatenation, linear, activation", "linear, activation")),
)
"""What the compiler's own vertical kernels take, forward: whole MLPs whose rows stay in one CTA, layer after layer."""
