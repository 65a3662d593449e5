"""Attentions over few keys: operands as views of one product, what is added, and the judgement of results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilestream.graph.short_attention import SHORT, short_attention_gradients
from tilestream.run import oracle


@dataclass(frozen=True)
class Case:
    """Sizes; ``added``: the shape of each term; ``cross``: keys are not as many as queries."""

    batches: int
    heads: int
    queries: int
    features: int
    added: tuple[tuple[int, int, int, int], ...] = ()
    keys: int = 0
    dtype: torch.dtype = torch.bfloat16

    def operands(self, device: str = "cpu") -> list[Tensor]:
        """Queries, keys and values, heads' features beside each other in rows of one product."""
        generator = torch.Generator().manual_seed(self.queries)
        width = self.heads * self.features
        rows = torch.randn(self.batches, max(self.queries, self.keys), 3 * width, generator=generator).to(self.dtype)
        parts = rows.to(device).view(*rows.shape[:2], 3, self.heads, self.features).permute(2, 0, 3, 1, 4)
        return [parts[0, :, :, : self.queries], *(parts[k, :, :, : self.keys or self.queries] for k in (1, 2))]

    def terms(self, device: str = "cpu") -> list[Tensor]:
        """What is added: of sequences that differ a mask, some rows of which keep nothing and some nearly nothing."""
        generator = torch.Generator().manual_seed(1)
        made = [torch.randn(shape, generator=generator) for shape in self.added]
        for mask in made:
            if len(mask) > 1:
                mask[torch.rand(mask.shape, generator=generator) < 0.3] = float("-inf")
                mask[-1, :, -1] = float("-inf")
                mask[0, :, 0] = torch.finfo(self.dtype).min
        return [t.to(self.dtype).to(device) for t in made]


CASES = {
    "a window of Swin's": Case(3, 2, 49, 32, ((1, 2, 49, 49),)),
    "shifted windows": Case(6, 1, 49, 32, ((1, 1, 49, 49), (2, 1, 49, 49))),
    "ViT": Case(1, 1, 197, 64),
    "padding": Case(2, 1, 128, 64, ((2, 1, 1, 128),)),
    "one key": Case(2, 2, 1, 16),
    "one query, f16": Case(2, 1, 1, 64, (), 50, torch.float16),
    "a bias by query and key, f16": Case(1, 2, 24, 16, ((1, 2, 24, 40),), 40, torch.float16),
    "a bias and padding, not in registers": Case(2, 1, 66, 64, ((1, 1, 66, 66), (2, 1, 1, 66))),
    "128 keys of 128": Case(1, 1, 20, 128, (), 128),
    "256 keys": Case(1, 1, 20, 64, (), 256),
}

WHOLE_HEADS = {
    "ViT": Case(2, 2, 197, 64),
    "a tile and six queries": Case(2, 3, 70, 64),
    "one tile a head, f16": Case(3, 4, 50, 64, (), 0, torch.float16),
    "more queries than keys": Case(1, 2, 130, 64, (), 49),
    "256 keys, two groups": Case(1, 2, 100, 64, (), 256),
    "257 keys, two products": Case(1, 2, 257, 64),
    "a bias, odd keys": Case(2, 2, 67, 64, ((1, 2, 67, 67),)),
    "a bias and padding": Case(4, 1, 66, 64, ((1, 1, 66, 66), (2, 1, 1, 66))),
    "padding of 258 keys": Case(2, 2, 40, 64, ((2, 1, 1, 258),), 258),
}
"""Of warpgroups."""


def judged(
    got: Tensor, case: Case, operands: list[Tensor], terms: list[Tensor], scale: float, safe: bool = True
) -> bool:
    """Whether a result is as near to float64 as PyTorch's operators are at its dtype."""
    exact = SHORT(*(t.cpu().double() for t in operands), [t.cpu().double() for t in terms], scale, safe).to(got.device)
    scores = operands[0] @ operands[1].mT * scale
    for term in terms:
        scores = scores + term.repeat(case.batches // len(term), 1, 1, 1)
    weights = scores.softmax(-1)
    if safe:
        weights = weights.masked_fill((scores == float("-inf")).all(-1, keepdim=True), 0.0)
    return oracle.judge([got], [weights @ operands[2]], [exact])[2]


def given_gradient(case: Case, device: str = "cpu") -> Tensor:
    """Of the result, by tokens as the next layer's gradient is."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(case.batches, case.queries, case.heads, case.features, generator=generator)
    return rows.to(case.dtype).to(device).transpose(1, 2)


def judged_gradients(got: Sequence[Tensor], given: Sequence[Any]) -> bool:
    """Whether results of ``GRADIENTS`` are as near to float64 as PyTorch's operators are at its dtype."""
    gradient, query, key, value, terms, scale, safe, summed, _ = given
    exact = short_attention_gradients(*map(_exactly, given))  # pyright: ignore
    scores = query @ key.mT * scale
    for term in terms:
        scores = scores + term.repeat(len(query) // len(term), 1, 1, 1)
    weights = scores.softmax(-1)
    if safe:
        weights = weights.masked_fill((scores == float("-inf")).all(-1, keepdim=True), 0.0)
    by_score = torch.ops.aten._softmax_backward_data(gradient @ value.mT, weights, -1, weights.dtype)
    rows = [t.transpose(1, 2) for t in (by_score @ key * scale, by_score.mT @ query * scale, weights.mT @ gradient)]
    together = query.shape[2] == key.shape[2]
    eager = [torch.stack(rows, 2)] if together else [rows[0][:, :, None], torch.stack(rows[1:], 2)]
    if got[2].dim() == 6:  # of a long head, in parts
        got, exact = ([firsts, sums.sum(0)] for firsts, _, sums in (got, exact))
    made, right = [*got[: len(eager)]], [t.to(gradient.device) for t in exact[: len(eager)]]
    if summed:
        made.append(got[2].sum(0))
        right.append(exact[2].sum(0).to(gradient.device))
        eager.append(by_score.sum(0).float())
    return oracle.judge(made, eager, right)[2]


def _exactly(x: Any) -> Any:
    if isinstance(x, list):
        return [_exactly(t) for t in x]
    return x.cpu().double() if isinstance(x, Tensor) else x
