"""Weights that lie transposed: which do, and the launches that copy them (``kernels/operators/turn``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from tilestream.cuda import driver
from tilestream.cuda.beside import loaded
from tilestream.cuda.workspace import Memory, Workspaces
from tilestream.ir.pipeline import DTYPE_BYTES, Tensor
from tilestream.kernels.operators.turn import BLOCKS, ENTRIES, entries, kernel
from tilestream.kernels.parts.params import Where
from tilestream.kernels.parts.source import Space


def lies_transposed(t: torch.Tensor) -> bool:
    """Whether a matrix is the transpose of rows that lie one behind another, with gaps or without."""
    return t.dim() == 2 and t.stride(0) == 1 and t.stride(1) >= max(t.shape[0], 2)


class Turner:
    """Copies of ``weights``, parameters of a pipeline whose tensors lie transposed."""

    def __init__(self, weights: Sequence[Tensor], device: torch.device) -> None:
        self.weights, self.device = weights, device
        sizes = tuple((w.name, prod(w.shape) * DTYPE_BYTES[w.dtype]) for w in weights)
        self.space = Space(sizes, frozenset())
        self.arenas = Workspaces(lambda: Memory(self.space.total))

    def prepare(
        self, where: Mapping[str, Where], stream: int, capture: int
    ) -> tuple[dict[str, Where], list[driver.PreparedLaunch]]:
        """Where the copies are, and what to enqueue on ``stream`` before they are read.

        Args:
            where: each weight's address, and the distance of its columns in elements.
        """
        targets = self.space.at(self.arenas.take(stream, capture).address)
        copies = {w.name: Where(targets[w.name], w.shape[1], w.shape[0]) for w in self.weights}
        launches = []
        for first in range(0, len(self.weights), ENTRIES):
            some = self.weights[first : first + ENTRIES]
            values = {"entries": entries(some, where, [targets[w.name] for w in some])}
            launches += loaded(kernel(len(some)), self.device.index or 0).prepare({}, BLOCKS, stream, 0, values)
        return copies, launches
