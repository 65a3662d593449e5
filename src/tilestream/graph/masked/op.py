"""The operator that attention over the pairs of a mask becomes: what it means, on any device.

``run.masked_attention`` has it as a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilestream.graph.own import operator
from tilestream.kernels.parts.pairs import AXES, LOAD, PairMask


def kept_pairs(mask: PairMask, read: Sequence[Tensor], sizes: Sequence[int], device: torch.device) -> Tensor:
    """bool [batches, heads, queries, keys]: which pairs a mask keeps, by torch."""
    shapes = ((-1, 1, 1, 1), (-1, 1, 1), (-1, 1), (-1,))
    at = {a: torch.arange(n, device=device).view(s) for a, n, s in zip(AXES, sizes, shapes, strict=True)}
    made: list[Tensor] = []

    def operand(x: str | int) -> Tensor:
        return at[x] if x in at else made[int(x[1:])] if isinstance(x, str) else torch.tensor(x, device=device)

    for name, *operands in mask.instructions:
        if name == LOAD:
            source, *indices = operands
            made.append(read[int(source)][tuple(map(operand, indices))] if indices else read[int(source)])
        elif name == "constant":
            made.append(operand(operands[0]))
        else:
            made.append(getattr(torch, str(name))(*map(operand, operands)))
    return torch.as_tensor(made[-1], device=device).bool().expand(*sizes)


def _listed(count: Tensor, blocks: Tensor, rows: int, keys: int, sizes: Sequence[int]) -> Tensor:
    """bool like the mask: whether a pair's block is in a list."""
    there = torch.arange(blocks.shape[-1], device=blocks.device) < count[..., None]
    flags = torch.zeros_like(blocks, dtype=torch.bool).scatter(-1, blocks.long(), there)
    query, key = (torch.arange(n, device=blocks.device) for n in sizes[2:])
    return flags[:, :, query[:, None] // rows, key // keys].expand(*sizes)


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, blocks: list[Tensor], read: list[Tensor], keeps: str,
    block: list[int], differs: list[int], scale: float, by_token: bool,
) -> Tensor:  # fmt: skip
    sizes = (*differs, query.shape[2], key.shape[2])
    kept = kept_pairs(PairMask.of(keeps), read, sizes, query.device)
    if blocks:
        kept = kept & _listed(blocks[0], blocks[1], block[0], block[1], sizes)
    if len(blocks) > 2:
        kept = kept | _listed(blocks[2], blocks[3], block[0], block[1], sizes)
    wide = torch.promote_types(query.dtype, torch.float32)
    key, value = (t.to(wide).repeat_interleave(query.shape[1] // key.shape[1], 1) for t in (key, value))
    scores = (query.to(wide) @ key.mT) * scale
    weights = torch.softmax(scores.masked_fill(~kept, float("-inf")), -1)
    weights = torch.where(kept.any(-1, keepdim=True), weights, 0.0)  # as eager has it of a row that keeps none
    return empty_result(query, by_token).copy_(weights @ value)


def empty_result(query: Tensor, by_token: bool) -> Tensor:
    """Like ``query`` [batch, heads, queries, features]; in memory tokens come before heads if ``by_token``."""
    batch, heads, queries, features = query.shape
    if by_token:
        return query.new_empty(batch, queries, heads, features).transpose(1, 2)
    return query.new_empty(query.shape)


MASKED = operator(masked_attention, lambda query, *rest: empty_result(query, rest[-1]))
