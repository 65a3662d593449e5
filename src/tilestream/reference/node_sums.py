"""What the rows of each node sum to: rows come tile after tile, in any order of tiles, and nodes without rows are 0."""

from __future__ import annotations

import torch
from torch import Tensor

from tilestream.reference.einsum import COMBINE

HOW = {"sum": "sum", "max": "amax", "min": "amin"}


class NodeSums:
    """The result of one store with receivers.

    Args:
        combine: ``sum``, ``max`` or ``min``.
        starts: [nodes + 1], where the rows of each node start.
        dtype: in which rows are combined.
    """

    def __init__(self, combine: str, starts: Tensor, features: int, dtype: torch.dtype) -> None:
        self._how, self._empty = HOW[combine], starts.diff() == 0
        shape = len(starts) - 1, features
        self._total = torch.full(shape, COMBINE[combine][0], dtype=dtype, device=starts.device)

    def add(self, receivers: Tensor, rows: Tensor) -> None:
        """``rows`` [some, features] are those of nodes ``receivers`` [some]."""
        places = receivers.long()[:, None].expand_as(rows)
        self._total.scatter_reduce_(0, places, rows.to(self._total.dtype), self._how)

    def result(self) -> Tensor:
        """[nodes, features]"""
        return self._total.masked_fill(self._empty[:, None], 0.0)
