"""Work before timing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilestream.run import timing


class Ticks:
    """A GPU whose clocks rise: each replay takes less time, until it has reached them."""

    def __init__(self, seconds: float, least: float) -> None:
        self.seconds, self.least, self.now = seconds, least, 0.0

    def replay(self) -> None:
        self.now += self.seconds
        self.seconds = max(self.least, 0.995 * self.seconds)


@pytest.mark.parametrize(("least", "settles"), [(0.004, True), (0.0, False)])
def test_clocks_have_settled_or_time_is_up(monkeypatch: pytest.MonkeyPatch, least: float, settles: bool):
    gpu: Any = Ticks(0.008, least)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: gpu.now)
    timing.settle([gpu])
    assert (gpu.seconds == least) == settles and gpu.now < timing.MOST_S + 3 * timing.STRETCH_S
