"""DLRM with MLPerf's sizes (Naumov et al. 2019): facebookresearch/dlrm, ``dlrm_s_pytorch.py`` and its MLPerf script.

Layers of the reference (``--arch-mlp-bot=13-512-256-128 --arch-mlp-top=1024-1024-512-256-1
--arch-sparse-feature-size=128 --max-ind-range=40000000``):

- bottom MLP 13-512-256-128, ReLU after each;
- 26 embedding tables of 128, one index a table and sample (Criteo Terabyte);
- interaction: the products of all pairs of the 27 vectors, 351 of them, joined to the bottom's result: 479;
- top MLP 479-1024-1024-512-256-1, ReLU after each and a sigmoid at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tilestream.apps.zoo import mlp

CRITEO_ROWS = (
    *(39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10),
    *(2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36),
)
"""Rows of the 26 tables of Criteo Terabyte, indices taken modulo 40 million."""


@dataclass(frozen=True)
class Sizes:
    """``max_rows`` caps the rows of every table, so that the model fits a laptop: 1000 leaves 8 MB of tables."""

    batch: int = 2048
    dense: int = 13
    bottom: tuple[int, ...] = (512, 256, 128)
    top: tuple[int, ...] = (1024, 1024, 512, 256, 1)
    table_rows: tuple[int, ...] = CRITEO_ROWS
    max_rows: int = 40_000_000


class DLRM(nn.Module):
    """``(dense [B, 13], indices int64 [26, B])`` to click probabilities [B, 1].

    The width of the embeddings is the bottom MLP's last.
    """

    rows: Tensor
    columns: Tensor

    def __init__(self, dense: int, bottom: tuple[int, ...], top: tuple[int, ...], table_rows: tuple[int, ...]) -> None:
        super().__init__()
        width, vectors = bottom[-1], len(table_rows) + 1
        self.bottom = mlp([dense, *bottom], last=True)
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for rows in table_rows)
        hidden = mlp([width + vectors * (vectors - 1) // 2, *top])
        self.top = nn.Sequential(*hidden, nn.Sigmoid())
        rows, columns = zip(*((i, j) for i in range(vectors) for j in range(i)), strict=True)
        self.register_buffer("rows", torch.tensor(rows))
        self.register_buffer("columns", torch.tensor(columns))

    def forward(self, dense: Tensor, indices: Tensor) -> Tensor:
        x = self.bottom(dense)
        z = torch.stack([x] + [table(index) for table, index in zip(self.tables, indices, strict=True)], 1)
        products = torch.bmm(z, z.transpose(1, 2))[:, self.rows, self.columns]
        return self.top(torch.cat([x, products], 1))


def module(sizes: Sizes) -> DLRM:
    return DLRM(sizes.dense, sizes.bottom, sizes.top, tuple(min(n, sizes.max_rows) for n in sizes.table_rows))


def inputs(sizes: Sizes) -> tuple[Tensor, ...]:
    """fp32 [batch, dense] and int64 [tables, batch]; indices are uniform over each table."""
    indices = [torch.randint(min(n, sizes.max_rows), (sizes.batch,)) for n in sizes.table_rows]
    return torch.randn(sizes.batch, sizes.dense), torch.stack(indices)
