"""The cost model against stored measurements of an H200: errors may not grow, and what is faster is called faster."""

from __future__ import annotations

import importlib
import json

import pytest
from places import BENCHMARKS

from tilestream.ir.plain import by_rows
from tilestream.ir.serialise import pipeline_from_json
from tilestream.kernels.stream.build import build
from tilestream.kernels.stream.counts import code_apart, code_size
from tilestream.kernels.stream.layout import lay_out
from tilestream.options import Options
from tilestream.plan.candidates import FALLBACK
from tilestream.plan.planner import plan
from tilestream.run.spec import decode

pytestmark = pytest.mark.xdist_group("cost_truth")  # one process makes what its tests share


BY_CHUNKS = "hidden layers by chunks"


@pytest.fixture(scope="module")
def truth():
    return importlib.import_module("benchmarks.fit.cost_truth")


@pytest.fixture(scope="module")
def launch_truth():
    return importlib.import_module("benchmarks.fit.launch_truth")


@pytest.mark.parametrize(
    ("group", "count", "mean", "bias", "worst"),
    [
        ("models", 6, 0.10, 0.09, 1.27),  # timed before GELU took three instructions less
        ("pipelines, validation", 13, 0.10, 0.05, 1.30),
        ("README's cases", 17, 0.08, 0.03, 1.20),
        ("pipelines", 16, 0.11, 0.05, 1.30),  # timed before loaders changed
        ("Inductor on the models", 6, 0.12, 0.11, 1.30),
        ("Inductor on README's cases", 16, 0.13, 0.09, 1.40),  # timed anew, and faster there
    ],
)
def test_errors_have_not_grown(truth, group: str, count: int, mean: float, bias: float, worst: float):
    score = truth.scores()[group]
    assert score.count == count
    assert score.mean <= mean
    assert abs(score.bias) <= bias
    assert score.worst <= worst


def test_the_page_is_current(truth):
    _, rest = truth.DOC.read_text().split(truth.BEGIN)
    assert rest.split(truth.END)[0].strip() == truth.document(), "run benchmarks/fit/cost_truth.py"


def test_the_page_of_launches_is_current(launch_truth):
    _, rest = launch_truth.DOC.read_text().split(launch_truth.BEGIN)
    made = launch_truth.document(launch_truth.points(launch_truth.PATH))
    assert rest.split(launch_truth.END)[0].strip() == made, "run benchmarks/fit/launch_truth.py"


def cases(truth) -> list:
    return [*truth.MAIN, *truth.OTHERS]


def measured(case) -> dict[str, float]:
    """Microseconds of the candidates that were timed side by side."""
    (region,) = json.loads(case.path.read_text())["plan"]["regions"]
    return {c["name"]: c["measured_us"] for c in region["candidates"] if c["measured_us"] is not None}


def test_the_best_by_prediction_is_within_a_tenth_of_the_best_by_measurement(truth):
    """Wherever it was timed. The short edge block was timed at clocks that had not settled, and is left out."""
    compared = 0
    for case in cases(truth):
        times, chosen = measured(case), truth.planned(case).chosen.name
        if case.name == "meshgraphnets_small" or chosen not in times:
            continue
        compared += 1
        assert times[chosen] <= 1.1 * min(us for name, us in times.items() if name != FALLBACK), case.name
    assert compared >= 13


def test_meshgraphnets_streams_its_weights(truth):
    """Measured: 99 us, and 127 to 136 with weights that stay."""
    made = truth.planned(next(c for c in truth.MAIN if c.name == "meshgraphnets"))
    assert made.chosen.name == "vertical (weights streamed)"
    assert truth.predicted(made, "vertical") > 1.2 * made.chosen.predicted_us


def test_the_gated_block_is_shared_by_columns(truth):
    """Measured: 153 us, and 172 with a tile for each warpgroup, whose ring of weights is too short to overlap."""
    made = truth.planned(next(c for c in truth.OTHERS if c.name == "gated_ffn"))
    assert made.chosen.name == "vertical (tiles by columns)"


def test_hidden_layers_by_chunks_are_told_from_tiles_by_columns(truth):
    """Four blocks of 192-384-192 with GELU: 1197 us in one kernel by columns, 826 by Inductor, 421 by chunks."""
    data = json.loads((BENCHMARKS / "results" / "validation_models.json").read_text())
    model = next(m for m in data["models"] if m["strategy"] == "vertical")
    made = plan(pipeline_from_json(model["program"]), model["rows"], truth.H200, Options())
    assert made.chosen.detail == BY_CHUNKS
    by_columns = truth.predicted(made, "vertical (tiles by columns)")
    assert made.chosen.predicted_us < truth.predicted(made, FALLBACK) < by_columns


def test_no_model_of_readme_or_of_the_validation_set_is_off_by_more_than_two_fifths(truth):
    """What is asked of the model: 15 % on README's cases, and no model of the validation set beyond 1.4."""
    assert truth.scores()["README's cases"].mean < 0.15
    for group in ("models", "README's cases", "every way to run ten models"):
        assert truth.scores()[group].worst < 1.4


def test_code_that_no_cache_holds_comes_from_the_l2_at_one_rate(truth, launch_truth):
    """Of the unseen launches two have more than 128 KB of code and are bound by it: layers in place, whose warpgroups
    go through it together (161 us). The rate is that of another kernel, and without it they were predicted 21 % fast.
    """
    rows = [r for r in launch_truth.rows_of(launch_truth.PATH) if r.launch.family.startswith("unseen")]
    found = []
    for row in rows:
        pipeline = decode(row.launch.spec).pipeline
        if len(pipeline.stages) != 1 or not by_rows(pipeline):
            continue
        schedule = build(pipeline.stages[0], pipeline)
        layout = lay_out(schedule)
        if code_size(schedule, layout) > truth.H200.code_held:
            assert code_apart(schedule, layout) < truth.H200.code_held
            found.append(launch_truth.ranked_us(pipeline, row.launch.rows) / (row.straight_us or row.us))
    assert len(found) == 2 and all(0.9 < ratio < 1.1 for ratio in found)


def test_code_that_a_loop_makes_fit_was_what_a_kernel_waited_for(truth):
    """Softplus's derivative by rows, the same arithmetic: by the model both warpgroups fetch the unrolled code for each
    of two tiles, which is what it took; as a loop it fits, and takes little more than half of that."""
    data = json.loads((BENCHMARKS / "results" / "epilogue_turns.json").read_text())
    us = next(r["us"] for r in data["rows"] if "Softplus" in r["model"] and len(r["us"]) == 7)
    unrolled, instruction_bytes, tiles = 11_818, 16, 2
    fetched_us = 1e6 * tiles * 2 * unrolled * instruction_bytes / truth.H200.code_bytes_per_s
    assert unrolled > truth.H200.code_held and fetched_us == pytest.approx(us["former"], rel=0.2)
    assert us["loops"] < 0.6 * us["former"] and us["loops, loads ahead"] < 0.8 * us["loops"]
    profile = data["profile"]["by rows"]
    assert profile["no_inst"] > 1.5 * max(profile[k] for k in ("long_sb", "wait", "short_sb", "selected", "barrier"))


@pytest.mark.parametrize(
    ("family", "count", "mean", "worst"),
    [
        ("odd", 27, 0.08, 1.25),
        ("backward", 27, 0.19, 1.5),
        ("gradients", 42, 0.055, 1.2),
        ("unseen odd", 15, 0.07, 1.25),
        ("unseen gradients", 21, 0.09, 1.35),
        ("unseen backward", 14, 0.11, 1.35),
        ("unseen forward", 9, 0.09, 1.25),
    ],
)
def test_launches_of_training_steps_are_near_their_measurements(
    truth, launch_truth, family: str, count: int, mean: float, worst: float
):
    """Constants of gradients were fitted on plain networks, those of odd rows on widths beside ``HELD_OUT``."""
    score = truth.Score.of(family, launch_truth.ranked(family))
    assert score.count == count and score.mean <= mean and score.worst <= worst
