"""Random modules of ordinary operators over a graph, features and a mask; what PyTorch makes of them is the oracle."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from sparse_modules import rand
from torch import Tensor, nn

from tilestream.errors import TilestreamError
from tilestream.sparse import Schedule, compile, compressed
from tilestream.sparse.cpu import CpuProgram

UNARY = [
    torch.relu,
    torch.tanh,
    torch.sigmoid,
    torch.abs,
    torch.neg,
    torch.square,
    torch.cos,
    F.elu,
    F.softplus,
    F.silu,
    F.gelu,
    F.hardswish,
    F.relu6,
    F.selu,
    F.mish,
    lambda x: x.clamp(-0.5, 0.7),
    lambda x: x.clamp(max=0.3),
    torch.sign,
    lambda x: x * 0.5 - 1,
    lambda x: 2 - x,
    lambda x: x / 3,
    lambda x: F.leaky_relu(x, 0.2),
    lambda x: (x * x + 1).rsqrt(),
    lambda x: x**3,
    lambda x: x.exp().log1p(),
    lambda x: x.masked_fill(x > 0.4, 0.1),
    lambda x: torch.where(x > 0, x, -2.0),
    lambda x: (x >= x.mean()).to(x.dtype),
    lambda x: F.dropout(x, 0.5, False),
    lambda x: x.detach().clone(),
    F.logsigmoid,
    lambda x: x.where(x < 0.2, x * x),
    lambda x: F.threshold(x, 0.1, 0.5),
    lambda x: -x.abs().sqrt(),
]
ROWS = [
    lambda x: x.softmax(-1),
    lambda x: x.log_softmax(-1),
    lambda x: F.layer_norm(x, x.shape[-1:]),
    lambda x: x - x.mean(-1, keepdim=True),
    lambda x: F.normalize(x, dim=-1),
    lambda x: x / (x.norm(1, dim=-1, keepdim=True) + 1),
    lambda x: x * x.amax(-1, keepdim=True),
    lambda x: x - x.logsumexp(-1, keepdim=True),
    lambda x: x.cumsum(0),
    lambda x: x + x.sum(0),
    lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-5),
    lambda x: (x - x.mean(0)) / (x.std(0) + 1),
    lambda x: x.sort(-1).values,
    lambda x: x.flip(0),
]
BINARY = [
    torch.add,
    torch.sub,
    torch.mul,
    torch.maximum,
    torch.minimum,
    lambda x, y: x / (y.abs() + 1),
    lambda x, y: torch.where(x > y, x, y * 2),
    lambda x, y: x * (y > 0),
    lambda x, y: x.lerp(y, 0.3),
    lambda x, y: torch.addcmul(x, y, y),
    lambda x, y: (x * y).sum(-1, keepdim=True) + x,
]


def mean(x: Tensor, edges: Tensor) -> Tensor:
    made = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
    return made / torch.bincount(edges[1], minlength=len(x)).clamp(min=1)[:, None]


def attention(x: Tensor, edges: Tensor) -> Tensor:
    score = F.leaky_relu(x.sum(-1)[edges[0]] - x.mean(-1)[edges[1]], 0.2)
    largest = torch.full((len(x),), -torch.inf, dtype=x.dtype).scatter_reduce(0, edges[1], score, "amax")
    power = (score - largest[edges[1]]).exp()
    share = power / torch.zeros(len(x), dtype=x.dtype).index_add(0, edges[1], power)[edges[1]]
    return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]] * share[:, None])


class Random(nn.Module):
    """A stack of tensors; each step takes some and adds one. Deterministic in its seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.width, self.nodes = rng.choice([1, 2, 4, 6]), rng.choice([2, 5, 8])
        self.steps = [(rng.random(), rng.randrange(1 << 30)) for _ in range(rng.randint(1, 6))]
        torch.manual_seed(seed)
        self.linears = nn.ModuleList(nn.Linear(self.width, self.width, bias=rng.random() < 0.7) for _ in self.steps)
        self.norm = nn.BatchNorm1d(self.width)
        self.attention = nn.MultiheadAttention(self.width, 1, batch_first=True)
        self.double().eval()

    def forward(self, adjacency: Tensor, x: Tensor, mask: Tensor, edges: Tensor) -> Tensor:
        made = [x]
        for (kind, choice), linear in zip(self.steps, self.linears, strict=True):
            last, other = made[-1], made[choice % len(made)]
            made.append(self.step(kind, choice, linear, last, other, adjacency, mask, edges))
        return made[-1]

    def step(
        self, kind: float, choice: int, linear: nn.Module, x: Tensor, y: Tensor, a: Tensor, mask: Tensor, edges: Tensor
    ) -> Tensor:
        if kind < 0.25:
            return UNARY[choice % len(UNARY)](x)
        if kind < 0.35:
            return ROWS[choice % len(ROWS)](x)
        if kind < 0.5:
            return BINARY[choice % len(BINARY)](x, y)
        if kind < 0.6:
            return linear(x)
        if kind < 0.7:
            return torch.sparse.mm(a, x) if choice % 2 else a @ x
        if kind < 0.78:
            how = choice % 5
            if how == 0:
                return attention(x, edges)
            if how == 1:
                index = edges[1][:, None].expand(-1, x.shape[1])
                return torch.zeros_like(x).scatter_reduce(0, index, x[edges[0]], "amax", include_self=False)
            return (
                mean(x, edges)
                if how == 2
                else torch.zeros_like(x).index_add(0, edges[1], torch.relu(x[edges[0]] - y[edges[1]]))
            )
        if kind < 0.86:
            how = choice % 3
            scores = x @ y.t()
            if how == 0:
                return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ x
            if how == 1:
                return F.scaled_dot_product_attention(x[None], y[None], x[None], attn_mask=mask[None])[0]
            return (scores * mask) @ y
        if kind < 0.9:
            return self.norm(x)
        if kind < 0.93:
            return self.attention(x[None], y[None], x[None], attn_mask=~mask, need_weights=False)[0][0]
        if kind < 0.96:
            return torch.cat([x, y], 1)[:, choice % 2 :: 2].reshape(-1, self.width)[: self.nodes]
        return torch.stack([x, y]).transpose(0, 1).sum(1) if choice % 2 else x.expand(2, *x.shape).amax(0)


def inputs(module: Random, seed: int) -> tuple[Tensor, ...]:
    """An adjacency in one of four layouts, features, a mask without an empty row, and edges."""
    rng, n = random.Random(seed), module.nodes
    adjacency = rand(n, n, density=rng.choice([0.1, 0.4, 1.0]), seed=seed)
    layout = rng.choice([torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
    adjacency = adjacency if layout == torch.strided else adjacency.to_sparse(layout=layout)
    mask = (rand(n, n, seed=seed + 1) > 0) | torch.eye(n, dtype=torch.bool)
    edges = torch.randint(0, n, (2, rng.choice([1, 7, 20])), generator=torch.Generator().manual_seed(seed))
    return adjacency, rand(n, module.width, density=rng.choice([0.3, 1.0]), seed=seed + 2), mask, edges


def verdict(seed: int, engine: str = "fast") -> str:
    """``right``, as streams and as loops, or the refusal of the module of this seed; fails on a wrong value or another
    exception."""
    module = Random(seed)
    given = inputs(module, seed)
    with torch.no_grad():
        wanted = module(given[0].to_dense(), *given[1:])
    rng = random.Random(seed)
    formats = {"x": compressed(2)} if rng.random() < 0.3 else {}
    if rng.random() < 0.3:
        formats |= {"linears.0.weight": compressed(2)}
    try:
        program = compile(module, *given, formats=formats, schedule=Schedule(fuse=rng.choice(["none", "all"])))
        got = program.run(*given, engine=engine).output
    except TilestreamError as error:
        assert error.remedy, f"seed {seed}: no remedy for {error.cause}"
        return error.cause
    _same(got, wanted, f"seed {seed}")
    try:
        loops = CpuProgram(program, compiled=False)
    except TilestreamError as error:
        assert error.remedy, f"seed {seed}: no remedy for {error.cause}"
        return "right"
    _same(loops.run(*given).output, wanted, f"seed {seed}, as loops")
    return "right"


def _same(got: Tensor, wanted: Tensor, what: str) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-9, equal_nan=True, msg=lambda m: f"{what}: {m}")


__all__ = ["Random", "verdict"]
