"""Sweeps: which points, on how many processes, in which order, and what joblib's other back ends get."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import joblib
import pytest

from tilestream.errors import DeviceError, OptionError, WorkerError
from tilestream.studies.kitsune.parallel import each
from tilestream.studies.kitsune.sweep import Point, points

MOST_S = 240.0


def _who(number: int) -> tuple[int, int]:
    return number, os.getpid()


def _met(number: int, folder: str) -> tuple[int, int]:
    """As ``_who``, but a process waits with its first task until another has one too, however long that takes to start:
    else the first may do all of them."""
    Path(folder, str(os.getpid())).touch()
    end = time.monotonic() + MOST_S
    while len(os.listdir(folder)) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    return number, os.getpid()


def _named(number: int, *_: str) -> str:
    return f"number {number}"


def _fails(number: int) -> int:
    if number == 1:
        raise OptionError("one is no number", "use two")
    return number


def _ends(number: int) -> int:
    os._exit(3)


def _blocked(number: int) -> set[int]:
    time.sleep(0.3)
    return {int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, ())}


def test_no_worker_sees_an_interrupt() -> None:
    """A terminal sends one to every process of the group; the parent alone decides what becomes of it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    found = list(each(_blocked, [(0,), (1,)], 2, lambda _: None, str, _named))
    assert found == [{*map(int, before), int(signal.SIGINT)}] * 2
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_what_a_task_raises_comes_through() -> None:
    with pytest.raises(OptionError, match="one is no number. Remedy: use two"):
        list(each(_fails, [(0,), (1,)], 2, lambda _: None, str, _named))


def test_a_process_that_ends_early_is_named() -> None:
    with pytest.raises(WorkerError, match="ended with code 3 before its task was done"):
        list(each(_ends, [(0,), (1,)], 2, lambda _: None, str, _named))


def test_two_local_workers_share_the_tasks(tmp_path: Path) -> None:
    said: list[str] = []
    found = list(
        each(
            _met,
            [(i, str(tmp_path)) for i in range(6)],
            2,
            said.append,
            lambda r: f"task {r[0]}",
            lambda i, _: _named(i),
        )
    )
    assert sorted(n for n, _ in found) == list(range(6))
    workers = {pid for _, pid in found}
    assert len(workers) == 2 and os.getpid() not in workers
    assert said[0] == "6 tasks on 2 processes" and said[1] == "started number 0"
    assert [line.split(":")[0] for line in said if " of " in line] == [f"{i} of 6" for i in range(1, 7)]
    assert {line for line in said if line.startswith("started")} == {f"started number {i}" for i in range(6)}


def test_another_back_end_of_joblib_takes_over() -> None:
    with joblib.parallel_config(backend="threading"):
        found = list(each(_who, [(i,) for i in range(3)], 2, lambda _: None, str, _named))
    assert {pid for _, pid in found} == {os.getpid()} and len(found) == 3


def test_one_job_stays_in_this_process() -> None:
    assert next(iter(each(_who, [(1,), (2,)], 1, lambda _: None, str, _named)))[1] == os.getpid()


@pytest.mark.smoke
def test_points_are_every_combination_in_order() -> None:
    made = points(["nerf", "dlrm"], ["a100", "h200+kitsune"], ["bulk"], ["inference"], {"rows": [1, 2]})
    assert len(made) == 8
    assert made[0] == Point("nerf", "inference", "a100", "bulk", (("rows", 1),))
    assert made[1].device == "h200+kitsune" and made[2].sizes == (("rows", 2),)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ((["nerf"], ["tpu"]), DeviceError, "tpu"),
        ((["nerf"], ["a100+warp*2"]), DeviceError, "warp"),
        ((["nerf"], ["a100"], ["magic"]), OptionError, "magic"),
        ((["nerf"], ["a100"], ["bulk"], ["sleep"]), OptionError, "sleep"),
        ((["nerf"], []), OptionError, "no device"),
        (([], ["a100"]), OptionError, "no model"),
    ],
)
def test_bad_sweeps_are_refused_before_anything_runs(arguments, error, said: str) -> None:
    with pytest.raises(error, match=said):
        points(*arguments)


def test_two_local_workers_of_dask(tmp_path) -> None:
    distributed = pytest.importorskip("distributed")
    folder = str(tmp_path)
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, local_directory=folder
        ) as c,
        distributed.Client(c),
        joblib.parallel_config(backend="dask"),
    ):
        found = list(each(_who, [(i,) for i in range(6)], -1, lambda _: None, str, _named))
    assert len(found) == 6 and len({pid for _, pid in found} - {os.getpid()}) == 2
