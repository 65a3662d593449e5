"""Device memory that a launch needs besides its tensors: rings, flags, packed weights."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from tilestream.cuda.tables import Tables
from tilestream.dtypes import TORCH_DTYPES

log = logging.getLogger(__name__)
LINE_BYTES = 128


@dataclass
class Workspace:
    """``flags``: epoch line, exit counter line, then the queues' lines; zero at first. ``rings``: one a queue."""

    flags: torch.Tensor
    rings: list[torch.Tensor]
    packed: list[torch.Tensor]

    @property
    def epoch(self) -> int:
        return self.flags.data_ptr()

    @property
    def exits(self) -> int:
        return self.flags.data_ptr() + LINE_BYTES

    @property
    def lines(self) -> int:
        return self.flags.data_ptr() + 2 * LINE_BYTES


def allocate(tables: Tables, device: torch.device) -> Workspace:
    # Only hand-over needs zeros at first; without queues a captured call is spared a memset.
    make = torch.zeros if tables.queues else torch.empty
    flags = make((2 + tables.lines) * LINE_BYTES // 8, dtype=torch.int64, device=device)

    def empty(rows: int, columns: int, dtype: str) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=TORCH_DTYPES[dtype], device=device)

    rings = [empty(q.depth * 64, q.features, q.dtype) for q in tables.queues]
    packed = [empty(p.rows, p.columns, p.dtype) for p in tables.packs]
    total = sum(t.nbytes for t in (*rings, *packed))
    log.debug("workspace of %d bytes for %d queues and %d packed weights", total, len(rings), len(packed))
    return Workspace(flags, rings, packed)


class Workspaces:
    """One workspace a stream; a launch captured into a graph gets one of its own.

    Launches on one stream follow each other, so they can share flags and rings. A graph may be
    replayed on any stream beside others, so what it captured must be its alone, for as long as the
    compiled pipeline lives.
    """

    def __init__(self, tables: Tables, device: torch.device) -> None:
        self._new = lambda: allocate(tables, device)
        self._by_stream: dict[int, Workspace] = {}
        self._captured: list[Workspace] = []

    def take(self, stream: int) -> Workspace:
        if torch.cuda.is_current_stream_capturing():
            self._captured.append(self._new())
            return self._captured[-1]
        if stream not in self._by_stream:
            self._by_stream[stream] = self._new()
        return self._by_stream[stream]
