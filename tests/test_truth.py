"""Simulated against measured: the held-out kernels of an H200, from the committed measurements."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from tilestream import devices

pytestmark = pytest.mark.xdist_group("truth")  # one process makes what its tests share
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def truth():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("truth")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def held_out(truth):
    _, kept = truth.split(truth.measured("silicon.json"))
    return truth.points(kept, True, devices.get("h200"))


def test_held_out_kernels_are_predicted(truth, held_out):
    """Issue: at least 30 kernels, 15 % mean absolute error at most, rank correlation at least 0.95."""
    score = truth.scores(held_out)[0]
    assert score.count >= 30
    assert score.mape <= 15
    assert score.rank >= 0.95


def test_halves_share_no_kernel_and_lose_none(truth):
    rows = truth.measured("silicon.json")
    fitted, kept = truth.split(rows)
    assert len(fitted) + len(kept) == len(rows)
    assert not {(r["kind"], r["name"]) for r in fitted} & {(r["kind"], r["name"]) for r in kept}


def test_the_published_figures_are_those_of_the_measurements(truth, held_out):
    published = json.loads((truth.RESULTS / "truth.json").read_text())
    before = {(p["name"], p["state"]): p["predicted_us"] for p in published["points"] if p["held_out"]}
    for p in held_out:
        assert p.predicted_us == pytest.approx(before[p.name, p.state], rel=1e-6)
    for p in held_out[:5]:
        assert f"| {p.name} | {p.state} | {p.measured_us:.1f} | {p.predicted_us:.1f} |" in truth.DOC.read_text()


def test_operands_leave_the_l2_as_they_grow(truth):
    h200 = devices.get("h200")
    shares = [truth.held_in_l2(size, h200) for size in (1e6, 3e7, 4.5e7, 6e7, 1e9)]
    assert shares[0] == shares[1] == 1 and shares[-1] == 0
    assert shares == sorted(shares, reverse=True)
