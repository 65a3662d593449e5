"""The HTML report serves one region and sixty: its structure, and how it looks in a browser at two widths."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import browser
import pytest
import torch
from torch import Tensor, nn

from tilestream import devices
from tilestream.apps.load import load
from tilestream.bench import analysed
from tilestream.options import Options
from tilestream.plan.analyse import analyse
from tilestream.plan.analysis import Analysis
from tilestream.plan.predicted import replan
from tilestream.report import headline, html, whole
from tilestream.report.explain import Report
from tilestream.report.groups import groups
from tilestream.report.simulation import Simulation
from tilestream.report.words import microseconds

WIDTHS = (1280, 420)
TALLEST = 6000
"""Pixels of a page of many regions, folded, at 1,280 pixels of width."""
needs_browser = pytest.mark.skipif(browser.CHROMIUM is None, reason="no chromium is installed")


class Block(nn.Module):
    """A region of its own: what it begins with, a sort, can be in none."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, hidden), nn.Linear(hidden, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x.sort(0).values).relu()) + x


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.with_a_long_name_for_the_blocks_of_the_processor = nn.ModuleList(Block(128) for _ in range(10))
        self.tail = nn.ModuleList(Block(256) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.with_a_long_name_for_the_blocks_of_the_processor, *self.tail):
            x = block(x)
        return x


@lru_cache
def deep() -> Analysis:
    x = torch.zeros(1, 1, dtype=torch.bfloat16).expand(60_000, 64)
    return analyse(Deep().bfloat16().eval(), (x,), Options(device="h200"))


@lru_cache
def nerf() -> Analysis:
    return analysed(load("nerf", 32768, fake=True), Options(device="h200"))


@lru_cache
def page(name: str) -> str:
    analysis = {"deep": deep, "nerf": nerf}[name]()
    return html.render(Report(analysis), html.content(Simulation.of(analysis)))


def times_of(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def test_equal_regions_are_one_group_and_folded() -> None:
    found = groups(deep())
    assert sum(len(g.regions) for g in found) == len(deep().regions) == 13
    running = [g for g in found if g.runs]
    assert {len(g.regions) for g in running} == {10, 3}
    assert running[0].title == "10 × with_a_long_name_for_the_blocks_of_the_processor.*"
    assert all(g.us is not None and g.inductor_us is not None and g.us < g.inductor_us for g in running)
    text = page("deep")
    assert times_of(r'<details class="part group">', text) == len(running), "folded, one a group"
    assert times_of(r"<svg class=\"pipeline\"", text) <= 4 * len(running), "drawn once a group"
    assert "Equal to it: region1, region2" in text


def test_one_region_is_open_and_its_time_stands_in_the_chart_alone() -> None:
    text = page("nerf")
    assert times_of(r'<details class="part group" open>', text) == 1
    above = text.split("What runs as pipelines")[0]
    ours, other = microseconds(nerf().predicted_us), microseconds(nerf().inductor_predicted_us)
    assert above.count(f"{ours} µs") == above.count(f"{other} µs") == 1
    for wanted in ("it is as tall as its result has columns", "What the words mean"):
        assert wanted in text
    for jargon in ("Shard(", "a barrier behind it"):
        assert jargon not in text


@pytest.mark.parametrize("name", ["deep", "nerf"])
def test_there_is_one_headline_and_at_most_six_cards(name: str) -> None:
    text = page(name)
    (first,) = re.findall(r"<h1>(.*?)</h1>", text)
    assert re.search(r"\d\.\d times as fast as Inductor, predicted$", first)
    cards = re.findall(r'<div class="card"><b>(.*?)</b>', text)
    assert 3 <= len(cards) <= headline.MOST_CARDS
    assert re.search(r">Inductor</text><rect", text), "the chart has Inductor's bar"


def test_a_headline_says_what_was_measured_and_where_nothing_pays() -> None:
    measured = replace(nerf(), measured_us=10.0, inductor_measured_us=25.0)
    assert headline.headline(measured) == "2.5 times as fast as Inductor, measured"
    assert ("tilestream", 10.0, "measured") in headline.times(measured)
    off = replace(nerf(), regions=())
    assert headline.headline(off) == "Inductor runs the whole model: no pipeline is faster"


def test_only_a_device_that_was_measured_carries_an_error() -> None:
    assert "18% mean error on an H200" in page("nerf")
    other = replan(nerf(), devices.get("a100"))
    scaled = replan(nerf(), devices.get("h200+sms*2"))
    for analysis in (other, scaled):
        report = Report(analysis)
        for text in (html.render(report, html.Content()), str(report), whole.times(analysis)):
            assert "not measured on this device" in text and "mean error" not in text


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["deep", "nerf"])
def test_nothing_leaves_its_box_in_a_browser(name: str, width: int, tmp_path: Path) -> None:
    folded, opened = browser.look(page(name), width, tmp_path)
    for look in (folded, opened):
        assert look.spilled == [] and look.wide == [] and look.overflow == 0
        assert 3 <= look.cards <= headline.MOST_CARDS
    assert folded.height < TALLEST and folded.height < opened.height


@needs_browser
def test_the_browser_sees_text_that_leaves_its_box(tmp_path: Path) -> None:
    bad = (
        '<style>.card { width: 60px; white-space: nowrap; }</style><div class="card">a name that is long</div>'
        '<div style="width: 3000px">wide</div><svg width="40"><text x="10" y="10">a label that is long</text></svg>'
        '<svg width="900"><g class="stage"><rect class="box" width="30" height="9"/><text>a long stage</text></g></svg>'
    )
    look, _ = browser.look(f"<!doctype html><body>{bad}</body>", 420, tmp_path)
    assert [s.split(":")[0] for s in look.spilled] == ["DIV", "stage", "svg"]
    assert look.overflow > 2000 and look.wide and look.cards == 1


@pytest.mark.exhaustive
@needs_browser
def test_a_training_step_of_129_regions_is_short(tmp_path: Path) -> None:
    analysis = analysed(load("mgn", fake=True, training=True), Options(device="h200"), True)
    text = html.render(Report(analysis), html.content(Simulation.of(analysis)))
    for width in WIDTHS:
        folded, opened = browser.look(text, width, tmp_path)
        assert folded.spilled == opened.spilled == [] and folded.overflow == opened.overflow == 0
        assert folded.cards <= headline.MOST_CARDS and (width < 1000 or folded.height < TALLEST)


def test_a_region_that_is_the_whole_model_has_inductors_time_once() -> None:
    """It is held against Inductor's own graph, in the chart and among the candidates alike; one of several regions
    against Inductor with each activation inside of the product in front of it."""
    assert "each activation that a library's product takes in" not in page("nerf")
    assert "each activation that a library's product takes in" in page("deep")
