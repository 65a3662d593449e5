"""Models whose rows are reduced over bounds that they are given, and a step of one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilestream import devices
from tilestream.graph.capture import capture
from tilestream.ir.pipeline import Pipeline, Role
from tilestream.options import Options
from tilestream.plan.find import find

ROWS, FEATURES = 30, 8


class Bag(nn.Module):
    def __init__(self, mode: str = "sum", **how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.EmbeddingBag(ROWS, FEATURES, mode=mode, **how)

    def forward(self, indices: Tensor, offsets: Tensor, shares: Tensor | None = None) -> Tensor:
        return self.net(indices, offsets, shares)


class Reduced(nn.Module):
    def __init__(self, how: str, by: str, **more: Any) -> None:
        super().__init__()
        self.how, self.by, self.more = how, by, more

    def forward(self, rows: Tensor, bounds: Tensor) -> Tensor:
        return torch.segment_reduce(torch.sin(rows), self.how, **{self.by: bounds}, **self.more)


class Jagged(nn.Module):
    def __init__(self, how: str, keepdim: bool = False) -> None:
        super().__init__()
        self.how, self.keepdim = how, keepdim

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        nested = torch.nested.nested_tensor_from_jagged(rows, offsets)
        return getattr(F.silu(nested), self.how)(dim=1, keepdim=self.keepdim)


class Csr(nn.Module):
    """A sparse matrix times a dense one, by the matrix's own tensors."""

    def __init__(self, matrix: Tensor, select: bool) -> None:
        super().__init__()
        self.select, self.values = select, nn.Parameter(matrix.values())
        self.register_buffer("rows", matrix.crow_indices())
        self.register_buffer("columns", matrix.col_indices())

    def forward(self, x: Tensor) -> Tensor:
        picked = x.index_select(0, self.columns) if self.select else x[self.columns]
        return torch.segment_reduce(self.values[:, None] * picked, "sum", offsets=self.rows)


def run(call: Any, module: nn.Module, inputs: tuple[Tensor, ...], training: bool) -> Tensor:
    """Results; in training all gradients behind them."""
    if not training:
        with torch.no_grad():
            return call(*inputs)
    module.zero_grad(set_to_none=True)
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    out = call(*leaves)
    weights = torch.linspace(1, 2, out.numel(), dtype=torch.float64, device=out.device).view_as(out)
    (out.double() * weights).sum().backward()
    grads = [x.grad for x in (*leaves, *module.parameters()) if x.grad is not None]
    return torch.cat([x.detach().double().flatten() for x in (out, *grads)])


def lookup(
    table: Tensor, indices: Tensor, starts: Tensor, shares: Tensor | None = None
) -> tuple[Pipeline, dict[str, Tensor]]:
    """What an ``EmbeddingBag`` becomes, indices in 64 bits as they come, and its tensors by name."""

    class Lookup(nn.Module):
        def forward(self, table: Tensor, indices: Tensor, starts: Tensor, shares: Tensor | None = None) -> Tensor:
            return F.embedding_bag(
                indices, table, starts, mode="sum", per_sample_weights=shares, include_last_offset=True
            )

    inputs = (table, indices, starts) if shares is None else (table, indices, starts, shares)
    (graph,) = capture(Lookup(), inputs).graphs
    (cut,) = find(graph, "inference", Options(), devices.get("h200")).cuts
    program = cut.region.program
    names = {"src": indices, "starts": starts.int()}
    tables = [t.name for t in program.tensors if t.name not in names and t.role is not Role.OUTPUT]
    return program, names | {n: table if shares is None or len(program.tensor(n).axes) == 2 else shares for n in tables}
