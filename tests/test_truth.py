"""Simulated against measured: the held-out kernels of an H200, from the committed measurements."""

from __future__ import annotations

import importlib
import json

import pytest

from tilestream import devices

pytestmark = pytest.mark.xdist_group("truth")  # one process makes what its tests share


@pytest.fixture(scope="module")
def truth():
    return importlib.import_module("truth")


@pytest.fixture(scope="module")
def held_out(truth):
    _, kept = truth.halves()
    return truth.points(kept, True, devices.get("h200"))


@pytest.mark.parametrize(
    ("group", "count", "mape"),
    [
        ("GEMM", 90, 10.0),
        ("elementwise", 90, 8.0),
        ("pipelines of ours", 20, 12.0),
        ("GEMM, odd widths and neighbours", 80, 16.0),
        ("reductions, lookups, scatters, concatenations, copies", 100, 20.0),
    ],
)
def test_held_out_kernels_are_predicted(truth, held_out, group: str, count: int, mape: float):
    (score,) = (s for s in truth.scores(held_out) if s.group == group)
    assert score.count >= count
    assert score.mape <= mape
    assert score.rank >= 0.95


def test_whole_models_are_predicted(truth):
    """Runs of the five applications, inference and training: 15 % mean error and 5 % bias at most."""
    data = json.loads((truth.RESULTS / "whole_truth.json").read_text())
    assert data["summary"]["count"] >= 36
    assert data["summary"]["mape"] <= 15 and abs(data["summary"]["bias"]) <= 5
    assert data["tables"] in truth.DOC.read_text()


def test_whole_models_are_held_against_the_newest_measurements(truth):
    whole_truth = importlib.import_module("whole_truth")
    rows = json.loads(whole_truth.OUT.read_text())["rows"]
    held = {r["case"]: r["measured_us"] for r in rows if r["arm"] == "tilestream" and not r["training"]}
    for path in (truth.RESULTS / "whole").glob("*.json"):
        made = json.loads(path.read_text())
        if made.get("training") is False and "tilestream" in made.get("arms", {}):
            ours = made["arms"]["tilestream"]["us"]
            assert held.get(path.stem) == pytest.approx(ours), (
                f"{path.name}: run benchmarks/whole_truth.py, then truth.py"
            )


def test_a_whole_model_is_predicted_as_published():
    whole_truth = importlib.import_module("whole_truth")
    published = {
        (r["case"], r["training"], r["arm"]): r["predicted_us"] for r in json.loads(whole_truth.OUT.read_text())["rows"]
    }
    for w in whole_truth.wholes("nerf_16384"):
        assert w.predicted_us == pytest.approx(published[w.case, w.training, w.arm], rel=1e-6)


def test_halves_share_no_kernel_and_lose_none(truth):
    names = ("silicon", "silicon_held_out", "silicon_widths", "silicon_others", "silicon_backward")
    rows = [row for name in names for row in truth.measured(f"{name}.json")]
    fitted, kept = truth.halves()
    assert len(fitted) + len(kept) == len(rows)
    for name in names:
        of = [{(r["kind"], r["name"]) for r in part if r["set"] == f"{name}.json"} for part in (fitted, kept)]
        assert not of[0] & of[1]


def test_the_published_figures_are_those_of_the_measurements(truth, held_out):
    published = json.loads((truth.RESULTS / "truth.json").read_text())
    before = {(p["name"], p["state"]): p["predicted_us"] for p in published["points"] if p["held_out"]}
    for p in held_out:
        assert p.predicted_us == pytest.approx(before[p.name, p.state], rel=1e-6)
    for p in held_out[:5]:
        assert f"| {p.name} | {p.state} | {p.measured_us:.1f} | {p.predicted_us:.1f} |" in truth.KERNELS.read_text()


def test_operands_leave_the_l2_as_they_grow(truth):
    h200 = devices.get("h200")
    shares = [truth.held_in_l2(size, h200) for size in (1e6, 3e7, 4.5e7, 6e7, 1e9)]
    assert shares[0] == shares[1] == 1 and shares[-1] == 0
    assert shares == sorted(shares, reverse=True)
