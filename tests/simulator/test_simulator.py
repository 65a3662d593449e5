"""The simulator: it agrees with the cost model where that is exact, and shows what a formula cannot."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import Program, chain, edge_block, nerf
from strategies import pipelines

from tilestream import devices
from tilestream.errors import PipelineDeadlock
from tilestream.ir.pipeline import Pipeline, Queue, Stage
from tilestream.ir.sizes import tiles_of
from tilestream.ir.traffic import traffic
from tilestream.options import Options
from tilestream.plan.cost import predict
from tilestream.plan.planner import plan
from tilestream.simulator import Simulation, simulate
from tilestream.simulator.from_pipeline import launch_of

H200 = devices.get("h200")


def planned(program: Pipeline, rows: int, strategy: str) -> Pipeline:
    chosen = plan(program, rows, H200, Options(strategy=strategy)).chosen.pipeline  # pyright: ignore[reportArgumentType]
    assert chosen is not None
    return chosen


def starved(run: Simulation) -> set[str]:
    return {why for s in run.spans for why in (s.waited_for, s.held_for, s.slow_for)}


@pytest.mark.parametrize("rows", [16_384, 262_144])
@pytest.mark.parametrize("strategy", ["vertical", "spatial"])
@pytest.mark.parametrize("program", [chain(8), nerf(), edge_block()], ids=lambda p: p.name)
def test_stays_near_the_cost_model(program, strategy, rows):
    """Its steps are fitted to kernels and the cost model's are counted: they are of one size, not equal."""
    p = planned(program, rows, strategy)
    assert 0.8 < simulate(p, rows, H200).time_us / predict(p, rows, H200).us < 1.7


@pytest.mark.early  # compiles the event loop: ten seconds
def test_bulk_launches_take_what_library_kernels_take():
    p = planned(chain(4), 65_536, "bulk")
    run = simulate(p, 65_536, H200)
    assert len(run.launches_us) == 4
    assert run.time_us == pytest.approx(predict(p, 65_536, H200).us, rel=0.05)  # the closed form of the same kernels
    assert run.time_us == pytest.approx(sum(run.launches_us))


@settings(max_examples=40, deadline=None)
@given(pipelines(), st.integers(1, 3000))
def test_every_stage_works_on_every_tile_once_and_no_worker_on_two_steps(p, rows):
    run = simulate(p, rows, H200)
    seen: dict[tuple[int, str], list[int]] = defaultdict(list)
    by_worker: dict[tuple[int, int], list] = defaultdict(list)
    for span in run.spans:
        assert 0 <= span.start_us <= span.end_us <= run.time_us * (1 + 1e-9)
        seen[span.launch, span.stage] += range(span.tile, span.tile + span.tiles)
        by_worker[span.launch, span.worker].append(span)
    assert {stage for _, stage in seen} == {s.name for s in p.stages}
    assert all(sorted(tiles) == list(range(tiles_of(rows, p))) for tiles in seen.values())
    for spans in by_worker.values():
        ordered = sorted(spans, key=lambda s: s.start_us)
        assert all(a.end_us <= b.start_us + 1e-6 for a, b in zip(ordered, ordered[1:], strict=False))
        assert len({s.stage for s in spans}) == 1


@settings(max_examples=40, deadline=None)
@given(pipelines(), st.integers(1, 3000))
def test_no_tile_is_used_before_it_is_made(p, rows):
    run = simulate(p, rows, H200)
    per_tile = {(s.stage, t): s for s in run.spans for t in range(s.tile, s.tile + s.tiles)}
    for q in p.queues:
        for tile in range(tiles_of(rows, p)):
            for consumer in q.consumers:
                assert per_tile[consumer, tile].start_us >= per_tile[q.producer, tile].end_us - 1e-6


@settings(max_examples=20, deadline=None)
@given(pipelines(), st.integers(1, 3000))
def test_deterministic(p, rows):
    assert simulate(p, rows, H200) == simulate(p, rows, H200)


def test_no_rows_take_no_time():
    run = simulate(chain(2), 0, H200)
    assert (run.time_us, run.spans, set(run.bytes.values())) == (0.0, (), {0})


def test_a_full_queue_holds_its_producer_back():
    p = Program("uneven")
    h = p.linear(p.load("x", 256), 256, "relu")
    p.store(p.linear(h, 256, "gelu"))
    spatial = planned(p.build(), 65_536, "spatial")
    fair = simulate(spatial, 65_536, H200)
    lopsided = spatial.with_stages((spatial.stages[0].with_(replicas=66), spatial.stages[1].with_(replicas=4)))
    run = simulate(lopsided, 65_536, H200)
    assert run.time_us > 2 * fair.time_us
    assert any(name.endswith(" full") for name in starved(run))
    assert any(s.held_us > 0 for s in run.spans) and min(s.start_us - s.waited_us for s in run.spans) > -1e-9
    assert run.utilisation["s1"] > 0.8 > run.utilisation["s0"]


def test_a_queue_that_holds_less_than_a_step_is_a_deadlock_and_says_where():
    spatial = planned(chain(2), 65_536, "spatial")
    shallow = spatial.with_stages(spatial.stages, tuple(replace(q, depth=1) for q in spatial.queues))
    with pytest.raises(PipelineDeadlock, match=f"room for tile . in the queue of '{spatial.queues[0].tile}'"):
        simulate(shallow, 65_536, H200)


def test_an_empty_queue_holds_its_consumer_back():
    spatial = planned(chain(2), 65_536, "spatial")
    slow_source = spatial.with_stages((spatial.stages[0].with_(replicas=4), spatial.stages[1].with_(replicas=66)))
    assert spatial.queues[0].tile in starved(simulate(slow_source, 65_536, H200))


def test_deeper_queues_never_hurt():
    spatial = planned(nerf(), 65_536, "spatial")
    deeper = spatial.with_stages(spatial.stages, tuple(replace(q, depth=2 * q.depth) for q in spatial.queues))
    assert simulate(deeper, 65_536, H200).time_us <= simulate(spatial, 65_536, H200).time_us * 1.001


def test_an_input_that_several_stages_load_comes_from_dram_once():
    p = Program("twice")
    h = p.linear(p.load("x", 128), 128)
    p.store(p.op("add", 128, h, p.op("load", 128, params=("x",))))
    ops = p.build().stages[0].ops
    stages = (Stage.of("a", ops[:2], replicas=8), Stage.of("b", ops[2:], replicas=8))
    both = p.build().with_stages(stages, (Queue(h.name, "a", ("b",), depth=32),))
    rows = 16_384
    read = sum(s.work.dram_read * s.tiles + s.once.dram_read * s.ctas for s in launch_of(both, rows, H200).stages)
    assert read == traffic(both, rows).dram_read - 2 * 128  # all but the bias, which no tile takes in


def test_memory_bound_work_waits_for_dram():
    p = Program("stream")
    p.store(p.op("relu", 256, p.load("x", 256)))
    run = simulate(planned(p.build(), 1 << 20, "vertical"), 1 << 20, H200)
    assert "dram" in starved(run)
    assert run.utilisation["dram"] > 0.9
    assert run.time_us >= traffic(p.build(), 1 << 20).dram / H200.dram_bytes_per_s * 1e6 * 0.999


def test_utilisation_is_a_share():
    for strategy in ("vertical", "spatial", "bulk"):
        run = simulate(planned(chain(4), 65_536, strategy), 65_536, H200)
        assert {"tensor", "l2", "dram"} < set(run.utilisation)
        assert all(0 <= share <= 1 + 1e-9 for share in run.utilisation.values())


@pytest.fixture
def compiled() -> None:
    """The event loop is compiled, or read from disk."""
    simulate(planned(chain(2), 640, "spatial"), 640, H200)


def test_a_large_batch_is_quick_and_the_steady_state_is_said(compiled):
    rows = 1 << 24
    p = planned(chain(8), rows, "spatial")
    begun = time.process_time()  # of the processor: others may use the machine too
    run = simulate(p, rows, H200, most_steps=20_000)
    assert time.process_time() - begun < 5
    assert not run.exact and "steady rate" in run.note and int(run.note.split()[0]) < rows
    assert run.time_us == pytest.approx(simulate(p, rows // 8, H200).time_us * 8, rel=0.05)


@pytest.mark.parametrize("most_steps", [100_000, 1_000])
def test_without_spans_all_else_is_the_same(most_steps: int):
    p = planned(chain(3), 65_536, "spatial")
    whole = simulate(p, 65_536, H200, most_steps)
    assert whole.spans and whole.exact == (most_steps > 1_000)
    assert simulate(p, 65_536, H200, most_steps, spans=False) == replace(whole, spans=())


def test_extrapolation_agrees_with_the_whole_simulation():
    rows = 262_144
    p = planned(chain(8), rows, "spatial")
    whole = simulate(p, rows, H200)
    assert whole.exact and not whole.note
    part = simulate(p, rows, H200, most_steps=int(len(whole.spans) / 2))
    assert part.time_us == pytest.approx(whole.time_us, rel=0.03)


def test_the_usual_size_takes_a_few_seconds_at_most(compiled):
    begun = time.process_time()
    run = simulate(planned(nerf(), 262_144, "spatial"), 262_144, H200)
    assert run.exact and time.process_time() - begun < 5
