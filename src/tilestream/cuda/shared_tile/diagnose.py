"""What a shared tile's kernel leaves behind when a wait for another CTA expires, and the error made of it."""

from __future__ import annotations

import torch

from tilestream.cuda.diagnose import tell_at_exit
from tilestream.errors import QueueTimeout
from tilestream.schedule.shared_tile import SharedTile

WORDS = 8  # 64-bit words; struct ExchangeDump of collectives.cuh
WAITED_FOR = ("the cleared result", "columns of the middle", "a partial result")


class ExchangeDump:
    """A record in pinned host memory that survives the trap."""

    def __init__(self, schedule: SharedTile, pipeline: str) -> None:
        self.schedule, self.pipeline = schedule, pipeline
        self.words = torch.zeros(WORDS, dtype=torch.int64, pin_memory=torch.cuda.is_available())

        tell_at_exit(self)

    @property
    def address(self) -> int:
        return self.words.data_ptr()

    def check(self) -> None:
        """Raise ``QueueTimeout`` if a launch has left a record."""
        if self.claimed:
            raise self.error()

    @property
    def claimed(self) -> bool:
        return bool(int(self.words[0]) & 0xFFFFFFFF)

    def error(self) -> QueueTimeout:
        return QueueTimeout(self.describe(), "the CUDA context is lost: restart the process; report this message")

    def describe(self) -> str:
        half = [(int(w) & 0xFFFFFFFF, (int(w) >> 32) & 0xFFFFFFFF) for w in self.words[:3]]
        phase, cta, peer, sm = half[0][1], half[1][0], half[1][1], half[2][0]
        expected, found = int(self.words[3]), int(self.words[4])
        s = self.schedule
        return (
            f"pipeline {self.pipeline!r}: CTA {cta} of {s.ctas} ({s.groups} groups of {s.columns}) on SM {sm} waited"
            f" too long for {WAITED_FOR[phase]} of CTA {peer}: expected launch {expected}, found {found}"
        )
