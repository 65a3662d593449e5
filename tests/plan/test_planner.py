"""The planner: candidates with reasons, forced strategies, measured choice."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from clock import Clock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import BENCHMARKS
from programs import Program, chain, edge_block, elementwise, nerf
from strategies import programs
from torch import nn

from tilestream import devices
from tilestream.apps import APPS
from tilestream.errors import CompileError, PlanError
from tilestream.graph.capture import capture
from tilestream.graph.selection import partition
from tilestream.ir.pipeline import Residency
from tilestream.kernels.fits import verify_on
from tilestream.options import Options
from tilestream.plan import margins, planner, recipes
from tilestream.plan.candidates import FALLBACK, Candidate
from tilestream.plan.cost import product_bound_us
from tilestream.plan.passes.cuts import split_bulk
from tilestream.plan.passes.verified import apply
from tilestream.plan.planner import plan
from tilestream.run.timing import uncollected

H200 = devices.get("h200")
RESULTS = BENCHMARKS / "results"
SLOW = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)


def test_auto_prefers_the_cheapest_prediction():
    made = plan(chain(8), 262_144, H200, Options())
    assert made.chosen.strategy == "vertical"
    assert made.chosen in made.candidates
    assert made.chosen.predicted_us == min(c.predicted_us for c in made.candidates if c.predicted_us is not None)
    assert {c.strategy for c in made.candidates} == {"vertical", "spatial", "bulk", FALLBACK}
    assert "vertical" in made.summary() and "fallback" in made.summary()


def test_every_legal_candidate_passes_the_verifier():
    for candidate in plan(nerf(), 65_536, H200, Options()).candidates:
        if candidate.pipeline is not None:
            verify_on(candidate.pipeline, H200)
            assert candidate.predicted_us is not None and not candidate.rejected


@settings(max_examples=20, deadline=None, suppress_health_check=SLOW)
@given(programs(), st.sampled_from((0, 1, 1000, 100_000)))
def test_any_program_has_a_plan(program, rows):
    made = plan(program, rows, H200, Options())
    assert made.rows == rows and made.chosen in made.candidates
    for candidate in made.candidates:
        assert candidate.strategy == FALLBACK or (candidate.pipeline is None) == bool(candidate.rejected)


@pytest.mark.parametrize("strategy", ["bulk", "vertical", "spatial"])
def test_a_forced_strategy_is_chosen_even_if_slower(strategy):
    made = plan(chain(8), 262_144, H200, Options(strategy=strategy))
    assert made.chosen.strategy == strategy
    assert made.chosen.pipeline is not None and made.chosen.pipeline.strategy == strategy


def test_a_forced_strategy_without_a_pipeline_is_an_error_with_all_reasons():
    with pytest.raises(PlanError, match="fewer than two linears") as error:
        plan(chain(1), 1024, H200, Options(strategy="spatial"))
    assert "strategy='auto'" in error.value.remedy
    with pytest.raises(PlanError, match="1024 features > 512"):
        plan(chain(3, 1024), 1024, H200, Options(strategy="vertical"))


def test_auto_without_a_pipeline_is_the_fallback_and_says_why():
    made = plan(chain(3, 1024), 1024, H200, Options())
    assert made.chosen.strategy == FALLBACK
    wide = [c for c in made.candidates if c.strategy in ("vertical", "bulk") and "in place" not in c.detail]
    assert wide and all("1024 features > 512" in c.rejected for c in wide)


@pytest.mark.parametrize(("act", "width", "taken"), [("relu", 256, True), ("silu", 256, False), ("relu", 100, False)])
def test_a_library_has_relu_as_an_epilogue_of_its_product(act: str, width: int, taken: bool):
    """A graph without the region has it (``rewrites.epilogues``), where rows are multiples of 16 bytes."""

    def library_us(act: str) -> float:
        program = Program("layer", "bf16")
        program.store(program.linear(program.load("x", width), width, act))
        return next(c.predicted_us or 0.0 for c in planner.proposals(program.build(), 65_536, H200, Options())[-1:])

    assert (library_us(act) == library_us("")) == taken


def test_the_library_reads_padded_copies_of_odd_rows_where_it_takes_a_relu_in():
    """By itself it would read them element by element."""

    def library_us(depth: int, out: int) -> float:
        program = Program("layer", "bf16")
        program.store(program.linear(program.load("x", depth), out, "relu"))
        return next(c.predicted_us or 0.0 for c in planner.proposals(program.build(), 32_768, H200, Options())[-1:])

    assert library_us(479, 1024) == library_us(480, 1024)
    assert library_us(479, 256) > library_us(480, 256)  # too narrow to be padded


@pytest.mark.parametrize(("share", "asked"), [(0.65, 0), (0.75, 1)])
def test_a_pipeline_far_ahead_of_what_the_fallback_is_predicted_needs_no_comparison(
    share: float, asked: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(margins, "BEYOND", 0.0)
    (predicted,) = (
        c.predicted_us for c in plan(chain(8), 262_144, H200, Options()).candidates if c.strategy == FALLBACK
    )
    assert predicted is not None
    clock = Clock(vertical=share * predicted, spatial=5000.0, fallback=3000.0)
    made = plan(chain(8), 262_144, H200, Options(), clock)
    assert made.chosen.strategy == "vertical" and clock.asked.count(FALLBACK) == asked
    (told,) = [c.rejected for c in made.candidates if c.strategy == FALLBACK]
    assert ("far less than it is predicted" in told) == (not asked)


def test_nothing_is_timed_where_the_fallback_is_far_ahead(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(margins, "LOST_LONG", 0.1)
    clock = Clock(vertical=1.0, spatial=1.0, fallback=1.0)
    made = plan(chain(8), 262_144, H200, Options(), clock)
    assert made.chosen.strategy == FALLBACK and not clock.asked
    assert planner.shortlist(made.candidates) == [] and planner.shortlist(made.candidates, forced=True)


@pytest.mark.parametrize(
    ("share", "fallback_us", "timed"),
    [(1.04, 210.0, True), (1.06, 210.0, False), (1.06, 190.0, True), (1.9, 190.0, True), (2.1, 190.0, False)],
)
def test_nor_where_a_long_fallback_is_a_little_ahead(share: float, fallback_us: float, timed: bool):
    """A kernel a layer, which is predicted to be a little faster, is not what would be timed."""
    program = chain(8)
    found = [
        Candidate("vertical", program, share * fallback_us),
        Candidate("bulk", program, 0.98 * share * fallback_us),
        Candidate(FALLBACK, None, fallback_us),
    ]
    assert planner.shortlist(found) == found[: int(timed)]
    assert planner.shortlist(found, forced=True)


@pytest.mark.usefixtures("patient", "unsure")
def test_a_kernel_a_layer_is_timed_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(margins, "HOPELESS", 100.0)
    clock = Clock(vertical=500.0, spatial=500.0, bulk=1.0, fallback=3000.0)
    assert plan(chain(8), 262_144, H200, Options(), clock).chosen.strategy == "vertical" and "bulk" not in clock.asked
    assert plan(chain(8), 262_144, H200, Options(strategy="bulk"), clock).chosen.measured_us == 1.0


def test_a_region_that_only_a_kernel_a_layer_runs_goes_to_inductor_untimed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planner, "recipes", lambda *_: [recipes.Recipe("bulk", split_bulk)])
    clock = Clock(bulk=1.0, fallback=3000.0)
    made = plan(chain(8), 262_143, H200, Options(), clock)  # rows that no other test has made a plan for
    assert [c.strategy for c in made.candidates if c.pipeline is not None] == ["bulk"]
    assert made.chosen.strategy == FALLBACK and not clock.asked


def test_recipes_that_cut_alike_share_the_cut(monkeypatch: pytest.MonkeyPatch):
    program, cuts = nerf(), []
    once = recipes.cut_vertical
    monkeypatch.setattr(recipes, "cut_vertical", lambda *a, **k: cuts.append(k) or once(*a, **k))
    planner._proposals.cache_clear()
    planner.made_of.cache_clear()
    made = planner.proposals(program, 1_000, H200, Options())
    assert len(cuts) == 2  # as it is, and by chunks
    planner.proposals(program, 8192, H200, Options())
    assert len(cuts) == 2, "nor is it made again at other rows"
    for recipe, candidate in zip(recipes.recipes(program, Options(), H200), made, strict=False):
        if candidate.pipeline is not None:
            assert candidate.pipeline == apply(recipe.passes(H200), program)


@pytest.fixture
def unsure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fallback is timed however clear its prediction is."""
    monkeypatch.setattr(margins, "SURE", 0.0)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates far behind are timed."""
    monkeypatch.setattr(margins, "HOPELESS", 1.5)
    monkeypatch.setattr(margins, "SPATIAL", 1.5)


def test_who_is_predicted_far_behind_is_not_timed(unsure: None):
    clock = Clock(vertical=600.0, spatial=550.0, fallback=1000.0)
    made = plan(chain(8), 262_144, H200, Options(), clock)
    best_us = min(c.predicted_us for c in made.candidates if c.predicted_us is not None)
    for c in made.candidates:
        if c.pipeline is not None and (c.predicted_us or 0.0) > margins.HOPELESS * best_us:
            assert c.name not in clock.asked and c.measured_us is None
    assert made.chosen.strategy == "vertical"


@pytest.mark.parametrize("share", [0.1, 1.5])
def test_stages_over_sms_are_timed_where_they_are_predicted_ahead(
    unsure: None, patient: None, monkeypatch: pytest.MonkeyPatch, share: float
):
    monkeypatch.setattr(margins, "SPATIAL", share)
    clock = Clock(vertical=600.0, spatial=550.0, fallback=1000.0)
    made = plan(chain(8), 262_144, H200, Options(), clock)
    assert made.chosen.strategy == ("spatial" if share > 1 else "vertical")
    assert any(name.startswith("spatial") for name in clock.asked) == (share > 1)


def test_the_fastest_measured_wins_whatever_was_predicted(unsure: None, patient: None):
    clock = Clock(vertical=600.0, spatial=550.0, fallback=1000.0)
    made = plan(chain(8), 262_144, H200, Options(), clock)
    assert (made.chosen.strategy, made.chosen.measured_us) == ("spatial", 550.0)
    assert len(clock.asked) == margins.MEASURED + 1 and clock.asked.count(FALLBACK) == 1
    predicted = {c.name: c.predicted_us or 0.0 for c in made.candidates}
    assert clock.asked[:-1] == sorted(clock.asked[:-1], key=lambda name: predicted[name])
    assert "measured" in made.summary()


def test_a_pipeline_faster_than_any_kernel_a_product_needs_no_comparison(unsure: None):
    bound_us = product_bound_us(chain(8), 262_144, H200)
    moved = 8 * 2 * 262_144 * 256 * 2 / H200.dram_bytes_per_s
    assert bound_us == pytest.approx(moved * 1e6)
    for share, asked in ((0.9, 0), (1.0, 1)):
        clock = Clock(vertical=share * bound_us, spatial=2000.0, fallback=1000.0)
        made = plan(chain(8), 262_144, H200, Options(), clock)
        assert made.chosen.strategy == "vertical" and clock.asked.count(FALLBACK) == asked
        assert ("not timed" in made.candidates[-1].rejected) == (asked == 0)


def test_the_bound_is_below_every_measured_baseline():
    """Of the results that are kept: the bound must never rule out an Inductor that was measured to be faster."""
    held = 0
    for name, app in APPS.items():
        module, inputs = app.make(64)
        program = partition(capture(module, list(inputs)).graphs[0]).regions[0].program
        for path in RESULTS.glob(f"{name}*.json"):
            result = json.loads(path.read_text())
            if "arms" not in result or "H200" not in str(result["environment"]["gpu"]):
                continue
            best = min(arm["us"] for arm_name, arm in result["arms"].items() if arm_name != "tilestream")
            assert product_bound_us(program, result["rows"], H200) < best, path.name
            held += 1
    assert held >= 10


@pytest.mark.parametrize(("us", "winner"), [(985.0, "vertical"), (995.0, FALLBACK), (1000.0, FALLBACK)])
def test_a_pipeline_must_beat_the_fallback_by_one_per_cent(us, winner):
    made = plan(chain(8), 262_144, H200, Options(), Clock(vertical=us, spatial=2000.0, fallback=1000.0))
    assert made.chosen.strategy == winner


def test_a_candidate_that_cannot_be_measured_is_rejected_with_the_reason(patient: None):
    clock = Clock(vertical=CompileError("no NVRTC", "install it"), spatial=600.0, fallback=1000.0)
    made = plan(chain(8), 262_144, H200, Options(), clock)
    assert made.chosen.strategy == "spatial"
    assert "no NVRTC" in next(c for c in made.candidates if c.strategy == "vertical").rejected


@pytest.fixture
def broken() -> CompileError:
    return CompileError("ptxas spills 8 bytes", "report it")


@pytest.mark.parametrize(("spatial_us", "winner"), [(600.0, "spatial"), (1100.0, FALLBACK)])
def test_stages_over_sms_step_in_where_no_vertical_kernel_can_be_built(broken, spatial_us: float, winner: str):
    """They are predicted too slow to be timed beside vertical pipelines; the best of them is, where those fail."""
    clock = Clock(vertical=broken, spatial=spatial_us, fallback=1000.0)
    made = plan(chain(8), 262_144, H200, Options(), clock)
    assert made.chosen.strategy == winner
    tried = [name for name in clock.asked if name.startswith("spatial")]
    by_prediction = sorted(
        (c for c in made.candidates if c.strategy == "spatial" and c.pipeline), key=lambda c: c.predicted_us or 0.0
    )
    assert tried == [by_prediction[0].name] and len(by_prediction) > 1


def test_stages_over_sms_are_not_timed_where_one_vertical_kernel_is_built(broken):
    kept = "vertical (one product in flight)"
    clock = Clock(**{"vertical": broken, kept: 600.0, "spatial": 1.0, "fallback": 1000.0})
    made = plan(chain(8), 262_144, H200, Options(), clock)
    assert made.chosen.name == kept and not any(name.startswith("spatial") for name in clock.asked)


def test_what_is_left_of_a_predicted_plan(broken):
    """Vertical pipelines one after another, then the best spatial one, then nothing."""
    made = plan(chain(8), 262_144, H200, Options())
    seen = []
    while made is not None:
        seen.append(made.chosen)
        made = planner.without(made, "could not be built")
    strategies = [c.strategy for c in seen]
    count = strategies.count("vertical")
    assert count > 1 and strategies[:count] == ["vertical"] * count and set(strategies[count:]) == {"spatial"}
    times = [c.predicted_us for c in seen[:count]]
    assert times == sorted(times)


def test_a_plan_without_its_choice_never_loses_to_the_fallback(unsure: None):
    clock = Clock(vertical=995.0, spatial=2000.0, fallback=1000.0)
    clock.us["vertical (one product in flight)"] = 500.0
    made = plan(chain(8), 262_144, H200, Options(), clock)
    assert made.chosen.measured_us == 500.0 and planner.without(made, "gone") is None


def test_nothing_measurable_means_the_fallback():
    broken = CompileError("no NVRTC", "install it")
    made = plan(chain(8), 262_144, H200, Options(), Clock(vertical=broken, spatial=broken, fallback=1000.0))
    assert made.chosen.strategy == FALLBACK


def test_a_program_error_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        plan(chain(8), 262_144, H200, Options(), Clock(vertical=ZeroDivisionError()))


@pytest.mark.parametrize("rows", [0, -1])
def test_unknown_rows_are_planned_for_and_never_measured(rows):
    clock = Clock()
    made = plan(nerf(), rows, H200, Options(), clock)
    assert not clock.asked and made.rows == rows
    assert made.chosen.pipeline is not None


def test_hopeless_candidates_are_not_measured():
    clock = Clock()
    plan(nerf(), 4096, H200, Options(), clock)
    assert not any(name.startswith("spatial (1 layer") for name in clock.asked)


def test_queue_depth_option_reaches_the_queues():
    made = plan(chain(4), 65_536, H200, Options(strategy="spatial", queue_depth=132))
    assert made.chosen.pipeline is not None
    assert {q.depth for q in made.chosen.pipeline.queues} == {132}
    with pytest.raises(PlanError, match="depth 2 <"):
        plan(chain(4), 65_536, H200, Options(strategy="spatial", queue_depth=2))


def test_equal_candidates_are_listed_once():
    made = plan(edge_block(), 32_768, H200, Options())
    pipelines = [c.pipeline for c in made.candidates if c.pipeline is not None]
    assert len(pipelines) == len(set(pipelines))


def test_planning_does_not_change_the_program():
    program = elementwise()
    before = repr(program)
    plan(program, 100, H200, Options())
    assert repr(program) == before


def test_the_same_input_gives_the_same_plan():
    assert plan(nerf(), 65_536, H200, Options()) == plan(nerf(), 65_536, H200, Options())


def test_independent_parts_of_a_region_are_planned_together():
    p = Program("towers")
    for name in ("a", "b"):
        p.store(p.linear(p.linear(p.load(name, 64), 64, "relu"), 64))
    made = plan(p.build(), 10_000, H200, Options())
    assert {c.strategy for c in made.candidates if c.pipeline is not None} >= {"vertical", "bulk"}
    assert not [
        c for c in made.candidates if c.strategy == "vertical" and c.rejected not in ("", "the same as vertical")
    ]
    one_each = split_bulk(p.build(), H200)
    assert len(one_each.stages) == 4


def test_one_and_two_products_in_flight_are_both_timed_where_weights_are_streamed():
    def vertical(program, us: dict[str, float]):
        made = plan(program, 262_144, H200, Options(), Clock(fallback=3000.0, spatial=2500.0, **us))
        return made, [
            c.pipeline.stages[0].in_flight
            for c in made.candidates
            if c.pipeline and c.strategy == "vertical" and "in place" not in c.detail
        ]

    made, tried = vertical(nerf(), {"vertical": 520.0, "vertical (one product in flight)": 500.0})
    assert tried[:2] == [2, 1] and made.chosen.detail == "one product in flight"
    # A ring of two pages leaves no choice, and resident weights have no pages to give back.
    assert vertical(edge_block(512, 2, "silu"), {"vertical": 520.0})[1] == [1]
    assert 1 not in vertical(edge_block(), {"vertical": 520.0})[1]


def test_weights_that_could_stay_are_also_streamed():
    clock = Clock(vertical=130.0, spatial=128.0, fallback=400.0, **{"vertical (weights streamed)": 104.0})
    made = plan(edge_block(), 262_144, H200, Options(), clock)
    verticals = {
        c.detail: c.pipeline.stages[0].residency for c in made.candidates if c.pipeline and c.strategy == "vertical"
    }
    assert verticals[""] is Residency.RESIDENT and made.chosen.detail == "weights streamed"
    assert made.chosen.pipeline is not None and made.chosen.pipeline.stages[0].residency is Residency.STREAMED
    other = plan(nerf(), 262_144, H200, Options()).candidates
    assert next(c for c in other if c.detail == "weights streamed").rejected == "the same as vertical"


def test_few_rows_are_spread_by_columns_over_twice_as_many_sms():
    def shard(rows: int) -> int:
        chosen = plan(chain(8), rows, H200, Options(strategy="vertical")).chosen.pipeline
        assert chosen is not None
        return chosen.stages[0].placement.dim

    assert (shard(8192), shard(262_144)) == (1, 0)


@pytest.mark.parametrize("name", sorted(devices.DEVICES))
@pytest.mark.parametrize("make", [chain, nerf, edge_block], ids=lambda f: f.__name__)
@pytest.mark.every(3)
def test_every_strategy_has_a_prediction_on_every_device(name, make):
    made = plan(make(), 65_536, devices.get(name), Options())
    assert {c.strategy for c in made.candidates if c.predicted_us} == {"vertical", "spatial", "bulk", FALLBACK}


def test_a_plan_keeps_no_frame_of_its_caller():
    """What a caller holds dies with it, and not when Python collects."""

    class Held:
        pass

    def caller() -> weakref.ref[Held]:
        held = Held()
        made = plan(chain(1, 16), 77_777, H200, Options())  # rows that no other test has made a plan for
        assert any("fewer than two linears" in (c.rejected or "") for c in made.candidates)
        return weakref.ref(held)

    with uncollected():
        assert caller()() is None


@pytest.mark.parametrize(("layers", "shape", "why"), [
    ((nn.Linear(8, 16), nn.ReLU()), (3, 192, 8), "one layer of 8 to 16 columns: an SM holds up to 512 whole"),
    ((nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), (4, 8), "product is not elementw"),
    ((nn.Linear(64, 600), nn.ReLU(), nn.Linear(600, 16)), (40_000, 64), "40000 rows are a tile for every SM of h200"),
    ((nn.Linear(600, 600), nn.ReLU()), (40_000, 600), "more than 2 turns of tiles, and its sum is not 4 times as long"),
])  # fmt: skip
@pytest.mark.every(2)
def test_no_way_to_share_a_tile_has_its_reason(layers: tuple[nn.Module, ...], shape: tuple[int, ...], why: str):
    (graph,) = capture(nn.Sequential(*layers).bfloat16(), [torch.randn(shape).bfloat16()]).graphs
    (region,) = partition(graph, projections=True).regions
    with pytest.raises(PlanError, match="has no legal shared pipeline: shared: .*" + why):
        plan(region.program, region.rows, devices.get("h200"), Options(strategy="shared"))


@pytest.mark.parametrize(("ins", "outs", "shared"), [(1000, 1021, True), (1021, 1000, False), (1021, 1021, False)])
def test_a_layer_whose_sum_is_no_multiple_of_8_long(ins: int, outs: int, shared: bool):
    """Rows that begin on no 16 bytes cannot be copied in bulk, which the plan says; results have any width."""
    layer = nn.Sequential(nn.Linear(ins, outs), nn.ReLU()).bfloat16()
    (graph,) = capture(layer, [torch.randn(4, ins).bfloat16()]).graphs
    (region,) = partition(graph, projections=True).regions
    made = [c for c in plan(region.program, 4, devices.get("h200"), Options()).candidates if c.strategy == "shared"]
    assert all((c.pipeline is not None) is shared for c in made) and made
    if not shared:
        (refused,) = made
        assert (
            "1021 x 2 = 2042 bytes along 'load0.c' are no multiple of 16, on which bulk copies start"
            in refused.rejected
        )


def test_no_refusal_is_without_a_reason():
    with pytest.raises(ValueError, match=r"a refused candidate, vertical \(tiles by columns\), has no reason"):
        Candidate("vertical", None, None, detail="tiles by columns")
