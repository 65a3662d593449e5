"""Programs of wide layers, and their stages that hold columns."""

from __future__ import annotations

import torch
from programs import Program
from torch import nn

from tilestream.ir.pipeline import Pipeline
from tilestream.plan.passes.forms import hold_columns


def mlp(*widths: int, act: str = "relu", dtype: str = "bf16") -> Pipeline:
    p = Program("mlp", dtype)
    h = p.load("x", widths[0])
    for k, width in enumerate(widths[1:]):
        h = p.linear(h, width, act if k < len(widths) - 2 else "")
    p.store(h)
    return p.build()


def points(*widths: int, act: str = "", dtype: str = "bf16") -> Pipeline:
    """Maxima over every 16 rows of what a chain of layers makes."""
    p = Program("points", dtype)
    h = p.load("x", widths[0])
    for k, width in enumerate(widths[1:]):
        h = p.linear(h, width, "relu" if k < len(widths) - 2 else act)
    p.store(p.op("max_rows", widths[-1] // 16, h))
    return p.build()


def residual(width: int) -> Pipeline:
    """x + W2 silu(W1 x): a wide stream that is an operand, and meets a result element by element."""
    p = Program("residual")
    x = p.load("x", width)
    p.store(p.op("add", width, x, p.linear(p.linear(x, width, "silu"), width)))
    return p.build()


def held(p: Pipeline, replicas: int = 2, over: int = 256, widest: int = 256) -> Pipeline:
    return hold_columns(p.with_stages((p.stages[0].with_(replicas=replicas),)), over, widest)


class Points(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(3, 64), nn.Linear(64, width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.two(self.one(x).relu()).amax(1))
