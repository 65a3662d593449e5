"""Kernels with stamps: what they write down is complete, in order, and says what was waited for."""

from __future__ import annotations

import json
import logging
import re
import shutil
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import sass
import torch
from compiled import compile_source
from programs import chain, edge_block
from random_pipelines import random_pipeline, tensors_for
from random_programs import Limits
from samples import bulk, spatial
from stamped import check_complete, check_order

from tilestream import devices
from tilestream.cuda import stamps
from tilestream.cuda.host.build import HostRun, run_on_host, stamped_on_host
from tilestream.cuda.recording import CONSUMERS, DETAIL, WAIT, Recording, of_logs
from tilestream.cuda.stamps import Event
from tilestream.errors import CompileError, DeviceError, InputError, VerifyError
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Pipeline, Residency, Shard
from tilestream.kernels.fits import verify_on
from tilestream.kernels.parts.headers import headers
from tilestream.kernels.stream.emit import COUNTER_BYTES, emit, place_counters
from tilestream.options import Options
from tilestream.plan.analysis import Analysis
from tilestream.report import timeline
from tilestream.report.accounts import KINDS, compare, of_recording, of_simulation
from tilestream.report.measured import Measured, Measurements, device_here
from tilestream.report.simulation import Run, Simulation
from tilestream.run.record import record
from tilestream.simulator import simulate

pytestmark = pytest.mark.xdist_group("stamps")  # one process makes what its tests share
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
ROWS = 450


def with_stage(p: Pipeline, **changes) -> Pipeline:
    return p.with_stages((p.stages[0].with_(**changes),))


def few(p: Pipeline, replicas: int = 2) -> Pipeline:
    return p.with_stages(tuple(s.with_(replicas=replicas) for s in p.stages))


PIPELINES = {
    "one stage": lambda: chain(3, 64),
    "weights that stay": lambda: with_stage(chain(2, 64), residency=Residency.RESIDENT, replicas=2),
    "split columns": lambda: with_stage(edge_block(128), placement=Shard(1)),
    "pairs of CTAs": lambda: with_stage(chain(2, 128), group=2, replicas=4, residency=Residency.STREAMED),
    "queues": lambda: few(spatial(3)),
    "launches": lambda: replace(few(bulk(2)), strategy="spatial"),  # as kernels of ours, not of libraries
}


@lru_cache(maxsize=16)
def recorded(name: str, folder: Path) -> tuple[Pipeline, Recording]:
    pipeline = PIPELINES[name]()
    tensors = tensors_for(pipeline, ROWS)
    outputs, logs = stamped_on_host(pipeline, tensors, HostRun(folder=folder))
    plain = run_on_host(pipeline, tensors, HostRun(folder=folder))
    assert all(torch.equal(outputs[n], plain[n]) for n in plain)  # stamps change no result
    return pipeline, of_logs(pipeline, logs, "host")


@needs_compiler
@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.every(2)
def test_every_tile_of_every_stage_once_and_in_order(name: str, folder: Path) -> None:
    pipeline, run = recorded(name, folder)
    assert run.dropped == 0 and run.rows == ROWS
    check_complete(pipeline, run, ROWS)
    check_order(run)


@needs_compiler
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.every(3)
def test_random_pipelines(seed: int, folder: Path) -> None:
    pipeline = random_pipeline(seed, Limits(max_width=256, f32=seed % 4 == 3))
    try:
        verify_on(pipeline, devices.get("h200"))
    except VerifyError as e:
        pytest.skip(f"does not fit: {e}")
    _, logs = stamped_on_host(pipeline, tensors_for(pipeline, 260, seed), HostRun(folder=folder, seed=seed))
    run = of_logs(pipeline, logs, "host")
    check_complete(pipeline, run, 260)
    check_order(run)


@needs_compiler
def test_products_and_epilogues_of_every_step(folder: Path) -> None:
    pipeline, run = recorded("one stage", folder)
    parts = [s for s in run.slices if s.role < CONSUMERS and s.kind == DETAIL and s.tile == 0]
    assert [s.name for s in parts] == ["product", "epilogue"] * 3
    assert {s.name for s in run.slices if s.role >= CONSUMERS} >= {"load weights", "load rows", "store"}


@needs_compiler
def test_a_wait_at_a_queue_is_called_after_its_tile(folder: Path) -> None:
    """The first stage must come first, so the others wait for its tiles: the consumer, and the loader that polls."""
    _, run = recorded("queues", folder)
    last = [s for s in run.slices if s.stage == "layer2" and s.kind == WAIT]
    assert {s.name for s in last if s.reason == "queue"} <= {"h0", "h2"}
    assert any(s.name == "h2" and s.role < CONSUMERS and s.reason == "queue" for s in last)
    assert any(s.name == "h2" and s.role >= CONSUMERS and not s.reason for s in last)


@needs_compiler
def test_a_full_queue_is_told_from_slow_stores(folder: Path) -> None:
    """A queue of two tiles before a stage that has much more to do: its producer waits for room."""
    p = spatial(2)
    ops = p.stages[1].ops
    slow = tuple(op for op in ops if op.kind != "store")
    more = []
    source = slow[-1].out
    assert source is not None
    for k in range(40):
        more.append(replace(slow[1], out=replace(source, name=f"more{k}"), tiles=(more[-1].out.name if more else "r",)))
    stages = (
        p.stages[0].with_(replicas=1),
        replace(p.stages[1].with_(replicas=1), ops=(*slow, *more, replace(ops[-1], tiles=(more[-1].out.name,)))),
    )
    tight = p.with_stages(stages, tuple(replace(q, depth=2) for q in p.queues))
    tensors = tensors_for(tight, 1500)
    _, logs = stamped_on_host(tight, tensors, HostRun(folder=folder))
    run = of_logs(tight, logs, "host")
    assert any(s.reason == "room" and s.name.endswith(" full") and s.stage == "layer0" for s in run.slices)


@needs_compiler
def test_what_finds_no_room_is_counted_and_announced(folder: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(stamps, "MOST_BYTES", 2 * 6 * 16 * 5)  # five stamps a role of two CTAs
    pipeline = PIPELINES["one stage"]()
    with caplog.at_level(logging.WARNING):
        _, logs = stamped_on_host(pipeline, tensors_for(pipeline, ROWS), HostRun(folder=folder))
    run = of_logs(pipeline, logs, "host")
    assert run.dropped > 20
    assert f"{run.dropped} stamps of tilestream_chain3x64 found no room" in caplog.text
    check_order(run, whole=False)


@needs_compiler
@pytest.mark.parametrize("name", PIPELINES)
def test_accounts_add_up(name: str, folder: Path) -> None:
    pipeline, run = recorded(name, folder)
    simulated = simulate(pipeline, ROWS, devices.get("h200"))
    for accounts, launches_us in (
        (of_recording(run), run.launches_us),
        (of_simulation(simulated), simulated.launches_us),
    ):
        assert len(accounts) == len(pipeline.stages)
        for (launch, _), account in accounts.items():
            assert account.total_us == pytest.approx(launches_us[launch])
            assert min(account.us.values()) > -1e-6, account.us
            assert sum(account.parts_us.values()) <= account.us["work"] + 1e-6
    assert all(set(a.parts_us) == {"product", "epilogue"} for a in of_recording(run).values())
    compared = compare(simulated, run)
    assert [c.measured.stage for c in compared] == [s.name for s in pipeline.stages]
    for c in compared:
        wanted = simulated.launches_us[c.measured.launch] - run.launches_us[c.measured.launch]
        assert sum(c.error_us(k) for k in KINDS) == pytest.approx(wanted)


@needs_compiler
def test_only_the_same_run_is_compared(folder: Path) -> None:
    pipeline, run = recorded("queues", folder)
    device = devices.get("h200")
    with pytest.raises(InputError, match="simulate what was measured"):
        compare(simulate(pipeline, ROWS + 1, device), run)
    with pytest.raises(InputError, match="fewer rows"):
        compare(simulate(pipeline, ROWS, device, most_steps=4), run)
    with pytest.raises(InputError, match="those of libraries"):
        compare(simulate(replace(pipeline, strategy="bulk"), ROWS, device), run)


@needs_compiler
def test_a_kernel_that_starts_early_moves_the_origin(folder: Path) -> None:
    """With early launches a kernel may stamp before the one in front of it has: no time is before 0 all the same."""
    pipeline = PIPELINES["launches"]()
    _, (first, second) = stamped_on_host(pipeline, tensors_for(pipeline, ROWS), HostRun(folder=folder))
    late = replace(first, origin_ns=second.origin_ns + 500)
    run = of_logs(pipeline, [late, second], "host")
    assert min(s.start_us for s in run.slices) >= 0
    assert min(s.start_us for s in run.slices if s.launch == 0) >= 0.5
    events = timeline.trace({"net": simulate(pipeline, ROWS, devices.get("h200"))}, {"net": run})["traceEvents"]
    assert all(e["ts"] >= 0 for e in events if e["ph"] == "X")


@needs_compiler
def test_both_timelines_in_one_file(folder: Path, tmp_path: Path) -> None:
    pipeline, run = recorded("queues", folder)
    simulated = simulate(pipeline, ROWS, devices.get("h200"))
    path = timeline.write(tmp_path / "t.json", {"net spatial": simulated}, {"net spatial": run})
    made = json.loads(path.read_text())
    events = [e for e in made["traceEvents"] if e["ph"] == "X"]
    names = {pid: {e["name"] for e in events if e["pid"] == pid} for pid in (1, 2, 3)}
    stages = {s.name for s in pipeline.stages}
    assert stages <= names[1] and stages <= names[2] and {"product", "epilogue", "load rows"} <= names[3]
    assert "wait: launch" in names[1] and "wait: h1" in names[2]
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in events:
        tracks.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for slices in tracks.values():
        for a in slices:
            for b in slices:
                apart = a[1] <= b[0] + 1e-3 or b[1] <= a[0] + 1e-3
                nested = (a[0] - 1e-3 <= b[0] and b[1] <= a[1] + 1e-3) or (b[0] - 1e-3 <= a[0] and a[1] <= b[1] + 1e-3)
                assert apart or nested
    assert made["otherData"]["measured"]["net spatial"]["dropped_stamps"] == 0


@needs_compiler
def test_record_times_both_kernels_and_reads_the_last_run(folder: Path, monkeypatch) -> None:
    """Without a GPU: the two builds are the host's, and the times are made up."""
    pipeline = PIPELINES["queues"]()
    device = torch.device("cpu")
    calls: list[bool] = []

    class OnHost:
        def __init__(self, stamped: bool) -> None:
            self.stamped, self.device, self.found = stamped, device, []

        def __call__(self, tensors, rows: int) -> None:
            assert {t.shape[0] for n, t in tensors.items() if n == "x"} == {rows}
            calls.append(self.stamped)
            if self.stamped:
                self.found = stamped_on_host(pipeline, tensors, HostRun(folder=folder))[1]

        def logs(self):
            return self.found

    def timed(functions) -> list[float]:
        for function in functions:
            function()
        return [3e6, 4e6]

    monkeypatch.setattr("tilestream.cuda.build", lambda p, d, stamped: OnHost(stamped))
    monkeypatch.setattr("tilestream.run.record.timed_side_by_side", timed)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda d: "a GPU")
    run = record(pipeline, ROWS, device)
    assert calls == [False, True] and (run.time_us, run.stamped_us, run.device) == (3e6, 4e6, "a GPU")
    assert run.overhead == pytest.approx(1 / 3)
    check_complete(pipeline, run, ROWS)
    check_order(run)
    first_us = min(s.start_us for s in run.slices)
    assert first_us > 0 and sum(run.launches_us) == pytest.approx(
        4e6
    )  # what the stamps leave of the call is its launch
    with pytest.raises(InputError, match="at least one row"):
        record(pipeline, 0, device)


def test_events_are_those_of_the_header() -> None:
    text = re.search(r"enum Event : u32 \{(.*?)\};", headers()["stamps.cuh"], re.DOTALL)
    assert text is not None
    code = re.sub(r"//.*", "", text[1])
    assert [n.strip() for n in code.split(",") if n.strip()] == [e.name for e in Event]


def test_without_the_request_there_is_nothing_of_it_in_the_text() -> None:
    launch = chain(2, 64)
    assert "stamp" not in emit(launch).text.lower()
    stamped = emit(launch, stamped=True)
    assert stamped.text.count("sync.stamps.mark(PRODUCT, tile);") >= 1
    assert stamped.shared_bytes == emit(launch).shared_bytes + COUNTER_BYTES


def test_a_full_shared_memory_is_refused() -> None:
    with pytest.raises(CompileError, match="stamps need 96 of 232448"):
        place_counters(232440)


@needs_compiler
def test_the_report_tells_errors_by_stage_and_kind(folder: Path, monkeypatch) -> None:
    pipeline, run = recorded("queues", folder)
    run = replace(run, time_us=run.stamped_us / 1.1)
    outcome = simulate(pipeline, ROWS, devices.get("h200"))
    told = Measured(Run("region0", "spatial", True, pipeline, outcome), run, compare(outcome, run))
    made = Measurements((told,), ("region0, bulk: not recorded",))
    text = str(made)
    assert "region0 spatial: simulated" in text and "(+10.0%)" in text and "region0, bulk: not recorded" in text
    assert all(word in text for word in ("layer0", "layer2", "queue", "work", "product", "launch in all"))
    (facts,) = json.loads(json.dumps(made.json()))
    assert facts["overhead"] == pytest.approx(0.1) and facts["error"] < 0
    assert [s["stage"] for s in facts["stages"]] == ["layer0", "layer1", "layer2"]
    kinds = facts["stages"][2]["kinds"]
    assert kinds["queue"]["error_us"] == pytest.approx(kinds["queue"]["simulated_us"] - kinds["queue"]["measured_us"])
    assert made.recordings() == {"region0 spatial": run}


def test_a_library_kernel_is_not_recorded() -> None:
    pipeline = PIPELINES["launches"]()
    outcome = simulate(pipeline, ROWS, devices.get("h200"))
    found = Measurements.of(Simulation(_no_regions(), (Run("region0", "bulk", False, pipeline, outcome),), {}))
    assert found.runs == () and "library kernels" in found.problems[0]


def _no_regions() -> Analysis:
    return Analysis("net", "h200", Options(), (), (), ())


@pytest.mark.nvrtc
@pytest.mark.skipif(sass.disassembler() is None, reason="cuobjdump is not installed")
@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.every(2)
def test_kernels_with_stamps_compile_and_keep_the_rules(name: str) -> None:
    for launch in cut_at_dram(PIPELINES[name]()):
        source = emit(launch, stamped=True)
        assert sass.lint(compile_source(source).cubin, source) == []


def test_without_a_gpu_the_remedy_is_told(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="--measured runs kernels, and no CUDA GPU .* without --measured"):
        device_here(None)
