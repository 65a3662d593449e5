"""Layers of one row that change states: programs of launches, and a recurrent layer unlike RWKV's."""

from __future__ import annotations

from functools import cache

import torch
from programs import Program
from torch import Tensor, nn

from tilestream.ir.pipeline import Pipeline, Role


@cache
def cell(width: int = 72, hidden: int = 40, dtype: str = "bf16") -> Pipeline:
    """A norm and mixes in front of three products of one column, which change a state and are stored with it; rows and
    a value of the row behind them; another product of other columns; and a row that is stored as it is made."""
    p = Program("cell", dtype)
    x, before = p.load("x", width), p.load("before", width)
    normed = p.layer_norm(x)
    mixed = []
    for n in range(2):
        mix = p.tensor(f"mix{n}", Role.PARAMETER, width)
        kept = p.op("mul", width, before, params=(p.tensor(f"kept{n}", Role.PARAMETER, width),))
        mixed.append(p.op("add", width, p.op("mul", width, normed, params=(mix,)), kept))
    gate, key, value = p.linear(mixed[0], hidden), p.linear(mixed[1], hidden, bias=False), p.linear(mixed[0], hidden)
    state, decay = p.load("state", hidden, dtype="f32"), p.load("decay", hidden)
    most = p.op("maximum", hidden, state, key, dtype="f32")
    new = p.op("add", hidden, p.op("mul", hidden, p.op("exp", hidden, decay, dtype="f32"), most, dtype="f32"), value)
    scale = p.op("sigmoid", 1, p.op("mean", 1, x))
    p.store(p.op("mul", hidden, p.op("mul", hidden, p.op("sigmoid", hidden, gate), new), scale))
    p.store(p.op("cast", hidden, new, dtype="f32"), dtype="f32")
    p.store(normed)
    p.store(p.op("square", width, p.op("add", width, p.linear(mixed[1], width, "relu"), normed)))
    return p.build()


def layer(depth: int, columns: int, dtype: str = "bf16") -> Pipeline:
    """A product of a row, which is added to another."""
    p = Program(f"layer{depth}x{columns}", dtype)
    p.store(p.op("add", columns, p.linear(p.load("x", depth), columns), p.load("residual", columns)))
    return p.build()


def columns_of_one(width: int = 72, columns: int = 40) -> Pipeline:
    """What is loaded of one column is multiplied with a row in front and with a product's columns."""
    p = Program("columns of one")
    x, scale = p.load("x", width), p.load("scale", 1)
    p.store(p.op("mul", columns, p.linear(p.op("mul", width, x, scale), columns), p.load("gate", 1)))
    return p.build()


class GatedRecurrence(nn.Module):
    """``h = f h + (1 - f) v`` with gates of the row, ``y = x + W (h silu(g))``; the state is of float32."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.forget, self.value, self.gate = (nn.Linear(width, hidden) for _ in range(3))
        self.output = nn.Linear(hidden, width)
        self.state = nn.Buffer(torch.zeros(1, hidden, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        forget = torch.sigmoid(self.forget(normed)).to(self.state.dtype)
        state = forget * self.state + (1 - forget) * self.value(normed)
        self.state.copy_(state)
        return x + self.output(state.to(x.dtype) * nn.functional.silu(self.gate(normed)))


def recurrent(width: int, hidden: int, layers: int = 2) -> nn.Sequential:
    """Layers of bf16 whose states are float32."""
    model = nn.Sequential(*(GatedRecurrence(width, hidden) for _ in range(layers))).bfloat16().eval()
    for layer in model:
        layer.state.data = layer.state.float()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    return model
