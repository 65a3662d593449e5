"""What is told of a decode step's stamps."""

from __future__ import annotations

import pytest
import torch

from benchmarks.run.decode_stages import told
from tilestream.kernels.step.kernel import STAGES


def test_stages_are_told_behind_the_last_cta_of_the_stage_in_front() -> None:
    stamps = torch.zeros(2, 3, len(STAGES), 3, dtype=torch.int64)
    for layer in range(2):
        for stage in range(5):
            begin = 10_000 * (5 * layer + stage)
            stamps[0, layer, stage] = torch.tensor([begin, begin + 1_000, begin + 4_000])
            if stage != 1:  # one CTA has no head
                stamps[1, layer, stage] = torch.tensor([begin, begin + 2_000, begin + 8_000])
    stamps[:, 2, 5] = torch.tensor([100_000, 101_000, 120_000])
    found = told(stamps)
    assert list(found) == [*STAGES[1:5], STAGES[0], STAGES[5]]
    assert found["attention"] == {"ctas": 1, "stage": 6, "hand_over": 3, "rows": 3, "most_rows": 3}
    assert found["gate and up"] == {"ctas": 2, "stage": 10, "hand_over": 4, "rows": 3, "most_rows": 6}
    assert found["the head"]["stage"] == pytest.approx(22)
