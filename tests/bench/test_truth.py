"""Simulated against measured: the validation set of an H200's kernels, from the committed measurements."""

from __future__ import annotations

import importlib
import json

import pytest

from tilestream import devices

pytestmark = pytest.mark.xdist_group("truth")  # one process makes what its tests share


@pytest.fixture(scope="module")
def truth():
    return importlib.import_module("benchmarks.fit.truth")


@pytest.fixture(scope="module")
def validation(truth):
    _, kept = truth.halves()
    return truth.points(kept, True, devices.get("h200"))


@pytest.mark.parametrize(
    ("group", "count", "mape"),
    [
        ("GEMM", 90, 10.0),
        ("elementwise", 90, 8.0),
        ("pipelines of ours", 13, 12.0),
        ("GEMM, odd widths and neighbours", 80, 16.0),
        ("reductions, lookups, scatters, concatenations, copies", 100, 20.0),
    ],
)
def test_kernels_of_the_validation_set_are_predicted(truth, validation, group: str, count: int, mape: float):
    (score,) = (s for s in truth.scores(validation) if s.group == group)
    assert score.count >= count
    assert score.mape <= mape
    assert score.rank >= 0.95


def test_whole_models_are_predicted(truth):
    """Runs of the five applications and of graph networks, inference and training, of the validation set."""
    data = json.loads((truth.RESULTS / "whole_truth.json").read_text())
    assert data["summary"]["count"] >= 50
    assert data["summary"]["mape"] <= 15 and abs(data["summary"]["bias"]) <= 7
    assert data["tables"] in truth.DOC.read_text()
    assert sum(r["arm"] == "tilestream" and r["training"] for r in data["rows"]) == 8


def test_rows_that_constants_were_set_by_are_in_no_score(truth):
    data = json.loads((truth.RESULTS / "whole_truth.json").read_text())
    assert {r["case"] for r in data["rows"] if r["fit"] == "yes"} == {"nerf_16384", "nerf_262144"}
    assert data["summary"]["count"] == sum(r["fit"] != "yes" for r in data["rows"])
    _, kept = truth.halves()
    assert not any(r["kind"] == "pipeline" and r["set"] == "silicon.json" for r in kept)


def test_models_of_torch_geometric_are_near_their_measurements(truth):
    """Inductor's gathers and sums by an index were four to eight times too slow as kernels of PyTorch's."""
    rows = json.loads((truth.RESULTS / "whole_truth.json").read_text())["rows"]
    found = {r["case"]: r["predicted_us"] / r["measured_us"] for r in rows if r["arm"] == "inductor"}
    for case in ("gin", "gin_f32", "sage", "sage_f32", "gcn", "edge_conv"):
        assert 0.8 < found[case] < 1.25, case


def test_whole_models_are_held_against_the_newest_measurements(truth):
    whole_truth = importlib.import_module("benchmarks.fit.whole_truth")
    rows = json.loads(whole_truth.OUT.read_text())["rows"]
    held = {r["case"]: r["measured_us"] for r in rows if r["arm"] == "tilestream" and not r["training"]}
    for path in (truth.RESULTS / "whole").glob("*.json"):
        made = json.loads(path.read_text())
        if made.get("training") is False and "tilestream" in made.get("arms", {}):
            ours = made["arms"]["tilestream"]["us"]
            assert held.get(path.stem) == pytest.approx(ours), (
                f"{path.name}: run benchmarks/fit/whole_truth.py, then truth.py"
            )


def test_a_whole_model_is_predicted_as_published():
    whole_truth = importlib.import_module("benchmarks.fit.whole_truth")
    published = {
        (r["case"], r["training"], r["arm"]): r["predicted_us"] for r in json.loads(whole_truth.OUT.read_text())["rows"]
    }
    for w in whole_truth.wholes("nerf_16384"):
        assert w.predicted_us == pytest.approx(published[w.case, w.training, w.arm], rel=1e-6)


def test_halves_share_no_kernel_and_lose_none(truth):
    names = ("silicon", "silicon_validation", "silicon_widths", "silicon_others", "silicon_backward", "silicon_indexed")
    rows = [row for name in names for row in truth.measured(f"{name}.json")]
    fitted, kept = truth.halves()
    assert len(fitted) + len(kept) == len(rows)
    for name in names:
        of = [{(r["kind"], r["name"]) for r in part if r["set"] == f"{name}.json"} for part in (fitted, kept)]
        assert not of[0] & of[1]


def test_the_published_figures_are_those_of_the_measurements(truth, validation):
    published = json.loads((truth.RESULTS / "truth.json").read_text())
    before = {(p["name"], p["state"]): p["predicted_us"] for p in published["points"] if p["validation"]}
    for p in validation:
        assert p.predicted_us == pytest.approx(before[p.name, p.state], rel=1e-6)
    for p in validation[:5]:
        assert f"| {p.name} | {p.state} | {p.measured_us:.1f} | {p.predicted_us:.1f} |" in truth.KERNELS.read_text()


def test_operands_leave_the_l2_as_they_grow(truth):
    h200 = devices.get("h200")
    held_in_l2 = importlib.import_module("benchmarks.fit.predicted_kernels").held_in_l2
    shares = [held_in_l2(size, h200) for size in (1e6, 3e7, 4.5e7, 6e7, 1e9)]
    assert shares[0] == shares[1] == 1 and shares[-1] == 0
    assert shares == sorted(shares, reverse=True)


def test_the_fresh_set_is_the_one_that_was_drawn(truth):
    """All of it was measured, and all that was measured is counted."""
    cases, models = (
        importlib.import_module("benchmarks.lib.fresh_cases"),
        importlib.import_module("benchmarks.lib.fresh_models"),
    )
    data = json.loads((truth.RESULTS / "silicon_fresh.json").read_text())
    drawn = {case.name for case in cases.kernels()}
    ours = {f"{model} {strategy} {rows}" for model, rows, strategy in cases.pipelines()}
    assert not data["failed"] and {row["name"] for row in data["rows"]} == drawn | ours
    assert len(drawn) >= 120
    rows = json.loads((truth.RESULTS / "fresh_models.json").read_text())
    assert not rows["failed"]
    runs = {(row["model"], row["training"]) for row in rows["rows"]}
    assert runs == {(n, t) for n in models.MODELS for t in (False, True) if not t or n in models.TRAINED}
    published = json.loads((truth.RESULTS / "fresh_truth.json").read_text())
    assert len(published["points"]) == len(data["rows"]) and len(published["models"]) == 3 * len(runs)


def test_nothing_was_fitted_on_the_fresh_set(truth):
    fitted, kept = truth.halves()
    assert not any("fresh" in row["set"] for row in (*fitted, *kept))


def test_the_page_shows_the_fresh_set_as_it_was_measured(truth):
    """Of the page: scores, every kernel and every model. Predictions are today's for some of each kind."""
    page, every = truth.DOC.read_text(), truth.FRESH.read_text()
    fresh = importlib.import_module("benchmarks.fit.fresh_truth")
    published = json.loads(fresh.OUT.read_text())
    assert truth.fresh_tables() in page
    measured = {(r["name"], r["state"]): r["us"] for r in truth.measured(fresh.KERNELS)}
    for p in published["points"]:
        assert p["measured_us"] == measured[p["name"], p["state"]]
        assert f"| {p['name']} | {p['state']} | {p['measured_us']:.1f} | {p['predicted_us']:.1f} |" in every
    assert published["scores"] == [vars(s) for s in truth.scores(truth.Point(**p) for p in published["points"])]
    rows = truth.measured(fresh.KERNELS)[::9]
    told = {(p["name"], p["state"]): p["predicted_us"] for p in published["points"]}
    for p in truth.points(rows, False, devices.get("h200"), fresh.group_of):
        assert p.predicted_us == pytest.approx(told[p.name, p.state], rel=1e-6)
    models = {(m["case"], m["training"], m["arm"]): m["predicted_us"] for m in published["models"]}
    for arm, us in fresh.predicted("actor_critic", False).items():
        assert us == pytest.approx(models["actor_critic", False, arm], rel=1e-6)


def test_the_draw_is_the_seeds():
    """Two draws are equal, whatever was drawn before; another family is another stream."""
    cases = importlib.import_module("benchmarks.lib.fresh_cases")
    assert [cases.Draw("rows").between(1, 10**6) for _ in range(2)] == [cases.Draw("rows").between(1, 10**6)] * 2
    assert cases.Draw("rows").between(1, 10**6) != cases.Draw("odd").between(1, 10**6)
    assert all(cases.Draw("odd").odd(40, 700) % 8 for _ in range(3))
