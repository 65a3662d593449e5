"""The operators that an interaction becomes: what they mean, on any device. ``cuda.interaction`` has their kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilestream.graph.interaction.sites import PIECE
from tilestream.graph.own import operator


def width(features: int, pairs: int, head: int) -> int:
    """Elements of a row of results: the head and the products, zeros up to 16 bytes."""
    return (features if head >= 0 else 0) + -(-pairs // PIECE) * PIECE


def stacked(sources: Sequence[Tensor], indices: Sequence[Tensor | None]) -> Tensor:
    """[batch, vectors, features]: of each source its rows, or those that its index names."""
    rows = [s if i is None else torch.ops.aten.embedding(s, i) for s, i in zip(sources, indices, strict=True)]
    return torch.stack(rows, 1)


def picked(z: Tensor, first: Tensor, second: Tensor, head: int, pad: bool = True) -> Tensor:
    """Of rows [batch, vectors, features]: row ``head``, the products of pairs of rows, and zeros up to 16 bytes."""
    products = torch.bmm(z, z.transpose(1, 2))[:, first, second]
    parts = [products, products.new_zeros(products.shape[0], -products.shape[1] % PIECE)] if pad else [products]
    return torch.cat(parts if head < 0 else [z[:, head], *parts], 1)


def multiplied(z: Tensor, first: Tensor, second: Tensor, given: Tensor) -> Tensor:
    """Gradients of rows [batch, vectors, features] from those of products of pairs of them."""
    square = z.new_zeros(z.shape[0], z.shape[1], z.shape[1])
    every = torch.arange(z.shape[0], device=z.device).unsqueeze(1)
    square = square.index_put((every, first, second), given, accumulate=True)
    return torch.bmm(square, z) + torch.bmm(square.transpose(1, 2), z)


def interaction(
    sources: Sequence[Tensor], indices: Sequence[Tensor | None], first: Tensor, second: Tensor, head: int
) -> Tensor:
    """[batch, ``width``]: vector ``head``, then of each pair the product of its vectors, then zeros."""
    return picked(stacked(sources, indices), first, second, head)


def interaction_backward(
    sources: Sequence[Tensor], indices: Sequence[Tensor | None], first: Tensor, second: Tensor, given: Tensor
) -> Tensor:
    """[vectors, batch, features]: gradients of the vectors from those of the products, [batch, pairs]."""
    return multiplied(stacked(sources, indices), first, second, given).transpose(0, 1).contiguous()


def _shape(sources: list[Tensor], indices: list[Tensor | None], first: Tensor, second: Tensor, head: int) -> Tensor:
    batch = sources[0].shape[0] if indices[0] is None else indices[0].shape[0]
    return sources[0].new_empty((batch, width(sources[0].shape[1], first.shape[0], head)))


INTERACTION = operator(interaction, _shape, "interaction:forward")
INTERACTION_BACKWARD = operator(
    interaction_backward,
    lambda sources, indices, first, second, given: given.new_empty(len(sources), given.shape[0], sources[0].shape[1]),
    "interaction:backward",
)
