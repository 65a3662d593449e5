"""Copies of weights that lie transposed, which kernels read by rows: one launch for all of a pipeline's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from tilestream.cuda import beside, driver
from tilestream.cuda.workspace import Memory, Workspaces
from tilestream.ir.pipeline import DTYPE_BYTES, Tensor
from tilestream.kernels.parts.params import LINE_BYTES, Field, Struct, Where
from tilestream.kernels.stream.model import ceil_to

ENTRIES = 16
"""Weights that one launch turns: the entries are the kernel's argument."""
BLOCKS = 64
"""Of a weight: one a square of 32 x 32, up to 256 x 256."""


def lies_transposed(t: torch.Tensor) -> bool:
    """Whether a matrix is the transpose of rows that lie one behind another, with gaps or without."""
    return t.dim() == 2 and t.stride(0) == 1 and t.stride(1) >= max(t.shape[0], 2)


ENTRY = Struct(
    "TurnEntry",
    (
        Field("const void*", "source", note="element (r, c) of the matrix that is wanted is at c * stride + r,"),
        Field("void*", "target", note="and goes to r * columns + c"),
        *(Field("int", name) for name in ("rows", "columns", "stride", "element_bytes")),
    ),
)
PARAMS = Struct("TurnParams", (Field(ENTRY, "entries", ENTRIES),))
UNUSED = dict.fromkeys((field.name for field in ENTRY.fields), 0)
TEXT = beside.text_of("turn.cuh", PARAMS)


class _Arena(Memory):
    """Memory for the copies."""

    def __init__(self, sizes: Sequence[int]) -> None:
        at = [0]
        for size in sizes:
            at.append(at[-1] + ceil_to(size, LINE_BYTES))
        super().__init__(at[-1])
        self.addresses = [self.address + offset for offset in at[:-1]]


class Turner:
    """Copies of ``weights``, parameters of a pipeline whose tensors lie transposed."""

    def __init__(self, weights: Sequence[Tensor], device: torch.device) -> None:
        self.weights = weights
        sizes = [prod(w.shape) * DTYPE_BYTES[w.dtype] for w in weights]
        self.arenas = Workspaces(lambda: _Arena(sizes))
        self.function = beside.function("tilestream_turn", TEXT, device.index or 0)

    def prepare(
        self, where: Mapping[str, Where], stream: int, capture: int
    ) -> tuple[dict[str, Where], list[driver.PreparedLaunch]]:
        """Where the copies are, and what to enqueue on ``stream`` before they are read.

        Args:
            where: each weight's address, and the distance of its columns in elements.
        """
        targets = self.arenas.take(stream, capture).addresses
        copies = {
            w.name: Where(target, w.shape[1], w.shape[0]) for w, target in zip(self.weights, targets, strict=True)
        }
        launches = []
        for first in range(0, len(self.weights), ENTRIES):
            some = self.weights[first : first + ENTRIES]
            entries = [
                {
                    "source": where[w.name].address,
                    "target": copies[w.name].address,
                    "rows": w.shape[0],
                    "columns": w.shape[1],
                    "stride": where[w.name].stride,
                    "element_bytes": DTYPE_BYTES[w.dtype],
                }
                for w in some
            ]
            params = PARAMS.pack(entries=entries + [UNUSED] * (ENTRIES - len(entries)))
            launches.append(self.function.prepare((BLOCKS, len(some)), 256, stream, params))
        return copies, launches
