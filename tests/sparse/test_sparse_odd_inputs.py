"""Odd inputs end in an answer, or an error with a remedy: never in another exception, nor in a hang."""

from pathlib import Path

import pytest
from sparse_odd_inputs import verdict


def test_odd_inputs(tmp_path: Path):
    verdicts = {verdict(seed, tmp_path) for seed in range(60)}
    assert verdicts == {"answer", "refused"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(0, 500, 50))
def test_five_hundred_odd_inputs(first: int, tmp_path: Path):
    for seed in range(first, first + 50):
        verdict(seed, tmp_path)
