"""The simulator of workloads: what must hold of any workload, and the effects that it is there to show."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilestream import devices
from tilestream.devices import Device
from tilestream.errors import WorkloadError
from tilestream.simulator import run
from tilestream.simulator.placement import place
from tilestream.simulator.tables import compute_s
from tilestream.simulator.workload import Engine, SimLaunch, SimQueue, SimStage, TileWork, Workload

A100 = devices.get("a100")
SMALL = replace(A100.with_sms(4), name="small", l2_bytes=1_000_000, dram_bytes_per_s=2e11, l2_bytes_per_s=4e11)

amounts = st.sampled_from((0.0, 1e3, 3e4, 2e5))


@st.composite
def works(draw) -> TileWork:
    return TileWork(
        tensor_flops=draw(st.sampled_from((0.0, 1e6, 2e7))),
        simt_ops=draw(amounts),
        sfu_ops=draw(st.sampled_from((0.0, 1e4))),
        l2_read=draw(amounts),
        l2_write=draw(amounts),
        dram_read=draw(amounts),
        dram_write=draw(amounts),
        l2_shared_read=draw(amounts),
        latency_s=draw(st.sampled_from((0.0, 1e-7))),
    )


@st.composite
def launches(draw) -> SimLaunch:
    """Chains, trees and skips of up to four stages that fit on ``SMALL``, with fan-in and fan-out of tiles."""
    count = draw(st.integers(1, 4))
    stages = tuple(
        SimStage(
            f"s{i}",
            draw(st.sampled_from(Engine)),
            draw(st.integers(0, 40)),
            draw(st.integers(1, 4)),
            draw(works()),
            once=draw(works()) if draw(st.booleans()) else TileWork(),
            registers=16_384,
            overlap=draw(st.booleans()),
        )
        for i in range(count)
    )
    queues = []
    for i in range(1, count):
        producer = draw(st.integers(0, i - 1))
        # Deep enough for any skew between two paths: shallow rings have tests of their own.
        queues.append(SimQueue(f"s{producer}", (f"s{i}",), draw(st.sampled_from((1e3, 1e5))), depth=64))
    return SimLaunch("random", stages, tuple(queues), launch_s=1e-6)


workloads = st.lists(launches(), min_size=1, max_size=2).map(lambda parts: Workload("random", tuple(parts)))


def counted(workload: Workload, level: str) -> float:
    """Bytes that a workload asks for, straight from its numbers."""
    total = 0.0
    for launch in workload.launches:
        by_name = {s.name: s for s in launch.stages}
        for s in launch.stages:
            for work, times in ((s.work, s.tiles), (s.once, max(1, min(s.ctas, s.tiles)))):
                if level == "dram":
                    total += times * (work.dram_read + work.dram_write)
                else:
                    read = max(work.l2_read, work.dram_read - work.l2_shared_read) + work.l2_shared_read
                    total += times * (read + max(work.l2_write, work.dram_write))
        if level == "l2":
            for q in launch.queues:
                takers = sum(by_name[c].tiles > 0 for c in q.consumers)
                total += q.payload * by_name[q.producer].tiles * (1 + takers)
    return total


@settings(max_examples=60, deadline=None)
@given(workloads)
def test_bytes_are_those_of_the_workload_and_no_resource_is_above_its_rate(workload):
    made = run(workload, SMALL)
    assert made.bytes["l2"] == pytest.approx(counted(workload, "l2"))
    assert made.bytes["dram"] >= counted(workload, "dram") * (1 - 1e-9)  # rings may spill
    for launch in made.launches:
        assert all(0 <= share <= 1 + 1e-9 for share in launch.busy.values())
    for _, _, shares in made.utilisation:
        assert all(0 <= share <= 1 + 1e-9 for share in shares.values())
    assert made.time_s == pytest.approx(sum(launch.seconds for launch in made.launches))


@settings(max_examples=60, deadline=None)
@given(workloads)
def test_the_busy_time_over_the_run_is_the_work(workload):
    """What the series of utilisation adds up to is what the workload asks of each resource."""
    made = run(workload, SMALL)
    area = {name: sum((stop - start) * shares[name] for start, stop, shares in made.utilisation) for name in made.busy}
    stages = [stage for launch in workload.launches for stage in launch.stages]
    once = sum(s.once.tensor_flops * max(1, min(s.ctas, s.tiles)) for s in stages)
    flops = once + sum(s.work.tensor_flops * s.tiles for s in stages)
    assert made.flops == pytest.approx(flops)
    assert area["tensor"] == pytest.approx((flops - once) / SMALL.tensor_flops["bf16"], rel=1e-6, abs=1e-15)
    assert area["dram"] == pytest.approx(made.bytes["dram"] / SMALL.dram_bytes_per_s, rel=1e-6, abs=1e-15)


def bound(workload: Workload, device: Device) -> float:
    """The roofline of each launch: no resource can be faster."""
    total = 0.0
    for launch in workload.launches:
        alone = Workload("", (launch,))
        flops = sum(s.work.tensor_flops * s.tiles for s in launch.stages)
        total += max(
            flops / device.tensor_flops["bf16"],
            sum(s.work.simt_ops * s.tiles for s in launch.stages) / device.simt_flops,
            counted(alone, "dram") / device.dram_bytes_per_s,
            counted(alone, "l2") / device.l2_shared_bytes_per_s,
        )
    return total


@settings(max_examples=60, deadline=None)
@given(workloads)
def test_never_faster_than_the_roofline(workload):
    assert run(workload, SMALL).time_s >= bound(workload, SMALL) * (1 - 1e-9)


@settings(max_examples=30, deadline=None)
@given(workloads)
def test_deterministic(workload):
    assert run(workload, SMALL) == run(workload, SMALL)


def one_tile_each(workload: Workload, device: Device) -> float:
    """Seconds that one tile of every stage takes by itself: the grain of a schedule."""
    total = 0.0
    for launch in workload.launches:
        payloads = sum(q.payload * (1 + len(q.consumers)) for q in launch.queues)
        for s in launch.stages:
            for work in (s.work, s.once):
                moved = work.l2_read + work.l2_write + work.l2_shared_read + 2 * (work.dram_read + work.dram_write)
                total += sum(compute_s(work, device)) + work.latency_s + (moved + payloads) / device.dram_bytes_per_s
    return total


@settings(max_examples=40, deadline=None)
@given(workloads, st.sampled_from(("clock", "dram_bytes_per_s", "l2_bytes_per_s", "tensor_flops", "simt_flops")))
def test_faster_hardware_is_never_slower_beyond_the_grain_of_a_tile(workload, what):
    """Requests of other tiles may come first on faster hardware: a schedule moves by tiles, not by more."""
    if what == "clock":
        faster = SMALL.scale("tensor_flops", 2).scale("simt_flops", 2).scale("sfu_ops_per_s", 2)
    else:
        faster = SMALL.scale(what, 1.9)
    slack = one_tile_each(workload, SMALL)
    assert run(workload, faster).time_s <= run(workload, SMALL).time_s * 1.02 + slack


@settings(max_examples=30, deadline=None)
@given(launches(), st.integers(2, 4))
def test_more_sms_are_never_slower_beyond_the_grain_of_a_tile(launch, factor):
    workload = Workload("random", (launch,))
    more = SMALL.scale("sms", factor)
    assert run(workload, more).time_s <= run(workload, SMALL).time_s * 1.02 + one_tile_each(workload, SMALL)


def pair(tiles: int = 4000, ctas: int = 108, tensor_us: float = 4.0, simt_us: float = 4.0) -> SimLaunch:
    """A tensor stage that feeds a SIMT stage, ``tensor_us`` and ``simt_us`` of an A100's SM a tile."""
    tensor = TileWork(tensor_flops=tensor_us * 1e-6 * A100.tensor_flops["bf16"] / A100.sms)
    simt = TileWork(simt_ops=simt_us * 1e-6 * A100.simt_flops / A100.sms)
    stages = (
        SimStage("t", Engine.TENSOR, tiles, ctas, tensor, registers=32_768),
        SimStage("s", Engine.SIMT, tiles, ctas, simt, registers=32_768),
    )
    return SimLaunch("pair", stages, (SimQueue("t", ("s",), 32_768),))


def test_two_arbiters_pair_a_tensor_and_a_simt_cta_on_every_sm():
    launch = SimLaunch(
        "odd",
        (
            SimStage("a", Engine.TENSOR, 100, 70, TileWork(tensor_flops=1), registers=32_768),
            SimStage("b", Engine.SIMT, 100, 50, TileWork(simt_ops=1), registers=32_768),
            SimStage("c", Engine.TENSOR, 100, 38, TileWork(tensor_flops=1), registers=32_768),
            SimStage("d", Engine.SIMT, 100, 58, TileWork(simt_ops=1), registers=32_768),
        ),
    )
    engines = ("t", "s", "t", "s")
    for arbiters, paired in ((1, False), (2, True)):
        on_sm: dict[int, list[str]] = {}
        for engine, sms in zip(engines, place(launch, A100, arbiters), strict=True):
            for sm in sms:
                on_sm.setdefault(sm, []).append(engine)
        assert all(sorted(found) == ["s", "t"] for found in on_sm.values()) is paired


def test_two_arbiters_keep_both_pipes_of_an_sm_busy_where_one_doubles_up():
    """Stages in an order that makes one arbiter put two tensor CTAs on one SM and two SIMT CTAs on another."""
    t, s = pair().stages
    stages = tuple(replace(x, name=f"{x.name}{i}", ctas=54) for x in (t, s) for i in (0, 1))
    mixed = (stages[0], replace(stages[2], ctas=27), stages[1], replace(stages[3], ctas=81))
    launch = SimLaunch("mixed", mixed)
    single, dual = (run(Workload("w", (launch,)), A100, arbiter=a) for a in ("single", "dual"))
    assert dual.time_s < 0.85 * single.time_s
    assert dual.busy["tensor"] > single.busy["tensor"]
    assert run(Workload("w", (launch,)), A100.dual()).time_s == dual.time_s


def test_a_pipeline_overlaps_what_bulk_runs_one_after_the_other():
    launch = pair()
    t, s = (replace(stage, registers=32_768) for stage in launch.stages)
    bulk = run(Workload("bulk", (SimLaunch("t", (t,)), SimLaunch("s", (s,)))), A100).time_s
    spatial = run(Workload("spatial", (launch,)), A100.dual()).time_s
    assert 0.45 * bulk < spatial < 0.75 * bulk


def test_two_ctas_of_an_sm_overlap_tensor_and_simt_work_and_one_does_not():
    work = pair().stages[0].work + pair().stages[1].work
    alone = SimStage("both", Engine.TENSOR, 4320, 108, work)
    two = replace(alone, ctas=216, registers=32_768)
    times = {n: run(Workload("w", (SimLaunch("w", (s,)),)), A100).time_s for n, s in (("alone", alone), ("two", two))}
    assert times["two"] < 0.6 * times["alone"]
    overlapping = run(Workload("w", (SimLaunch("w", (replace(alone, overlap=True),)),)), A100).time_s
    assert overlapping == pytest.approx(times["two"], rel=0.1)


def test_a_slow_consumer_fills_its_queue_and_a_slow_producer_starves_it():
    for launch, reason, stage in ((pair(simt_us=16.0), "room", 0), (pair(tensor_us=16.0), "queue", 1)):
        waits = run(Workload("w", (launch,)), A100).launches[0].stages[stage].waits
        assert max(waits, key=lambda why: waits[why]) == reason


def test_waits_and_work_fill_the_time_of_every_cta():
    made = run(Workload("w", (pair(tiles=5400),)), A100)
    for stage in made.launches[0].stages:
        accounted = stage.busy_s + sum(seconds for why, seconds in stage.waits.items() if why != "pipe")
        assert accounted <= 108 * made.time_s * (1 + 1e-9)
        assert accounted >= 108 * made.time_s * 0.9


def test_rings_larger_than_the_l2_spill():
    small, large = (
        replace(pair(tiles=20_000), queues=(SimQueue("t", ("s",), 262_144, depth=depth),)) for depth in (1, 4)
    )
    fits, spills = (run(Workload("w", (launch,)), A100) for launch in (small, large))
    assert fits.bytes["dram"] == 0
    assert spills.bytes["dram"] > 0.5 * spills.bytes["l2"]
    assert spills.time_s > fits.time_s


def test_a_reduction_takes_partial_results_as_they_come():
    """Sixteen tiles for one of the consumer's, through a ring that holds two: nothing deadlocks, nothing is lost."""
    launch = pair(tiles=1600, ctas=16)
    stages = (launch.stages[0], replace(launch.stages[1], tiles=100, ctas=4))
    made = run(Workload("w", (replace(launch, stages=stages),)), A100)
    each = 4e-6 + 16 * A100.queue_exposed * A100.queue_s(32_768)
    assert made.launches[0].stages[1].busy_s == pytest.approx(100 * each, rel=0.15)


def test_a_multicast_queue_holds_an_entry_until_the_slowest_consumer_has_it():
    launch = pair(tiles=1000, ctas=50)
    slow = replace(launch.stages[1], name="slow", work=launch.stages[1].work.scaled(4))
    both = replace(launch, stages=(*launch.stages, slow), queues=(replace(launch.queues[0], consumers=("s", "slow")),))
    alone = replace(launch, stages=(launch.stages[0], slow), queues=(replace(launch.queues[0], consumers=("slow",)),))
    times = [run(Workload("w", (x,)), A100.with_sms(200)).time_s for x in (both, alone)]
    assert times[0] == pytest.approx(times[1], rel=0.1)


def test_a_skip_through_a_ring_too_short_is_a_deadlock_that_names_the_stages():
    """b gives one tile for eight of a's; c wants a's tiles beside it, and the ring to c holds two."""
    a, c = (replace(s, ctas=1, tiles=64) for s in pair().stages)
    b = replace(c, name="b", tiles=8)
    queues = (SimQueue("t", ("b",), 1024), SimQueue("t", ("s",), 1024, depth=2), SimQueue("b", ("s",), 1024))
    launch = SimLaunch("skip", (a, b, c), queues)
    with pytest.raises(WorkloadError, match="'skip' cannot go on: 't' at tile . of 64.*wait for each other"):
        run(Workload("w", (launch,)), A100)
    deeper = replace(launch, queues=(queues[0], replace(queues[1], depth=16), queues[2]))
    assert run(Workload("w", (deeper,)), A100).time_s > 0


def test_what_cannot_be_resident_is_an_error_that_says_what_is_missing():
    with pytest.raises(WorkloadError, match="432 CTAs fit, then stage 's'|cannot be resident on a100"):
        run(Workload("w", (pair(ctas=400),)), A100)
    with pytest.raises(WorkloadError, match="needs 70000 registers; a100 allows 65536"):
        run(Workload("w", (SimLaunch("l", (SimStage("big", Engine.SIMT, 1, 1, TileWork(), registers=70_000),)),)), A100)
    with pytest.raises(WorkloadError, match="'big' needs 200000 bytes of shared memory"):
        stage = SimStage("big", Engine.SIMT, 1, 1, TileWork(), shared_bytes=200_000)
        run(Workload("w", (SimLaunch("l", (stage,)),)), A100)
    with pytest.raises(WorkloadError, match="arbiter is 'triple'"):
        run(Workload("w", (pair(),)), A100, arbiter="triple")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"work": TileWork(dram_read=-1.0)}, "dram_read = -1"),
        ({"work": TileWork(simt_ops=math.inf)}, "simt_ops = inf"),
        ({"ctas": 0}, "0 ctas"),
    ],
)
def test_impossible_numbers_are_refused(change, match):
    with pytest.raises(WorkloadError, match=match):
        SimLaunch("l", (replace(pair().stages[0], **change),))


def test_more_ctas_than_fit_come_in_waves():
    """A kernel of one CTA a tile, one CTA an SM: its time goes in steps of a wave."""
    work = TileWork(tensor_flops=10e-6 * A100.tensor_flops["bf16"] / 108)
    times = {
        n: run(Workload("w", (SimLaunch("l", (SimStage("s", Engine.TENSOR, n, n, work),), launch_s=0.0),)), A100).time_s
        for n in (54, 108, 109, 216)
    }
    assert times[54] == pytest.approx(10e-6)
    assert times[108] == pytest.approx(10e-6)
    assert times[109] == pytest.approx(20e-6)
    assert times[216] == pytest.approx(20e-6)


def test_equal_launches_are_simulated_once():
    launch = pair(tiles=500)
    one, many = (run(Workload("w", (launch,) * n), A100) for n in (1, 50))
    assert many.events == one.events
    assert many.time_s == pytest.approx(50 * one.time_s)
    stages = tuple(replace(s, name=s.name * 2, ops=("x",)) for s in launch.stages)
    renamed = SimLaunch("other", stages, (SimQueue("tt", ("ss",), 32_768),))
    assert run(Workload("w", (launch, renamed)), A100).events == one.events


@pytest.mark.parametrize("tiles", [50_000, 200_000])
def test_joining_tiles_keeps_bytes_and_work_and_moves_the_time_little(tiles):
    launch = pair(tiles=tiles)
    launch = replace(
        launch, stages=tuple(replace(s, work=replace(s.work, dram_read=4096, l2_read=4096)) for s in launch.stages)
    )
    whole = run(Workload("w", (launch,)), A100, most_tiles=10**7)
    joined = run(Workload("w", (launch,)), A100, most_tiles=15_000)
    assert whole.exact and not joined.exact
    assert joined.tiles < 30_000 < whole.tiles
    assert joined.bytes == pytest.approx(whole.bytes) and joined.flops == pytest.approx(whole.flops)
    assert joined.time_s == pytest.approx(whole.time_s, rel=0.05)


def test_events_grow_with_tiles():
    events = [run(Workload("w", (pair(tiles=n),)), A100, most_tiles=10**7).events for n in (2_000, 4_000, 8_000)]
    assert events[1] == pytest.approx(2 * events[0], rel=0.1)
    assert events[2] == pytest.approx(4 * events[0], rel=0.1)


def test_no_launches_take_no_time():
    made = run(Workload("empty", ()), A100)
    assert (made.time_s, made.launches, made.utilisation) == (0.0, (), ())


def clustered(size: int, ctas: int = 4) -> Workload:
    work = TileWork(simt_ops=1e4)
    stages = tuple(SimStage(n, Engine.SIMT, 64, ctas, work, registers=65_536) for n in "ab")
    return Workload("pair", (SimLaunch("pair", stages, (SimQueue("a", ("b",), 16_384, cluster=size),)),))


def test_queues_of_a_cluster_move_nothing_through_the_l2_and_arrive_sooner():
    h200 = devices.get("h200")
    far, near = (run(clustered(size), h200) for size in (0, 8))
    assert near.bytes["l2"] == 0 < far.bytes["l2"]
    assert near.time_s < far.time_s


@pytest.mark.parametrize(
    ("device", "size", "ctas", "match"),
    [
        ("a100", 2, 4, "a100' has no clusters of 2 CTAs"),
        ("h200", 32, 4, "no clusters of 32 CTAs"),
        ("h200", 4, 62, r"124 CTAs .* are 31 clusters of 4; h200 holds 30"),
    ],
)
def test_clusters_that_a_device_cannot_hold(device: str, size: int, ctas: int, match: str):
    with pytest.raises(WorkloadError, match=match):
        run(clustered(size, ctas), devices.get(device))
