"""Interactions for tests: vectors that are looked up and that are there, pairs of them, and models that have some."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tilestream.graph.interaction.op import interaction, interaction_backward

BF16, F16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Case:
    """``vectors`` of ``features`` elements; the first is there, the others are rows of tables of unequal sizes.

    ``diagonal``: pairs of a vector with itself too; ``twice``: some pairs again, and the other way round.
    """

    vectors: int
    features: int
    batch: int
    head: int = 0
    diagonal: bool = False
    twice: bool = False
    dtype: torch.dtype = BF16

    def operands(self, device: str = "cpu") -> tuple[list[Tensor], list[Tensor | None], Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.vectors * 1000 + self.batch)
        rows = [self.batch, *(40 + 7 * v for v in range(1, self.vectors))]
        sources = [torch.randn(n, self.features, generator=generator).to(self.dtype) for n in rows]
        indices = [
            torch.randint(max(n, 1), (self.batch,), generator=generator, dtype=torch.int32 if v % 3 else torch.int64)
            for v, n in enumerate(rows)
        ]
        pairs = [(i, j) for i in range(self.vectors) for j in range(i + self.diagonal)]
        if self.twice:
            pairs += [*pairs[:3], *((j, i) for i, j in pairs[1:5]), pairs[0]]
        first, second = torch.tensor(pairs, device=device).T.contiguous()
        second = torch.where(torch.arange(len(second), device=device) % 4 == 1, second - self.vectors, second)
        names = [None, *(i.to(device) for i in indices[1:])]
        return [s.to(device) for s in sources], names, first, second

    def given(self, device: str = "cpu") -> Tensor:
        """Gradients of the products."""
        pairs = len(self.operands()[2])
        return torch.randn(self.batch, pairs, generator=torch.Generator().manual_seed(7)).to(device, self.dtype)

    def forward(self, device: str = "cpu") -> tuple[Tensor, Tensor]:
        """By PyTorch's operators: in the case's dtype, and in float64."""
        sources, *rest = self.operands(device)
        return interaction(sources, *rest, self.head), interaction([s.double() for s in sources], *rest, self.head)

    def backward(self, device: str = "cpu") -> tuple[Tensor, Tensor]:
        sources, *rest = self.operands(device)
        given, wide = self.given(device), [s.double() for s in sources]
        return interaction_backward(sources, *rest, given), interaction_backward(wide, *rest, given.double())


class Recommender(nn.Module):
    """A small DLRM.

    ``how``: the vectors are joined as ``stack``, as facebookresearch's ``cat`` and view, as one ``block`` looked up at
    once, or as ``bags`` that are looked up elsewhere. ``alone``: products are joined to nothing.
    """

    def __init__(self, how: str = "stack", alone: bool = False, features: int = 16, tables: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.alone = how, alone
        self.bottom = nn.Linear(8, features)
        one = nn.EmbeddingBag if how == "bags" else nn.Embedding
        self.tables = nn.ModuleList(one(30 + 5 * k, features) for k in range(1 if how == "block" else tables))
        pairs = (tables + 1) * tables // 2
        self.top = nn.Linear(pairs + (0 if alone else features), 8)
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, dense: Tensor, indices: Tensor) -> Tensor:
        x = torch.relu(self.bottom(dense))
        if self.how == "block":
            z = torch.cat([x.unsqueeze(1), self.tables[0](indices.T)], 1)
        elif self.how == "bags":
            rows = [table(i.unsqueeze(1)) for table, i in zip(self.tables, indices, strict=True)]
            z = torch.stack([x, *rows], 1)
        elif self.how == "cat":
            rows = [table(i) for table, i in zip(self.tables, indices, strict=True)]
            z = torch.cat([x, *rows], 1).view(len(x), -1, x.shape[1])
        else:
            z = torch.stack([x, *(table(i) for table, i in zip(self.tables, indices, strict=True))], 1)
        products = (z @ z.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(products if self.alone else torch.cat([x, products], 1))


def inputs(batch: int, dtype: torch.dtype = BF16, tables: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    return torch.randn(batch, 8, generator=generator).to(dtype), torch.randint(30, (tables, batch), generator=generator)
