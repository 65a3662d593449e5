"""The evaluation of Kitsune: the paper's figures as data, ours from simulated runs, and the report of both."""

from __future__ import annotations

import importlib
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

from tilestream.simulator.library import products
from tilestream.studies.kitsune import low, paper, pictures, reasons, report, summary
from tilestream.studies.kitsune.outcome import LaunchTime, Outcome, StageTime, geomean, regions
from tilestream.studies.kitsune.reproduce import Reproduction, chosen
from tilestream.studies.kitsune.summary import (
    BASE,
    BULK,
    DRAM,
    EXECUTIONS_SHOWN,
    KITSUNE,
    MIXED,
    REUSE,
    SMS,
    VERTICAL,
    Other,
    RowRuns,
)

shares = st.floats(0, 1)


def launch(name: str, ops: str, seconds: float, sm: float = 0.9, dram: float = 0.1, phase: str = "forward"):
    busy = {"tensor": sm, "simt": sm / 2, "dram": dram, "l2": 0.2}
    stage = StageTime(name, "tensor", tuple(ops.split()), 2, 8, seconds, seconds / 2, {"queue": seconds / 8})
    return LaunchTime(name, tuple(ops.split()), phase, 0.0, seconds, busy, (stage,), {"dram": 1.0, "l2": 2.0})


def outcome(*launches: LaunchTime, execution: str = BULK, mode: str = "inference", app: str = "nerf") -> Outcome:
    total = sum(x.seconds for x in launches)
    series = ((0.0, total / 2, {"tensor": 0.5, "simt": 0.1, "dram": 0.2}), (total / 2, total, {"tensor": 0.9}))
    return Outcome(app, mode, "a100", execution, total, launches, 1e6, 2e6, 10, series)


def row(app: str = "nerf", mode: str = "inference", faster: float = 2.0) -> RowRuns:
    phase = "backward" if mode == "training" else "forward"
    runs = {}
    for variant, scale in ((BASE, 1.0), (SMS, 0.8), (DRAM, 0.5), (REUSE, 0.9)):
        for execution in EXECUTIONS_SHOWN:
            times = {BULK: 1.0, VERTICAL: 1 / 1.25}.get(execution, 1 / faster)
            parts = [launch("c", "z", 1e-6 * scale, sm=0.1)]
            if execution in (KITSUNE, MIXED):
                parts.append(launch("ab", "x y", 4e-6 * times * scale, dram=0.5, phase=phase))
            else:
                parts += [launch(op, op, 2e-6 * times * scale, phase=phase) for op in "xy"]
            runs[variant, execution] = outcome(*parts, execution=execution, mode=mode, app=app)
    fused = {VERTICAL: 2, KITSUNE: 3}
    traffic = {BULK: 100.0, VERTICAL: 90.0, KITSUNE: 40.0}
    other = Other("another batch", 4, 2, 3, 11.0, 61.0, 1.1, 1.7)
    found = {low.COUNTED: (0.2, 0.3), low.TENSOR: (0.5, 0.1)}
    return RowRuns(app, mode, 4, fused, traffic, runs, {"z": "gathers"}, {}, (other,), found)


def reproduction(*rows: RowRuns) -> Reproduction:
    return Reproduction("a100", rows, summary.figures(rows), 1.0)


def test_table_2_has_the_papers_shares() -> None:
    """The percentages that the paper prints beside the counts follow from the counts."""
    stated = {
        "DLRM inf": (81, 81), "GRC inf": (60, 83), "MGN inf": (71, 80), "NERF inf": (75, 100),
        "LL-CTX": (37, 70), "LL-TOK": (37, 70), "DLRM tr": (31, 78), "GRC tr": (20, 75),
        "MGN tr": (24, 73), "NERF tr": (26, 81), "LLAMA tr": (11, 39),
    }  # fmt: skip
    found = {
        r.label: (round(100 * r.fused_vertical / r.operators), round(100 * r.fused_kitsune / r.operators))
        for r in paper.TABLE2
    }
    assert found == stated
    assert len({r.key for r in paper.TABLE2}) == 11


def test_figures_have_keys_of_their_own_and_sources() -> None:
    every = [*paper.FIGURES, *paper.UNREADABLE]
    assert len({f.key for f in every}) == len(every)
    assert all(f.source and f.what for f in every)
    assert all(f.low <= f.high for f in paper.FIGURES)


@given(st.floats(0.1, 10), st.floats(0.1, 10))
def test_a_stated_range_holds_what_lies_in_it(a: float, b: float) -> None:
    low, high = sorted((a, b))
    stated = paper.Figure("k", "w", low, high, "x", "6")
    assert stated.holds(low, high)
    assert not stated.holds(low - 0.06, high)
    assert not stated.holds(low, high + 0.06)


@pytest.mark.parametrize(
    ("low", "high", "unit", "text"),
    [
        (1.5, 1.5, "x", "1.5x"),
        (1.04, 3.4, "x", "1.04 to 3.4x"),
        (50, math.inf, "%", "at least 50%"),
        (-math.inf, 2.8, "x", "at most 2.8x"),
        (0.1, 0.1, "%", "0.1%"),
        (37, 67, "%", "37 to 67%"),
    ],
)
def test_how_figures_are_written(low: float, high: float, unit: str, text: str) -> None:
    assert paper.span_text(low, high, unit) == text


@given(st.lists(st.tuples(st.floats(1e-7, 1e-3), shares, shares), min_size=1, max_size=8))
def test_quadrants_are_a_partition_of_the_time(parts) -> None:
    q = outcome(*(launch(str(i), "x", s, sm, dram) for i, (s, sm, dram) in enumerate(parts))).quadrants()
    assert math.isclose(q.both_low + q.only_dram_low + q.only_sm_low + q.neither, 1.0)
    both = sum(s for s, sm, dram in parts if sm < 1 / 3 and dram < 1 / 3)
    assert math.isclose(q.both_low, both / sum(s for s, _, _ in parts), abs_tol=1e-12)


def test_a_region_is_held_against_its_own_bulk_kernels() -> None:
    bulk = outcome(launch("a", "x", 2e-6), launch("b", "y", 3e-6), launch("c", "z", 7e-6))
    fused = outcome(launch("ab", "x y x", 2e-6), launch("c", "z", 6e-6), execution=KITSUNE)
    (region,) = regions(bulk, fused)
    assert region.ops == ("x", "y") and math.isclose(region.speedup, 2.5)


def test_our_figures_of_a_run_whose_times_are_known() -> None:
    found = summary.figures([row(), row("dlrm", faster=4.0), row("mgn", "training", faster=2.0)])
    assert found["inference_range"] == pytest.approx((5 / 3, 5 / 2))
    assert found["inference_geomean"][0] == pytest.approx(geomean([5 / 3, 5 / 2]))
    assert found["inference_regions"] == pytest.approx((2.0, 4.0))
    assert found["nerf_inference"] == pytest.approx((5 / 3, 5 / 3))
    assert found["vertical_geomean"][0] == pytest.approx(5 / 4.2)
    assert found["inference_share"][0] == pytest.approx(80.0)
    assert found["inference_traffic"] == pytest.approx((60.0, 60.0))
    assert found["backward_time"][0] == pytest.approx(4.0)
    assert found["low_bulk_inference"][0] == pytest.approx(20.0)
    assert found["low_kitsune_training"][0] == pytest.approx(100 / 3)
    assert found["dram_low_bulk_training"][0] == pytest.approx(80.0)
    assert found["sms_kitsune_inference"][0] == pytest.approx(25.0)
    assert found["dram_bulk_training"][0] == pytest.approx(100.0)
    assert "llama_prefill_e2e" not in found


def test_rows_beside_the_papers_in_json() -> None:
    data = reproduction(row(), row("dlrm", "training")).json()
    first = data["rows"][0]
    assert (first["app"], first["mode"], first["operators"]) == ("nerf", "inference", 4)
    assert (first["fused_vertical"], first["fused_kitsune"]) == (2, 3)
    assert first["traffic_vertical"] == pytest.approx(10) and first["traffic_kitsune"] == pytest.approx(60)
    assert first["speedup"] == pytest.approx(5 / 3)
    assert first["paper"]["traffic_kitsune"] == 98.58
    stated = {f["key"]: f for f in data["figures"]}
    assert stated["nerf_inference"]["paper"] == "2.3x" and not stated["nerf_inference"]["agrees"]
    assert stated["dram_kitsune_inference"]["paper"] == "bars only"
    assert {r["execution"] for r in data["runs"]} == set(EXECUTIONS_SHOWN)


def test_a_reason_is_shown_only_where_the_row_differs() -> None:
    data = reproduction(row()).json()["rows"][0]
    assert reasons.differs(data)
    same = {**data, **data["paper"]}
    assert not reasons.differs(same) and reasons.row(same) == ""


def test_other_choices_stand_beside_the_row() -> None:
    data = reproduction(row()).json()
    (cells,) = report.other_rows(data)
    assert cells == ["NERF inf", "another batch", "2 (18)", "3 (24)", "11.00 (40.19)", "61.00 (98.58)", "1.10", "1.70"]


def test_why_utilisation_does_not_reproduce_stands_beside_it() -> None:
    """The paper's share of time with SM and DRAM both low falls; each cause that may be behind it has a line."""
    data = reproduction(row(), row("dlrm"), row("mgn", "training")).json()
    fall = next(f for f in data["figures"] if f["key"] == "low_fall_inference")
    assert fall["paper"] == "11 points" and not fall["agrees"] and "Does not reproduce" in fall["why"]
    assert report.low_rows(data) == [
        ["the paper", "26", "15", "44", "18"],
        [low.COUNTED, "20.0", "30.0", "20.0", "30.0"],
        [low.TENSOR, "50.0", "10.0", "50.0", "10.0"],
    ]
    assert report.low_rows({"low": {}}) == []


def test_both_low_by_launch_by_pipes_and_by_moments() -> None:
    busy = [{"tensor": 0.1, "simt": 0.9, "dram": 0.1}, {"tensor": 0.1, "simt": 0.1, "dram": 0.1}]
    parts = [LaunchTime(str(i), ("x",), "forward", 0.0, 1.0, b) for i, b in enumerate(busy)]
    series = ((0.0, 1.5, busy[1]), (1.5, 2.0, busy[0]))
    run = Outcome("nerf", "inference", "a100", BULK, 2.0, tuple(parts), 0, 0, 0, series)
    assert run.quadrants().both_low == 0.5 and run.quadrants(("tensor",)).both_low == 1.0
    assert run.both_low_at_once() == 0.75


def test_a_library_for_the_time_of_a_study() -> None:
    odd = products.Product(1, 10_240, 256, 319, "bf16", "nt")
    stock = products.family_of(odd)
    with products.families(*products.aligned()):
        assert products.family_of(odd).copies == 0 < stock.copies
    assert products.family_of(odd) is stock


def test_the_report_shows_pictures_and_refers_to_nothing_outside(tmp_path) -> None:
    path = report.save(tmp_path, reproduction(row(), row("dlrm", "training")))
    text = path.read_text()
    assert text.count("data:image/png;base64,") == 6
    assert "http" not in text and 'src="/' not in text
    assert "98.58" in text and "bars only" in text
    assert {p.name for p in tmp_path.glob("*.png")} >= {"traffic.png", "speedup.png", "sensitivity.png"}


def test_a_figure_near_the_papers_is_not_marked_as_different() -> None:
    percent, factor = (paper.Figure("k", "w", v, v, unit, "6") for v, unit in ((81.0, "%"), (2.0, "x")))
    assert percent.nears(84, 84) and not percent.holds(84, 84) and not percent.nears(86.1, 86.1)
    assert factor.nears(2.2, 2.2) and not factor.nears(2.21, 2.21) and not factor.nears(1.79, 2.0)
    bound = paper.Figure("k", "w", -math.inf, 2.8, "x", "6")
    assert bound.nears(1.0, 3.0) and not bound.nears(1.0, 3.2)
    marks = {"agrees": False, "near": True}, {"agrees": False, "near": False}, {"agrees": True, "near": True}
    assert [report._mark(m) for m in marks] == ["near", "differs", ""]
    assert "5 points of a percentage, or by 10% of a speedup" in report.MARKS
    text = report.page(reproduction(row(), row("dlrm", "training")), {}).sections
    assert any(report.MARKS in section.text for section in text)


@pytest.mark.parametrize("draw", ["_speedup", "_traffic"])
def test_legends_lie_on_no_bar(draw: str) -> None:
    """NeRF's bars are the tallest, and stand where a legend inside of the axes would be put."""
    figure = getattr(pictures, draw)(reproduction(row("nerf", faster=9.0), row("dlrm", "training")))
    figure.draw_without_rendering()
    (legend,) = figure.legends
    (axes,) = figure.axes
    assert axes.get_legend() is None
    assert legend.get_window_extent().y0 >= axes.get_window_extent().y1


@pytest.mark.parametrize(("apps", "modes"), [(["resnet"], []), ([], ["both"]), (["llama_decode"], ["training"])])
def test_a_row_that_table_2_has_not(apps, modes) -> None:
    from tilestream.errors import OptionError

    with pytest.raises(OptionError, match="Table 2 has no"):
        chosen(apps, modes)


def test_what_is_published_has_a_reason_for_every_difference() -> None:
    data = json.loads((ROOT / "benchmarks" / "results" / "kitsune.json").read_text())
    assert [(r["app"], r["mode"]) for r in data["rows"]] == [(r.app, r.mode) for r in paper.TABLE2]
    assert not [r["label"] for r in data["rows"] if reasons.differs(r) and not r["why"]]
    batches = {r["label"] for r in data["rows"] for o in r["others"] if "of 1,024 tokens" in o["what"]}
    assert batches == {"LL-CTX", "LLAMA tr"}
    assert set(data["low"]) == {"inference", "training"} and set(data["low"]["training"]) == set(low.CAUSES)
    assert data["rows"] == [{**r, "why": reasons.row(r)} for r in data["rows"]]
    stated = {f.key: f for f in paper.FIGURES}
    for f in data["figures"]:
        assert f["key"] not in stated or f["why"] == reasons.figure(stated[f["key"]], tuple(f["ours"])), f["key"]
    keys = [f["key"] for f in data["figures"]]
    assert keys == [f.key for f in (*paper.FIGURES, *paper.UNREADABLE)]
    assert not [f["key"] for f in data["figures"] if f["paper"] != "bars only" and not f["agrees"] and not f["why"]]


def test_the_page_shows_what_is_published() -> None:
    tables = importlib.import_module("benchmarks.tables.kitsune_tables")
    for page in tables.PAGES:
        assert tables.filled(page) == page.read_text(), "run benchmarks/tables/kitsune_tables.py"
