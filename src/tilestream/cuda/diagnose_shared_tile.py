"""What a shared tile's kernel leaves behind when a wait for another CTA expires, and the error made of it."""

from __future__ import annotations

from tilestream.cuda.diagnose import Record
from tilestream.kernels.product.shared_tile import SharedTile

WORDS = 8  # 64-bit words; struct ExchangeDump of collectives.cuh
WAITED_FOR = ("the cleared result", "columns of the middle", "a partial result", "rows of the operand")


class ExchangeDump(Record):
    """Which CTA waited for which."""

    def __init__(self, schedule: SharedTile, pipeline: str) -> None:
        super().__init__(WORDS)
        self.schedule, self.pipeline = schedule, pipeline

    def describe(self) -> str:
        half = self.halves(3)
        phase, cta, peer, sm = half[0][1], half[1][0], half[1][1], half[2][0]
        expected, found = int(self.words[3]), int(self.words[4])
        s = self.schedule
        return (
            f"pipeline {self.pipeline!r}: CTA {cta} of {s.ctas} ({s.groups} groups of {s.columns}) on SM {sm} waited"
            f" too long for {WAITED_FOR[phase]} of CTA {peer}: expected launch {expected}, found {found}"
        )
