"""Programs whose rows come through an index, and tensors for them."""

from __future__ import annotations

from dataclasses import replace

import torch
from programs import Program
from random_pipelines import tensors_for

from tilestream.ir.dtypes import INDEX_DTYPES
from tilestream.ir.pipeline import Pipeline, Role

NODES = 37
"""Rows of a table whose size the pipeline does not say."""


def message(width: int = 128, layers: int = 3, act: str = "relu", dtype: str = "bf16") -> Pipeline:
    """e + LayerNorm(MLP(cat(e, v[senders], v[receivers]))): an edge update of MeshGraphNets; 512 wide, GraphCast's."""
    p = Program(f"message{width}", dtype)
    e = p.load("e", width)
    h = p.cat(e, p.gather("v", "senders", width), p.gather("v", "receivers", width))
    for layer in range(layers):
        h = p.linear(h, width, act if layer < layers - 1 else "")
    p.store(p.op("add", width, e, p.layer_norm(h)))
    return p.build()


def everywhere() -> Pipeline:
    """Two tables by one index, in products and an epilogue, cut in slices; fp32 beside bf16; no row comes in order."""
    p = Program("everywhere")
    a, b = p.gather("a", "i", 72, rows=50), p.gather("b", "i", 200)
    c = p.gather("c", "j", 24, dtype="f32")
    h = p.linear(p.cat(p.op("slice", 40, a, start=16, stop=56), b), 64, "silu")
    h = p.op("add", 64, h, p.op("slice", 64, b, start=64, stop=128))
    h = p.linear(h, 24, "relu")
    p.store(p.op("mul", 24, h, c), dtype="f32")
    return p.build()


def with_index(pipeline: Pipeline, dtype: str) -> Pipeline:
    """The same with indices of another dtype."""
    tensors = tuple(replace(t, dtype=dtype) if t.dtype in INDEX_DTYPES else t for t in pipeline.tensors)
    return replace(pipeline, tensors=tensors)


def tensors(pipeline: Pipeline, rows: int, seed: int = 0, nodes: int = NODES) -> dict[str, torch.Tensor]:
    """Random tensors of a pipeline with gathers; half of the indices count from the end of their table."""
    loads = [op for s in pipeline.stages for op in s.ops if op.index]
    tables = {op.params[0] for op in loads}
    indices = {op.index for op in loads}
    rest = tuple(t for t in pipeline.tensors if t.name not in tables | indices)
    made = tensors_for(replace(pipeline, tensors=rest, stages=()), rows, seed)
    g = torch.Generator().manual_seed(seed + 1)
    for t in pipeline.tensors:
        if t.name in tables:
            height = t.axes[0].size or nodes
            made[t.name] = tensors_for(
                replace(pipeline, tensors=(replace(t, role=Role.INPUT, axes=t.axes[1:]),), stages=()), height, seed + 2
            )[t.name]
    for name in indices:
        least = min(len(made[op.params[0]]) for op in loads if op.index == name)
        dtype = INDEX_DTYPES[pipeline.tensor(name).dtype]
        made[name] = torch.randint(-least, least, (rows,), generator=g).to(dtype)
    return made
