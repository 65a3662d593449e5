"""What a stationary sum's kernel leaves behind when a wait for another CTA expires, and the error made of it."""

from __future__ import annotations

from collections.abc import Sequence

from tilestream.cuda.diagnose import Record
from tilestream.kernels.gradients.backward import BackwardChain, WideChain
from tilestream.kernels.gradients.stationary import StationarySum

WORDS = 6
"""64-bit words of ``struct Dump`` (roles.cuh), of which a launch without queues writes no flags."""


class SumDump(Record):
    """Which CTA waited for which."""

    def __init__(self, schedules: Sequence[StationarySum | BackwardChain | WideChain], pipeline: str) -> None:
        super().__init__(WORDS)
        self.schedules, self.pipeline = schedules, pipeline

    def describe(self) -> str:
        half = self.halves(3)
        stage, sm, cta, peer = half[0][1], half[1][0], half[1][1], half[2][0]
        s = self.schedules[stage]
        return (
            f"pipeline {self.pipeline!r}, stage {s.stage.name!r} ({s.where or 'no source line'}):"
            f" CTA {cta} on SM {sm} waited too long for the partial sums of CTA {peer}, one of {s.splits} that share"
            f" out the rows: expected launch {int(self.words[3])}, found {int(self.words[4])}"
        )
