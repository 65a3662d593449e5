"""ReLU as the epilogue of a library's product, as graphs for Inductor have it (``run.epilogues``): for costs alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from tilestream.ir.pipeline import Pipeline, TileOp

ALIGNED = 8
"""Elements of 16 bits that a library's fast kernels take at once: rows of other lengths keep their ReLU apart."""


def relu_in_product(program: Pipeline) -> Pipeline:
    """``program``, one stage, with each ReLU that such a product takes in left out: the product makes its result."""
    (stage,) = program.stages
    readers = Counter(name for op in stage.ops for name in op.ins)
    products = {op.out.name: op for op in stage.ops if op.out is not None and _is_product(op, program)}
    taken = {
        op.ins[0]: op for op in stage.ops if op.kind == "relu" and op.ins[0] in products and readers[op.ins[0]] == 1
    }
    if not taken:
        return program
    left = {id(op) for op in taken.values()}
    ops = tuple(
        replace(op, out=taken[op.out.name].out) if op.out is not None and op.out.name in taken else op
        for op in stage.ops
        if id(op) not in left
    )
    return program.with_stages((replace(stage, ops=ops),))


def _is_product(op: TileOp, program: Pipeline) -> bool:
    """Whether an op is a linear with a bias, of 16-bit operands in rows of whole 16 bytes."""
    if op.kind != "linear" or len(op.params) != 2:
        return False
    weight = program.tensor(op.params[0])
    return weight.dtype in ("bf16", "f16") and not any(size % ALIGNED for size in weight.shape)
