"""The studies: reference counts are met, published figures are as published, the document is what the results say."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from pathlib import Path

import pytest
from places import ROOT

from tilestream.errors import SparseError
from tilestream.sparse import graphs
from tilestream.sparse.reproduce import (
    STUDIES,
    Options,
    Study,
    attention,
    fusion,
    models,
    paper,
    run,
    schedules,
    traffic,
)
from tilestream.sparse.reproduce.study import markdown, off, text


def stored(name: str) -> Study:
    return Study.read(ROOT / "benchmarks" / "results" / "sparse" / f"{name}.json")


def test_every_reference_count_is_met() -> None:
    study = run("kernels", Options())
    compared = as_sam = 0
    for row in study.rows:
        assert row["exact"], row
        if row["Comal"]:
            assert abs(row["cycles"] / row["Comal"] - 1) < 0.005, row
            compared += 1
        if row["SAM in Python"]:
            assert abs(row["as SAM times"] / row["SAM in Python"] - 1) < 0.005, row
            as_sam += 1
        for got, want in (("values written", "reference values"), ("sum", "reference sum")):
            assert row[want] is None or row[got] == row[want], row
    assert (compared, as_sam) == (15, 8)


def test_sampled_products_are_exact_and_near_sams() -> None:
    rows = run("sddmm", Options()).rows
    assert len(rows) == 9 and all(row["exact"] for row in rows)
    for row in rows:
        assert abs(row["as SAM times"] - row["SAM in Python"]) <= 4, row
        assert row["as SAM times"] >= row["cycles"]


def test_the_best_order_beats_the_worst_as_published() -> None:
    rows = schedules.orders(Options()).rows
    assert len(rows) == 24 and all(row["exact"] for row in rows)
    cycles = [row["cycles without locating"] for row in rows]
    assert abs(max(cycles) / min(cycles) / paper.ORDER_SPREAD - 1) < 0.02


def test_published_speedups_follow_from_published_cycles() -> None:
    assert round(paper.speedup("GPT-3", "16", "full"), 2) == 2.70
    assert round(paper.speedup("GCN", "collab", "partial"), 2) == 2.58
    assert round(paper.speedup("GraphSAGE", "mag", "partial"), 2) == 3.92
    assert round(paper.speedup("SAE", "imagenet", "full"), 2) == 0.67


@pytest.mark.parametrize("make", [models.gcn, models.graphsage])
def test_fusion_of_graph_networks(make) -> None:
    """Partial fusion gains, and full fusion costs what walks of two edges cost; values are dense PyTorch's."""
    graph = graphs.karate()
    rows = fusion.rows_of(make(graph), None, Options())
    assert [row["fusion"] for row in rows] == list(paper.FUSIONS)
    assert all(row["error"] < 1e-12 for row in rows)
    assert rows[1]["speedup"] > 1.3
    walks = graph.two_paths * (graph.features + 1)
    assert abs(rows[2]["cycles"] / walks - 1) < 0.15


def test_what_takes_too_long_is_estimated_and_says_so() -> None:
    case = models.gcn(graphs.karate())
    ran = fusion.rows_of(case, None, Options())
    expected = fusion.rows_of(case, None, Options(most_cycles=10))
    assert {row["how"] for row in expected} == {"estimated"} and {row["how"] for row in ran} == {"simulated"}
    for a, b in zip(expected, ran, strict=True):
        assert a["error"] is None and abs(a["cycles"] / b["cycles"] - 1) < 0.1


def test_one_image_explains_the_released_autoencoder() -> None:
    rows = fusion._one_image(Options())
    full = rows[-1]
    assert abs(full["cycles"] / full["published"] - 1) < 0.005
    assert rows[0]["cycles"] < rows[1]["cycles"] and full["speedup"] < 1


def test_a_batch_explains_the_papers_autoencoder() -> None:
    rows = fusion.rows_of(models.sae(256, 128, 32, 0.5), None, Options())
    assert abs(rows[2]["speedup"] / paper.SAE_SPEEDUP - 1) < 0.06
    assert abs(rows[1]["speedup"] - 1.01) < 0.05


def test_channels_deadlock_stall_and_then_lose_nothing() -> None:
    case = attention.case(sequence=16, heads=1, width=4, block=4)
    rows = schedules.depths("attention", case.compile("full"), case.inputs)
    assert rows[0]["deadlock"] and "no room" in rows[0]["deadlock"]
    ran = [row["cycles"] for row in rows if row["cycles"]]
    assert ran == sorted(ran, reverse=True)
    assert rows[-1]["cycles"] == case.compile("full").run(*case.inputs).cycles


def test_rows_that_were_read_off_the_paper_say_so() -> None:
    options = Options(quick=True)
    small = {name: fusion.graph_of(name, options) for name in ("cora_ml", "dblp", "collab")}
    assert [fusion.fits(name, graph) for name, graph in small.items()] == [{}, {"full": fusion.WALKS}, {}]
    assert fusion.fits("cora", graphs.karate()) == {"unfused": "order"}
    assert fusion.fits("dblp", replace(small["dblp"], real=True)) == {}
    assert fusion.untold("cora_ml", small["cora_ml"], options) is None
    other = fusion.untold("dblp", small["dblp"], options)
    assert other is not None and other.edges == small["dblp"].edges
    assert other.two_paths < 0.95 * small["dblp"].two_paths
    for name in ("gcn", "graphsage"):
        study = stored(name)
        fitted = {(row["data"].split(" on ")[1], row["fusion"]) for row in study.rows if row["fitted"]}
        assert fitted == {("cora", "unfused"), ("dblp-like", "full")}
        assert [row["fusion"] for row in study.rows if fusion.UNTOLD in row["data"]] == ["full"]


def test_no_walks_of_a_published_figure_stand_in_the_counts() -> None:
    assert graphs.COUNTS["dblp"].two_paths == 0 and graphs.COUNTS["cora_ml"].two_paths == 292_482
    assert paper.walks("GCN", "cora_ml", 2879) == 292_494


def test_the_released_image_of_the_autoencoder_is_a_fit() -> None:
    rows = stored("sae").rows
    assert [r["fitted"] for r in rows if r["published"]] == [fusion.ONE_IMAGE] * 2
    assert list(rows) == [fusion._beside(dict(row)) for row in rows]
    told = {r["fusion"]: r["published speedup"] for r in rows if "weights 50%" in str(r["data"])}
    assert told == {"unfused": None, "partial": 1.01, "full": 1.94}


def test_lanes_stand_beside_the_cycles_of_their_own_level() -> None:
    rows = {str(row["lanes"]): row for row in stored("parallel").rows}
    assert list(rows.values()) == [attention.beside(dict(row)) for row in rows.values()]
    assert (rows["heads x2"]["published"], rows["rows x2"]["published"]) == (403_087_023, 403_054_894)
    assert rows["rows x16"]["published"] is None and rows["both x4"]["published"] == 50_390_209


def test_errors_of_fits_and_of_others_are_told_apart() -> None:
    rows = (
        {"off": "+10.00 %", "words off": "-50.00 %", "fitted": None, "speedup": 1.0, "published speedup": 1.0},
        {"off": "-30.00 %", "words off": None, "fitted": None, "speedup": 3.0, "published speedup": 2.0},
        {"off": "+1.00 %", "words off": None, "fitted": "order", "speedup": 2.0, "published speedup": 2.0},
        {"off": None, "words off": None, "fitted": None, "speedup": 2.0, "published speedup": None},
    )
    study = Study("x", "Title", "a source", rows)
    found = {(e.what, e.fits): (e.count, round(e.mean, 4), round(e.worst, 4)) for e in study.errors()}
    assert found == {
        ("off", False): (2, 0.2, 0.3),
        ("off", True): (1, 0.01, 0.01),
        ("words off", False): (1, 0.5, 0.5),
        ("speedup", False): (1, 0.5, 0.5),
        ("speedup", True): (1, 0.0, 0.0),
    }
    assert "- off, 2 rows not fitted: 20.0% in the mean, 30.0% at most." in study.markdown()
    assert study.json()["errors"][1]["fits"]


def test_one_layer_is_fused_alone() -> None:
    """Figure 14's rows L1 only and L2 only: regions of that layer, and every other operator for itself."""
    case = models.gcn(graphs.karate())
    rows = fusion.rows_of(case, None, Options(), fusions=("unfused", "layer 1", "layer 2", "partial"))
    regions = [len(case.compile(row["fusion"]).regions) for row in rows]
    assert regions == [8, 5, 5, 2] and all(row["error"] < 1e-12 for row in rows)
    operations = [row["operations"] for row in rows]
    assert operations[1] + operations[2] == operations[0] + operations[3]


def test_studies_run_without_coras_links(monkeypatch) -> None:
    monkeypatch.delenv(graphs.CORA, raising=False)
    assert fusion.graph_of("cora", Options(quick=True)).name == "cora-like"
    with pytest.raises(SparseError, match="no file"):
        fusion.graph_of("cora", Options(cora=Path("nowhere")))


def test_operations_and_words_stand_beside_figure_14() -> None:
    rows = [
        {"data": "x", "fusion": f, "how": "simulated", "operations": 2 * o, "bytes": 4 * w}
        for f, (o, w) in paper.FIGURE14["dblp"].items()
    ]
    assert list(paper.FIGURE14["dblp"]) == ["unfused", "layer 1", "layer 2", "partial", "full"]
    study = traffic.beside(dict.fromkeys(paper.FIGURE14, rows))
    (full,) = [r for r in study.rows if r["published words"] == 13_815_099_378]
    assert (full["off"], full["words off"]) == ("+100.00 %", "+0.00 %")
    assert full["of unfused"] == full["published, of unfused"] and full["words of unfused"] == 10.304


def test_orders_are_counted() -> None:
    rows = run("counting", Options()).rows
    (gcn,) = [r for r in rows if (r["model"], r["regions"]) == ("GCN", "fused")]
    assert (gcn["indices"], gcn["orders"], gcn["admitted"]) == (6, 720, 90)
    assert len(models.gcn(graphs.karate()).compile("full", max_orders=1000).regions[0].orders) == 90


def test_decoders_add_up() -> None:
    sizes = attention.Sizes(32, 16, 2, 64)
    totals = attention._decoders(sizes, 8, True, Options())
    expected = attention._decoders(sizes, 8, False, Options())
    blocked = attention._decoders(sizes, 8, True, Options(), tile=8)
    for found in (totals, expected, blocked):
        assert found["full"].cycles < found["partial"].cycles < found["unfused"].cycles
    for name, ran in totals.items():
        assert ran.error is not None and ran.error < 1e-12
        assert (blocked[name].error or 0.0) < 1e-12 and blocked[name].cycles < ran.cycles / 8
        assert expected[name].error is None
        assert expected[name].cycles == pytest.approx(ran.cycles, rel=0.1)
        assert expected[name].flops == pytest.approx(ran.flops, rel=0.02)
        assert expected[name].bytes == pytest.approx(ran.bytes, rel=0.05)


@pytest.mark.skipif(graphs.FILES["cora_ml"] not in os.environ, reason="no file of Cora_ML is known")
def test_the_public_cora_ml_gives_the_published_full_fusion() -> None:
    """Nothing is fitted: the walks of two edges are those of its links."""
    made = graphs.npz("cora_ml")
    counts = graphs.COUNTS["cora_ml"]
    assert (made.edges, made.two_paths, made.real) == (counts.edges, counts.two_paths, True)
    for make, model in ((models.gcn, "GCN"), (models.graphsage, "GraphSAGE")):
        case = make(made)
        expected = models.measure(case, case.compile("full"), 0)
        assert abs(expected.cycles / paper.FIGURE12[model]["cora_ml"][2] - 1) < 0.01


@pytest.mark.skipif(graphs.CORA not in os.environ, reason=f"{graphs.CORA} does not say where Cora's links are")
def test_cora_has_its_published_counts() -> None:
    cora = graphs.cora()
    assert (cora.nodes, cora.edges, cora.two_paths) == (2708, 10556, 115158)
    for fusion_, published in zip(paper.FUSIONS, paper.FIGURE12["GCN"]["cora"], strict=True):
        case = models.gcn(cora)
        expected = models.measure(case, case.compile(fusion_), 0)
        assert abs(expected.cycles / published - 1) < 0.035


def test_studies_are_kept_and_shown(tmp_path: Path) -> None:
    study = Study("x", "Title", "a source", ({"a": 1, "b": 2.5}, {"a": 12345, "b": None}), ("a note",))
    path = tmp_path / "x.json"
    import json

    path.write_text(json.dumps(study.json()))
    assert Study.read(path) == study
    shown = markdown([study])
    assert "| 12,345 |  |" in shown and "- a note" in shown and shown.startswith("## Title")
    assert (text(None), text(True), text(1234.5), text(0.12345), off(102, 100)) == (
        "",
        "yes",
        "1,234",
        "0.123",
        "+2.00 %",
    )


def test_the_document_is_what_the_results_say() -> None:
    tables = importlib.import_module("benchmarks.tables.sparse_tables")
    assert tables.PAGE.read_text(encoding="utf-8") == tables.page(), "run python -m benchmarks.tables.sparse_tables"
    assert {p.stem for p in tables.FOLDER.glob("*.json")} >= {"gcn", "graphsage", "gpt3", "kernels", "order"}
    assert set(STUDIES) >= {"gcn", "graphsage", "gpt3", "sae", "parallel", "order", "sparsity", "heuristic", "channels"}
