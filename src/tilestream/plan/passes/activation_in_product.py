"""Activations as epilogues of a library's products, as graphs for Inductor have them (``rewrites.epilogues``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tilestream.graph.rewrites.epilogues import WIDE
from tilestream.ir.pipeline import Pipeline, Tensor, Tile, TileOp
from tilestream.kernels.stream.model import ceil_to

GELUS = ("gelu", "gelu_tanh")
ALIGNED = 8
"""Elements of 16 bits that a library's fast kernels take at once."""


def activation_in_product(program: Pipeline) -> Pipeline:
    """``program``, one stage, with each activation that such a product takes in left out: the product makes its result.
    What such a product of odd depth loads is as wide as its padded copy; the copying is not counted, nor is a GELU
    (0.35 us a million elements on an H200).
    """
    (stage,) = program.stages
    readers = Counter(name for op in stage.ops for name in op.ins)
    products = {op.out.name: op for op in stage.ops if op.out is not None and _is_product(op, program)}
    taken = {
        op.ins[0]: op
        for op in stage.ops
        if op.ins and op.ins[0] in products and readers[op.ins[0]] == 1 and _is_epilogue(op, stage.ops)
    }
    if not taken:
        return program
    left = {id(op) for op in taken.values()}
    ops = tuple(
        replace(op, out=taken[op.out.name].out) if op.out is not None and op.out.name in taken else op
        for op in stage.ops
        if id(op) not in left
    )
    return _as_padded(program.with_stages((replace(stage, ops=ops),)), [products[name] for name in taken])


def _is_epilogue(op: TileOp, ops: Sequence[TileOp]) -> bool:
    """Whether a product takes in an op (``graph.rewrites.epilogues``): a GELU that only products read."""
    if op.kind not in GELUS or op.out is None:
        return op.kind == "relu"
    taken = op.kind == "gelu_tanh" or op.out.dtype == "bf16"
    return taken and all(r.kind in ("linear", "store") for r in ops if op.out.name in r.ins)


def _as_padded(program: Pipeline, products: Sequence[TileOp]) -> Pipeline:
    """With rows of whole 16 bytes in what ``products`` alone load, and in their weights."""
    (stage,) = program.stages
    loads = {op.out.name: op for op in stage.ops if op.out is not None and op.kind == "load"}
    readers = Counter([name for op in stage.ops for name in op.ins] + [op.params[0] for op in loads.values()])
    tensors: dict[str, Tensor] = {}
    tiles: dict[str, Tile] = {}
    for op in products:
        weight, load = program.tensor(op.params[0]), loads.get(op.ins[0])
        out, depth = weight.shape
        if not depth % ALIGNED or load is None or readers[op.ins[0]] != 1 or readers[load.params[0]] != 1:
            continue
        wide = ceil_to(depth, ALIGNED)
        if program.tensor(load.params[0]).shape == (depth,):
            tensors[weight.name] = Tensor.of(weight.name, weight.role, (out, wide), weight.dtype)
            rows = program.tensor(load.params[0])
            tensors[rows.name] = Tensor.of(rows.name, rows.role, (wide,), rows.dtype)
            tiles[op.ins[0]] = Tile.of(op.ins[0], wide, weight.dtype)
    ops = tuple(replace(op, out=tiles[op.out.name]) if op.out and op.out.name in tiles else op for op in stage.ops)
    grown = tuple(tensors.get(t.name, t) for t in program.tensors)
    return replace(program, tensors=grown, stages=(replace(stage, ops=ops),))


def _is_product(op: TileOp, program: Pipeline) -> bool:
    """Whether an op is a linear with a bias, of 16-bit operands in rows of whole 16 bytes, or wide enough to be padded
    (``graph.rewrites.epilogues``)."""
    if op.kind != "linear" or len(op.params) != 2:
        return False
    weight = program.tensor(op.params[0])
    out, depth = weight.shape
    return weight.dtype in ("bf16", "f16") and not out % ALIGNED and (out >= WIDE or not depth % ALIGNED)
