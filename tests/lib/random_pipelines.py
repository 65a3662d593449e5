"""Random legal pipelines and tensors for them. Needs neither pytest nor hypothesis nor a GPU.

>>> pipeline = random_pipeline(7)
>>> tensors = tensors_for(pipeline, rows=100, seed=7)
"""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from random_programs import ANYTHING, Limits, place, program

from tilestream.errors import IRError
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Pipeline, Queue, Role, TileOp, Transport


def random_pipeline(seed: int, limits: Limits = ANYTHING) -> Pipeline:
    """A legal pipeline; the same one for the same seed and limits."""
    rng = random.Random(seed)
    return cut(program(rng, limits), rng, limits)


def cut(one: Pipeline, rng: random.Random, limits: Limits = ANYTHING) -> Pipeline:
    """Spread the ops of a one-stage pipeline over stages joined by L2 queues, and by DRAM queues between launches."""
    ops = one.stages[0].ops
    count = min(max(rng.randint(1, limits.stages), rng.randint(1, limits.stages)), len(ops))
    launches = rng.randint(1, min(limits.launches, count)) if rng.random() < 0.4 else 1
    if count == 1:
        return one
    home: dict[str, int] = {}
    members: dict[int, list[TileOp]] = {k: [] for k in range(count)}
    for i, op in enumerate(ops):
        earliest = max((home[name] for name in op.ins), default=0)
        share = i * count // len(ops)
        k = max(earliest, share) if rng.random() < 0.7 else rng.randint(min(earliest, share), max(earliest, share))
        k = max(k, earliest)
        if op.kind == "store" and rng.random() < 0.8:
            k = earliest
        members[k].append(op)
        if op.out is not None:
            home[op.out.name] = k
    members = {k: m for k, m in members.items() if m}
    tiles = one.tiles()
    stages = {
        k: place(
            rng, f"s{k}", tuple(m), one.tensors, limits, max((tiles[n].features for op in m for n in op.ins), default=1)
        )
        for k, m in members.items()
    }
    launch_of = {k: k * launches // count for k in stages}
    queues = []
    for tile, k in home.items():
        takers = [c for c, m in members.items() if c != k and any(tile in op.ins for op in m)]
        near = [c for c in takers if launch_of[c] == launch_of[k]]
        far = [c for c in takers if launch_of[c] != launch_of[k]]
        where = next((op.source for op in members[k] if op.out is not None and op.out.name == tile), "")
        if near:
            ends = [stages[c] for c in (k, *near)]
            least = max(s.tiles_per_step * s.replicas for s in ends)
            depth = least + least % 2 + 2 * rng.choice((0, 0, 1, 2, 5))
            queues.append(Queue(tile, f"s{k}", tuple(f"s{c}" for c in near), Transport.L2, depth, where))
        if far:
            queues.append(Queue(tile, f"s{k}", tuple(f"s{c}" for c in far), Transport.DRAM, 0, where))
    made = replace(one, stages=tuple(stages.values()), queues=tuple(queues), strategy="spatial")
    try:
        cut_at_dram(made)
    except IRError:  # a tile that two stages of one launch would reload
        return cut(one, rng, replace(limits, launches=1))
    return made


def tensors_for(pipeline: Pipeline, rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random inputs ``[rows, features]`` and parameters of ``pipeline``, of a scale that keeps values sane."""
    g = torch.Generator().manual_seed(seed)
    made: dict[str, torch.Tensor] = {}
    biases = {p for s in pipeline.stages for op in s.ops for p in op.params[1:]}
    for t in pipeline.tensors:
        if t.role is Role.OUTPUT:
            continue
        if t.role is Role.INPUT:
            value = torch.randn(rows, t.features, generator=g).clamp(-3, 3)
        elif len(t.shape) == 2:
            value = torch.randn(t.shape, generator=g) / t.features**0.5
        elif t.name in biases:
            value = 0.2 * torch.randn(t.shape, generator=g)
        else:
            value = 0.5 + torch.rand(t.shape, generator=g)
        made[t.name] = value.to(TORCH_DTYPES[t.dtype])
    return made
