"""Regions of models whose weights do not fit the L2 are timed on weights from DRAM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from modules import linear
from torch import Tensor, nn

from tilestream.devices import Device, get
from tilestream.graph.capture import capture
from tilestream.graph.region import Region
from tilestream.options import Options
from tilestream.plan.candidates import FALLBACK, Candidate
from tilestream.plan.find import find
from tilestream.run import fallback, prepare, time_regions, timing
from tilestream.run.made_up import random_arguments
from tilestream.run.target import Target
from tilestream.run.time_regions import region_trial
from tilestream.run.timer import Timer

OPTIONS = Options(cache=False)
WEIGHTS = 2 * 2 * 64 * 64 + 2 * 2 * 64
"""Bytes of the region's."""


def region_on(device: Device) -> Region:
    module = nn.Sequential(linear(64, 64), nn.ReLU(), linear(64, 64)).bfloat16()
    (graph,) = capture(module, [torch.randn(70, 64).bfloat16()]).graphs
    (region,) = find(graph, "inference", OPTIONS, device).regions
    return region


def device(l2_bytes: int) -> Device:
    return replace(get("h200"), l2_bytes=l2_bytes)


def test_weights_are_cold_where_the_graph_moves_more_than_the_l2_holds() -> None:
    moved = WEIGHTS + 2 * 2 * 70 * 64  # and what comes and leaves
    assert not region_on(device(moved)).cold and region_on(device(moved - 1)).cold


def test_one_set_is_enough_where_weights_are_warm_or_large() -> None:
    warm = region_on(get("h200"))
    values = random_arguments(warm)
    assert time_regions.cold_sets(warm, values, 10**6) == [values]
    large = replace(warm, cold=True)
    assert time_regions.cold_sets(large, values, WEIGHTS / time_regions.TIMES_L2) == [values]


def test_sets_are_more_than_the_l2_and_at_most_what_is_captured() -> None:
    region = replace(region_on(get("h200")), cold=True)
    values = random_arguments(region)
    found = time_regions.cold_sets(region, values, 3 * WEIGHTS)
    assert len(found) == 3 * time_regions.TIMES_L2
    for index in (p.index for p in region.parameters):
        assert len({given[index].data_ptr() for given in found}) == len(found)
        assert all(torch.equal(given[index], values[index]) for given in found)
    for index in (o.index for o in region.inputs):
        assert all(given[index] is values[index] for given in found), "what was just computed is in the L2"
    assert len(time_regions.cold_sets(region, values, 10**9)) == timing.MOST_CALLS


class Calls:
    """Stands for a CUDA graph on the CPU: four calls."""

    def __init__(self, run: Callable[[], Sequence[Tensor]]) -> None:
        self.run, self.outputs = run, run()
        for _ in range(3):
            run()

    def replay(self) -> None:
        for kept, new in zip(self.outputs, self.run(), strict=True):
            kept.copy_(new)


@pytest.mark.parametrize("sets", [1, 3])
def test_candidates_are_timed_on_the_sets_in_turn(sets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline and Inductor's code alike; each has seen all sets before it is captured."""
    seen: list[int] = []
    region = replace(region_on(get("h200")), cold=sets > 1)
    at = region.parameters[0].index

    def rest(graph: Any) -> fallback.Call:
        run = fallback.eager(graph)
        return lambda values: (seen.append(values[at].data_ptr()), run(values))[1]

    monkeypatch.setattr(timing, "capture", Calls)
    monkeypatch.setattr(timing, "to_choose", lambda arms: [[5.0] for _ in arms])
    monkeypatch.setattr(fallback, "rest", rest)
    target = Target("reference", torch.device("cpu"), device(sets * WEIGHTS // time_regions.TIMES_L2))
    candidates = [Candidate("vertical", region.program, 1.0), Candidate(FALLBACK, None, None)]
    assert Timer(region_trial(region, target), target)(candidates) == [5.0, 5.0]
    warm_up = sets if sets > 1 else 0
    assert len(seen) == warm_up + 4 and len(set(seen)) == sets
    assert all(a != b for a, b in zip(seen, seen[1:], strict=False)) or sets == 1


def test_a_plan_for_cold_weights_is_another() -> None:
    region, target = region_on(get("h200")), Target("cuda", torch.device("cpu"), get("h200"))
    keys = {prepare.question(replace(region, cold=c), OPTIONS, target).key(measured=True) for c in (False, True)}
    assert len(keys) == 2
    made = prepare.plan(region, OPTIONS.with_(measure=False), target)
    assert prepare.near_plan(region, OPTIONS.with_(measure=False), target) is made
    assert prepare.near_plan(replace(region, cold=True), OPTIONS.with_(measure=False), target) is None


@pytest.mark.gpu
def test_weights_from_dram_take_longer() -> None:
    """16 MB of weights: 5 us from an H100's DRAM."""
    module = nn.Sequential(linear(1024, 4096), nn.ReLU(), linear(4096, 1024)).to("cuda", torch.bfloat16)
    (graph,) = capture(module, [torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)]).graphs
    (region,) = find(graph, "inference", OPTIONS, get("h200")).regions
    target = Target("cuda", torch.device("cuda"), get("h200"))
    took = []
    for is_cold in (False, True):
        trial = region_trial(replace(region, cold=is_cold), target)
        took += Timer(trial, target)([Candidate(FALLBACK, None, None)])
    assert took[1] > took[0]
