"""The plan cache: what it is keyed by, and that bad files and bad folders do no harm."""

from __future__ import annotations

import json
import logging
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from clock import Clock
from hypothesis import given
from hypothesis import strategies as st
from programs import chain, edge_block

from tilestream import devices
from tilestream.errors import PlanError
from tilestream.options import Options
from tilestream.plan import chooser, planner
from tilestream.plan.cache import PlanCache, plan_from_json, plan_to_json, seal, sealed
from tilestream.plan.chooser import NotTimedNow
from tilestream.plan.planner import bucket, plan, question

H200 = devices.get("h200")


@pytest.fixture
def planned(monkeypatch):
    """Counts how often the planner really runs."""
    calls: list[int] = []
    proposals = planner.proposals

    def counting(program, rows, *rest):
        calls.append(rows)
        return proposals(program, rows, *rest)

    monkeypatch.setattr(planner, "proposals", counting)
    return calls


def cached_plan(program, rows, device, options, measure=None):
    """As a process that has chosen nothing yet asks for it."""
    chooser.forget()
    return chooser.choose(question(program, rows, device, options), options, measure)


def key(program, rows, device, options, measured):
    return question(program, rows, device, options).key(measured)


def files(folder: Path) -> list[Path]:
    return sorted((folder / "plans").glob("*"))


def test_the_second_time_comes_from_disk(tmp_path, planned):
    options = Options(cache_dir=tmp_path)
    first = cached_plan(chain(8), 1000, H200, options)
    assert cached_plan(chain(8), 1000, H200, options) == first
    assert planned == [1000] and len(files(tmp_path)) == 1
    assert first == plan(chain(8), 1000, H200, options)


def test_the_second_time_comes_from_the_process(tmp_path, planned):
    options = Options(cache=False)
    first = cached_plan(chain(8), 1000, H200, options)
    assert chooser.choose(question(chain(8), 1000, H200, options), options) is first and planned == [1000]


def test_one_plan_serves_a_bucket_of_rows(tmp_path, planned):
    options = Options(cache_dir=tmp_path)
    for rows in (1025, 2000, 2048, 2049):
        cached_plan(chain(2), rows, H200, options)
    assert planned == [1025, 2049]


@given(st.integers(1, 10**9))
def test_buckets_hold_their_rows(rows):
    assert rows <= bucket(rows) < 2 * max(rows, 64)
    assert bucket(bucket(rows)) == bucket(rows)


def test_unknown_rows_have_a_bucket_of_their_own():
    assert bucket(0) == bucket(-1) == 0


def test_the_key_sees_everything_that_matters(monkeypatch):
    base = (chain(2), 1000, H200, Options(), False)

    def named(program=base[0], rows=base[1], device=base[2], options=base[3], measured=base[4]):
        return key(program, rows, device, options, measured)

    keys = {
        named(),
        named(program=chain(3)),
        named(program=chain(2, dtype="f16")),
        named(rows=100_000),
        named(device=devices.get("h100")),
        named(device=H200.with_sms(131)),
        named(device=replace(H200, launch_s=3e-6)),
        named(options=Options(strategy="vertical")),
        named(options=Options(queue_depth=4)),
        named(measured=True),
    }
    monkeypatch.setattr(chooser, "versions", lambda: {"torch": "another"})
    keys.add(named())
    assert len(keys) == 11
    assert named() == named()


def test_options_that_do_not_matter_share_a_plan(tmp_path):
    one, two = Options(), Options(cache_dir=tmp_path, fallback=False)
    assert key(chain(2), 10, H200, one, False) == key(chain(2), 10, H200, two, False)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"region": 1}', "\x00\x01", "null"])
def test_a_corrupted_entry_is_logged_and_rewritten(tmp_path, planned, caplog, content):
    options = Options(cache_dir=tmp_path)
    good = cached_plan(chain(2), 1000, H200, options)
    path = files(tmp_path)[0]
    path.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert cached_plan(chain(2), 1000, H200, options) == good
    assert "made anew" in caplog.text
    assert len(planned) == 2
    assert plan_from_json(sealed(json.loads(path.read_text()))) == good


def test_an_illegal_pipeline_in_a_file_is_not_believed(tmp_path, planned):
    options = Options(cache_dir=tmp_path)
    cached_plan(chain(2), 1000, H200, options)
    path = files(tmp_path)[0]
    data = sealed(json.loads(path.read_text()))
    data["candidates"][0]["pipeline"]["stages"][0]["ops"][1]["tiles"] = ["nobody"]
    path.write_text(json.dumps(seal(data)))
    cached_plan(chain(2), 1000, H200, options)
    assert len(planned) == 2


def test_another_legal_plan_in_the_file_is_not_believed(tmp_path, planned, caplog):
    """One changed digit, and the pipeline would compute something else."""
    options = Options(cache_dir=tmp_path)
    good = cached_plan(edge_block(), 1000, H200, options)
    path = files(tmp_path)[0]
    text = path.read_text()
    assert "1e-05" in text
    path.write_text(text.replace("1e-05", "2e-05"))
    with caplog.at_level(logging.WARNING):
        assert cached_plan(edge_block(), 1000, H200, options) == good
    assert "digest" in caplog.text and len(planned) == 2


def test_a_folder_that_cannot_be_made_is_announced_once(tmp_path, planned, caplog):
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    options = Options(cache_dir=blocker)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert cached_plan(chain(2), 1000, H200, options).chosen is not None
    assert caplog.text.count("plans are not kept") == 1
    assert "TILESTREAM_CACHE_DIR" in caplog.text
    assert len(planned) == 3


def test_a_full_disk_leaves_no_file_behind(tmp_path, monkeypatch, caplog):
    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with caplog.at_level(logging.WARNING):
        cached_plan(chain(2), 1000, H200, Options(cache_dir=tmp_path))
    assert "No space left" in caplog.text
    assert files(tmp_path) == []


def test_cache_off_touches_no_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("TILESTREAM_CACHE_DIR", str(tmp_path))
    cached_plan(chain(2), 1000, H200, Options(cache=False))
    assert list(tmp_path.iterdir()) == []


def test_measured_plans_are_kept_apart_and_kept_whole(tmp_path):
    options = Options(cache_dir=tmp_path)
    clock = Clock(vertical=10.0 / 3)
    predicted = cached_plan(edge_block(), 4096, H200, options)
    measured = cached_plan(edge_block(), 4096, H200, options, clock)
    count = len(clock.asked)
    again = cached_plan(edge_block(), 4096, H200, options, clock)
    assert again == measured and len(clock.asked) == count > 0
    assert predicted.chosen.measured_us is None and measured.chosen.measured_us is not None


def test_a_plan_that_did_not_wait_for_a_kernel_serves_its_process_alone(tmp_path, planned):
    options = Options(cache_dir=tmp_path)

    def missing(why):
        return lambda candidates: [why if c == candidates[0] else 10.0 for c in candidates]

    late, wrong = missing(NotTimedNow("no kernel", "wait")), missing(PlanError("wrong", "report it"))
    hurried = cached_plan(chain(8), 4096, H200, options, late)
    assert any(c.late for c in hurried.candidates) and files(tmp_path) == []
    waited = cached_plan(chain(8), 4096, H200, options, wrong)
    assert not any(c.late for c in waited.candidates) and len(files(tmp_path)) == 1
    assert cached_plan(chain(8), 4096, H200, options, late) == waited and planned == [4096, 4096]


def test_several_writers_never_leave_half_a_file(tmp_path):
    cache = PlanCache(tmp_path)
    made = plan(chain(8), 1000, H200, Options())
    seen: list[bool] = []

    def write():
        for _ in range(20):
            cache.store("same", made)
            seen.append(cache.load("same") == made)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 80 and all(seen)
    assert [p.name for p in files(tmp_path)] == ["same.json"]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write to read-only folders")
def test_a_read_only_folder_is_no_error(tmp_path, caplog):
    tmp_path.chmod(0o500)
    with caplog.at_level(logging.WARNING):
        cached_plan(chain(2), 1000, H200, Options(cache_dir=tmp_path))
    assert "plans are not kept" in caplog.text


def test_plans_round_trip_with_their_reasons():
    for program in (chain(8), chain(2, 1024)):
        made = plan(program, 1000, H200, Options())
        assert plan_from_json(json.loads(json.dumps(plan_to_json(made)))) == made
