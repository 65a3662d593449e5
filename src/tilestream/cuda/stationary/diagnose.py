"""What a stationary sum's kernel leaves behind when a wait for another CTA expires, and the error made of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilestream.errors import QueueTimeout
from tilestream.schedule.stationary import StationarySum

WORDS = 6
"""64-bit words of ``struct Dump`` (roles.cuh), of which a launch without queues writes no flags."""


class SumDump:
    """A record in pinned host memory that survives the trap."""

    def __init__(self, schedules: Sequence[StationarySum], pipeline: str) -> None:
        self.schedules, self.pipeline = schedules, pipeline
        self.words = torch.zeros(WORDS, dtype=torch.int64, pin_memory=torch.cuda.is_available())

    @property
    def address(self) -> int:
        return self.words.data_ptr()

    def check(self) -> None:
        """Raise ``QueueTimeout`` if a launch has left a record."""
        if int(self.words[0]) & 0xFFFFFFFF:
            raise QueueTimeout(self.describe(), "the CUDA context is lost: restart the process; report this message")

    def describe(self) -> str:
        half = [(int(w) & 0xFFFFFFFF, (int(w) >> 32) & 0xFFFFFFFF) for w in self.words[:3]]
        stage, sm, cta, peer = half[0][1], half[1][0], half[1][1], half[2][0]
        s = self.schedules[stage]
        return (
            f"pipeline {self.pipeline!r}, stage {s.stage.name!r} ({s.sums.product.source or 'no source line'}):"
            f" CTA {cta} on SM {sm} waited too long for the partial sums of CTA {peer}, one of {s.splits} that share"
            f" out the rows: expected launch {int(self.words[3])}, found {int(self.words[4])}"
        )
