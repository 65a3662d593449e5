"""Blocks of real models, written in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Conv1D(nn.Module):
    """A linear layer whose weight lies ``[in, out]``, as in Hugging Face's GPT-2."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(ins, outs) / ins**0.5), nn.Parameter(torch.randn(outs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class Gpt2Block(nn.Module):
    """LayerNorm, FFN with GELU written out, dropout that does nothing, residual: [B, T, width] to itself."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), Conv1D(width, hidden), Conv1D(hidden, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        h = 0.5 * h * (1.0 + torch.tanh(0.7978845608028654 * (h + 0.044715 * torch.pow(h, 3.0))))
        return x + self.drop(self.down(h))


class Mixing(nn.Module):
    """An MLP-Mixer's token mixing: [B, tokens, width] to itself, by linears over the tokens."""

    def __init__(self, tokens: int, hidden: int, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(tokens, hidden), nn.Linear(hidden, tokens)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(F.gelu(self.up(self.norm(x).transpose(1, 2))))
        return x + y.transpose(1, 2)
