"""Random modules over masks of truth values, with rows that hold nothing; what PyTorch makes of them is the oracle.

A module draws masks from what it is given (sums, products, ors, ands and negations of them), and uses them as
attention, softmax and message passing do.
"""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from sparse_modules import rand
from torch import Tensor, nn

from tilestream.errors import TilestreamError
from tilestream.sparse import Schedule, compile
from tilestream.sparse.cpu import CpuProgram

MASKS = [
    lambda a, b: a + b,
    lambda a, b: a | b,
    lambda a, b: a & b,
    lambda a, b: a * b,
    lambda a, b: ~a,
    lambda a, b: a ^ b,
    lambda a, b: a,
    lambda a, b: b,
    lambda a, b: a == b,
    lambda a, b: (a + b) * ~b,
    lambda a, b: a.logical_not() + b,
    lambda a, b: torch.maximum(a, b),
    lambda a, b: a.t() | b,
]
USES = [
    lambda x, m: x.masked_fill(~m, -1e9).softmax(-1),
    lambda x, m: x.masked_fill(m, -1e9).softmax(0),
    lambda x, m: F.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=m[None])[0],
    lambda x, m: x * m,
    lambda x, m: x + m,
    lambda x, m: m.sum(1, keepdim=True) * x,
    lambda x, m: x * m / m.sum(1, keepdim=True).clamp(min=1),
    lambda x, m: m.to(x.dtype) @ x,
    lambda x, m: x.masked_fill(~m, 0.0),
    lambda x, m: torch.where(m, x, x * 2),
    lambda x, m: x * m.any(1, keepdim=True) - m.all(0).to(x.dtype),
    lambda x, m: torch.cat([m, ~m], 1).sum(1, keepdim=True) + x,
    lambda x, m: x.masked_fill(~m, -torch.inf).exp() @ x,
]
LAST = [
    lambda x, m: x.masked_fill(~m, -torch.inf).softmax(-1),
    lambda x, m: x.masked_fill(m, -torch.inf).softmax(-1),
    lambda x, m: torch.where(m, x, -torch.inf).softmax(-1),
    lambda x, m: x.masked_fill(~m, -torch.inf).softmax(0),
    lambda x, m: x.masked_fill(~m, -torch.inf).log_softmax(-1),
    lambda x, m: x.masked_fill(~m, -torch.inf).amax(-1, keepdim=True) + x,
    lambda x, m: (x.masked_fill(~m, -torch.inf) / 2).softmax(-1),
    lambda x, m: x.masked_fill(~m, -torch.inf).logsumexp(-1, keepdim=True) + x,
    lambda x, m: x * m.to(x.dtype) / m.sum(1, keepdim=True),
]
"""Uses that may give what is not finite: in the last step only, since what is not stored is not multiplied with it."""
OTHERS = [
    lambda x, a: torch.relu(x),
    lambda x, a: x.tanh(),
    lambda x, a: x * 0.5,
    lambda x, a: a @ x,
    lambda x, a: torch.sparse.mm(a, x),
    lambda x, a: a.to_dense() * x,
    lambda x, a: x / (x.abs() + 1),
    lambda x, a: x - x.mean(-1, keepdim=True),
]


class Masked(nn.Module):
    """Steps that each use a mask made of two others, or an operator between. Deterministic in its seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.nodes = rng.choice([1, 2, 4, 7])
        self.last = rng.randrange(len(LAST)) if rng.random() < 0.7 else None
        self.steps = []
        for _ in range(rng.randint(1, 4)):
            self.steps.append((rng.random() < 0.7, rng.randrange(1 << 30), rng.randrange(1 << 30)))

    def forward(self, adjacency: Tensor, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        masks = [first, second]
        for masked, choice, other in self.steps:
            if not masked:
                x = OTHERS[choice % len(OTHERS)](x, adjacency)
                continue
            made = MASKS[choice % len(MASKS)](masks[other % len(masks)], masks[choice % len(masks)])
            x = USES[other % len(USES)](x, made)
            masks.append(made)
        return x if self.last is None else LAST[self.last](x, masks[-1])


def inputs(module: Masked, seed: int) -> tuple[Tensor, ...]:
    """An adjacency in one of four layouts, features, and two masks: empty, full, with empty rows, or as they come."""
    rng, n = random.Random(seed), module.nodes
    adjacency = rand(n, n, density=rng.choice([0.0, 0.3, 1.0]), seed=seed)
    adjacency[rng.randrange(n)] = 0
    layout = rng.choice([torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
    masks = []
    for k in (1, 2):
        mask = rand(n, n, seed=seed + k) > rng.choice([-9.0, 0.0, 0.6, 9.0])
        mask[rng.randrange(n)] &= rng.random() < 0.4
        masks.append(mask)
    adjacency = adjacency if layout == torch.strided else adjacency.to_sparse(layout=layout)
    return adjacency, rand(n, n, density=rng.choice([0.3, 1.0]), seed=seed + 3), *masks


def verdict(seed: int, compiled: bool = False) -> str:
    """``right`` on every target (streams by engine and specification, loops), or the refusal of this seed's module;
    fails on a wrong value or another exception."""
    module = Masked(seed).double()
    given = inputs(module, seed)
    with torch.no_grad():
        wanted = module(given[0].to_dense(), *given[1:])
    fuse = random.Random(seed).choice(["none", "all"])
    try:
        program = compile(module, *given, schedule=Schedule(fuse=fuse))
        found = {engine: program.run(*given, engine=engine).output for engine in ("fast", "spec")}
    except TilestreamError as error:
        assert error.remedy, f"seed {seed}: no remedy for {error.cause}"
        return error.cause
    try:
        found["loops"] = CpuProgram(program, compiled=compiled).run(*given).output
    except TilestreamError as error:
        assert error.remedy, f"seed {seed}: no remedy for {error.cause}"
    for target, got in found.items():
        torch.testing.assert_close(
            got, wanted.double(), rtol=1e-7, atol=1e-9, equal_nan=True, msg=lambda m, t=target: f"seed {seed}, {t}: {m}"
        )
    return "right"
