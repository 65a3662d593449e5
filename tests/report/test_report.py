"""Text, JSON, HTML and timelines say what the plan says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import samples
import torch
from modules import Fn
from torch import Tensor, nn

from tilestream.options import Options
from tilestream.plan.analyse import analyse
from tilestream.plan.analysis import Analysis
from tilestream.plan.candidates import Plan
from tilestream.plan.parts import Excluded, Share
from tilestream.report import charts, drawing, facts, html, timeline
from tilestream.report.explain import Report, sms, weights
from tilestream.report.words import microseconds, size
from tilestream.simulator import Simulation, Span


@pytest.fixture
def analysis() -> Analysis:
    """Four layers with a residual around them and a sort behind; FLOPs and the sort's place are made up."""
    layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4)).bfloat16()

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        first = h = layers[0](x).relu()
        for layer in layers[1:]:
            h = layer(h).relu()
        return (h + first).sort(0).values

    made = analyse(Fn(forward, layers).eval(), (torch.zeros(1, 1, dtype=torch.bfloat16).expand(5000, 64),), Options())
    region = replace(made.regions[0], flops=996)
    where = "model.py:33 in forward: x.sort()"
    excluded = Excluded("aten.sort.default", where, "needs all <rows> at once", "blocks.1.order")
    graph = replace(made.graphs[0], whole=Share(10, 1000))
    return replace(made, model="Net", graphs=(graph,), regions=(region,), exclusions=(excluded,), hints=())


def plan_of(analysis: Analysis) -> Plan:
    plan = analysis.regions[0].plan
    assert plan is not None
    return plan


def run(spans: int = 6) -> Simulation:
    made = []
    for worker, stage in enumerate(("layer0", "layer1")):
        at = float(worker)
        for step in range(spans):
            waited = 0.25 if step == 2 else 0.0
            why = "h1" if waited else ""
            made.append(Span(0, stage, 0, worker, 2 * step, 2, at + waited, at + waited + 1, waited, why))
            at += 1 + waited
    made.sort(key=lambda s: s.start_us)
    return Simulation("net", "h200", 5000, 12.5, (12.5,), tuple(made), {"dram": 10, "l2": 20}, {"tensor": 0.5})


def test_text_gives_coverage_candidates_stages_and_reasons(analysis: Analysis) -> None:
    text = str(Report(analysis))
    assert "Net on h200, 1 graph (inference), eval mode" in text
    who = "dataflow: 9 of 10 operators (90%), >99% of the FLOPs in 1 region; Inductor: 1 (10%), <1% of the FLOPs"
    assert f"{who}; eager: none" in text
    assert f"predicted: {microseconds(analysis.predicted_us)} us; all on Inductor: " in text
    assert "blocks.1.order" in text
    assert "aten.mm.default x4" in text
    plan = plan_of(analysis)
    for candidate in plan.candidates:
        if candidate.pipeline is not None:
            us = analysis.candidate_us(analysis.regions[0], candidate)
            assert candidate.name in text and us is not None and microseconds(us) in text
    assert re.search(r"\*\s+" + re.escape(plan.chosen.name), text)
    assert "linear 64>64 + relu" in text
    for launch in analysis.whole.launches:
        assert launch.name in text and microseconds(launch.predicted_us) in text
    assert "aten.sort.default" in text and "needs all <rows> at once" in text and "model.py:33" in text


def test_a_region_without_a_plan_says_why(analysis: Analysis) -> None:

    region = replace(analysis.regions[0], plan=None, problem="too wide")
    assert "left to Inductor: too wide" in str(Report(replace(analysis, regions=(region,))))


def test_json_is_plain_and_complete(analysis: Analysis) -> None:
    made = json.loads(json.dumps(Report(analysis).json()))
    assert made["coverage"] == {
        "operators": {"dataflow": 9, "inductor": 1, "eager": 0},
        "flops": {"dataflow": 996, "inductor": 4, "eager": 0},
    }
    assert made["predicted_us"] < made["inductor_predicted_us"] and made["measured_us"] is None
    region = made["regions"][0]
    assert len(region["candidates"]) == len(plan_of(analysis).candidates)
    assert region["chosen"]["pipeline"]["launches"][0]["stages"][0]["ctas"][0] == 0
    assert made["exclusions"][0]["reason"] == "needs all <rows> at once"
    assert made["exclusions"][0]["module"] == "blocks.1.order"


def test_stages_take_consecutive_ctas_and_queues_know_their_rings() -> None:
    described = facts.pipeline_facts(samples.spatial())
    ctas = [s["ctas"] for s in described["launches"][0]["stages"]]
    assert ctas == [[0, 3], [4, 7], [8, 11], [12, 15]]
    skip = next(q for q in described["launches"][0]["queues"] if q["tile"] == "h0")
    assert skip["tile_bytes"] == 64 * 64 * 2 and skip["ring_bytes"] == 64 * skip["tile_bytes"]
    bulk = facts.pipeline_facts(samples.bulk())
    assert len(bulk["launches"]) == 4 and len(bulk["dram_queues"]) == 4


def test_rare_properties_of_a_stage_are_told() -> None:
    p = samples.vertical()
    rare = p.with_stages((p.stages[0].with_(replicas=2, group=2, in_flight=1),))
    (stage,) = facts.pipeline_facts(rare)["launches"][0]["stages"]
    assert (sms(stage), weights(stage)) == ("0-1 in pairs", "32.0 KiB streamed, one in flight")
    (plain,) = facts.pipeline_facts(p)["launches"][0]["stages"]
    assert "in pairs" not in sms(plain) and weights(plain) == "32.0 KiB streamed"


def test_summary_counts_equal_layers() -> None:
    pipeline = samples.vertical()
    assert facts.summary(pipeline.stages[0], pipeline) == (
        "load 64, linear 64>64 + relu (x3), linear 64>64 + relu + add, store 64"
    )


class Page(HTMLParser):
    """Checks that tags nest, and collects what the page would load from elsewhere."""

    void = {"meta", "input", "br", "rect", "path", "line", "link", "img"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.void:
            self.open.append(tag)
        self.loaded += [v or "" for n, v in attrs if n in ("src", "href", "action", "xlink:href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [v or "" for n, v in attrs if n in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.void:
            assert self.open.pop() == tag


def test_page_is_self_contained_and_shows_the_plan(analysis: Analysis, tmp_path) -> None:
    report = Report(analysis)
    content = html.Content(
        times={"h200": [("vertical", 3.5, "predicted"), ("eager", 9.0, "measured")]},
        simulations={"region0": {"spatial": run()}},
        kernels=[{"kernel": "region0", "registers": "168"}],
        accuracy=[{"what": "reference", "rows": 1000, "error": 1e-3, "eager_error": 2e-3, "ok": True}],
        environment={"torch": "x.y", "gpu": None},
    )
    text = html.write(tmp_path / "deep" / "r.html", report, content).read_text()
    page = Page()
    page.feed(text)
    assert page.open == [] and page.loaded == []
    assert not re.search(r"https?://|url\(", text)
    for wanted in ("within tolerance", "torch x.y", "168", "aten.sort.default", "needs all &lt;rows&gt; at once"):
        assert wanted in text
    for candidate, _ in facts.distinct(plan_of(analysis)):
        assert f">{candidate.strategy}</label>" in text
    assert "measured µs" not in text, "no column without a figure"
    assert "Launches in order" in text and ">sort</td>" in text
    for wanted in (
        "90%</b><span>of the 10 operators run in pipelines",
        "as fast as Inductor, predicted",
        "blocks.1.order",
    ):
        assert wanted in text


def test_drawing_has_every_stage_and_queue() -> None:
    pipeline = samples.spatial()
    svg = drawing.svg(pipeline)
    assert all(f">{s.name}<" in svg for s in pipeline.stages)
    assert svg.count('class="queue l2"') == len(pipeline.queues)
    assert "64 × 8.0 KiB" in svg  # the deep ring of the skip
    assert drawing.svg(samples.bulk()).count('class="queue dram"') == 4
    layers = drawing.svg(samples.vertical(6))
    assert layers.count("64→64") == 6


def test_gantt_shows_waits_and_survives_no_rows() -> None:
    svg = charts.gantt(run())
    assert svg.count('class="wait"') == 2 and "waits for h1: 0.25" in svg
    empty = Simulation("net", "h200", 0, 0.0, (), (), {}, {})
    assert "no rows" in charts.gantt(empty)


def test_trace_is_what_perfetto_reads(tmp_path) -> None:
    made = json.loads(timeline.write(tmp_path / "t.json", {"net": run()}).read_text())
    events = made["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X"}
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == 12 + 2
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "SM 0: layer0[0]", 1: "SM 1: layer1[0]"}
    for tid in names:
        own = sorted((e["ts"], e["dur"]) for e in slices if e["tid"] == tid)
        assert all(a + d <= b + 1e-6 for (a, d), (b, _) in zip(own, own[1:], strict=False))
    waits = [e for e in slices if e["cat"] == "wait"]
    assert {w["name"] for w in waits} == {"wait: h1"} and waits[0]["dur"] == 0.25


def test_sizes_and_times_are_short() -> None:
    assert [microseconds(v) for v in (None, 1234.5, 12.34, 1.234)] == ["", "1,234", "12.3", "1.23"]
    assert [size(v) for v in (None, 12, 2048, 3 << 20)] == ["", "12 B", "2.0 KiB", "3.0 MiB"]
