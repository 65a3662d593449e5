"""Ragged pipelines on the event loop: time from the distribution of lengths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ragged_cases import CASES, INDEX, NODES, ragged

from tilestream.devices import get
from tilestream.errors import InputError, WorkloadError
from tilestream.ir.lengths import Lengths
from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.families import kernel_of
from tilestream.simulator import run, simulate
from tilestream.simulator.workload import Engine, SimLaunch, SimStage, TileWork, Workload

H200 = get("h200")
COUNT = 100_000


def lengths(skewed: bool) -> Lengths:
    """A million edges: random, or by a power law."""
    rng = np.random.default_rng(1)
    if not skewed:
        return Lengths.of(rng.multinomial(10 * COUNT, np.full(COUNT, 1 / COUNT)).tolist())
    share = rng.permutation(np.arange(1, COUNT + 1) ** -0.8)
    return Lengths.of(rng.multinomial(10 * COUNT, share / share.sum()).tolist())


def gather_sum(features: int = 64, busy: bool = False) -> Pipeline:
    text = "m[edges,f] = copy x[src[edges],f]\n s[nodes,f]:f32 = product m\n s -> Y[nodes,f]"
    told = " starts.busy[starts.busy.rows]:i32" if busy else ""
    names = f"{NODES} starts.busy.rows f={features}"
    return ragged(text, f"x[x.rows,f] {INDEX}{told} >Y[nodes,f]", names)


def us(p: Pipeline, of: Lengths) -> float:
    return simulate(p, {"x.rows": COUNT}, H200, lengths={"edges": of}).time_us


def test_tiles_of_unequal_work() -> None:
    work = TileWork(simt_ops=1e6)
    stage = SimStage("s", Engine.SIMT, 264, 132, work)
    times = {}
    for name, weights in {"equal": (), "ones": (1.0,) * 264, "one": (264.0, *(0.0,) * 263)}.items():
        launch = SimLaunch("l", (replace(stage, weights=weights),), launch_s=0.0)
        times[name] = run(Workload("w", (launch,)), H200).launches[0].seconds
    assert times["equal"] == times["ones"]
    assert times["one"] == pytest.approx(132 * times["equal"], rel=0.01)
    with pytest.raises(WorkloadError, match="3 weights for 264 tiles"):
        SimLaunch("l", (replace(stage, weights=(1.0, 1.0, 1.0)),))


def test_busy_nodes_cost_what_they_have_unless_they_are_dealt_out() -> None:
    even, skewed = lengths(False), lengths(True)
    assert even.total == skewed.total and skewed.largest > 100 * even.largest
    alone, dealt = gather_sum(), gather_sum(busy=True)
    assert us(alone, skewed) > 2 * us(alone, even)
    assert us(dealt, skewed) < 1.7 * us(dealt, even)  # on an H200 1.52 times


def test_a_time_is_above_its_floors_and_grows_with_the_edges() -> None:
    p = gather_sum(features=128, busy=True)
    floor = 1e6 * simulate(p, {"nodes": COUNT, "edges": 10 * COUNT}, H200).bytes["dram"] / H200.dram_bytes_per_s
    few, many = (simulate(p, {"nodes": COUNT, "edges": n * COUNT}, H200).time_us for n in (10, 40))
    assert floor < few < many < 6 * few


def test_a_kernel_of_segments_is_simulated_by_its_own_counts() -> None:
    p, of = gather_sum(busy=True), lengths(False)
    counts = kernel_of(p).cost(COUNT, H200, of.total)  # pyright: ignore[reportCallIssue]
    assert us(p, of) == pytest.approx(counts.seconds * 1e6, rel=0.5)


@pytest.mark.parametrize("name", CASES)
def test_what_was_assumed_is_said(name: str) -> None:
    p = CASES[name].pipeline
    made = simulate(p, 1000, H200)
    assert made.time_us > 0 and made.rows == 1000
    assert all(f"{axis}: mean 10.0, largest 10, assumed 10 each" in made.note for axis in p.ragged)
    assert simulate(p, 0, H200).time_us == 0


def test_lengths_that_are_given_are_those_of_the_call() -> None:
    p, of = gather_sum(), lengths(True)
    assert simulate(p, {}, H200, lengths={"edges": of}).note == f"edges: {of.told()}"
    assert simulate(p, {"nodes": 10, "edges": 50}, H200).note == "edges: mean 5.0, largest 5, assumed all equal"
    with pytest.raises(InputError, match="there are 7"):
        simulate(p, {"nodes": 7}, H200, lengths={"edges": of})
    spans = simulate(p, {"nodes": 512, "edges": 5120}, H200).spans
    assert {s.stage for s in spans} == {"s"} and not simulate(p, 512, H200, spans=False).spans
