"""Kernels are compiled side by side, with no more register splits than it takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import other_headers
import pytest
from compiled import compile_source
from programs import chain

from tilestream import cuda
from tilestream.cuda import building, cache, compile, workers
from tilestream.cuda.building import Building
from tilestream.cuda.compile import KernelReport
from tilestream.cuda.workers import NOW, Task, Workers
from tilestream.errors import CompileError
from tilestream.kernels.parts.headers import headers
from tilestream.kernels.parts.source import KernelSource
from tilestream.kernels.stream.emit import emit

WAIT_S = 240.0  # for threads that a busy machine may start late
SOURCE = replace(emit(chain(1, 16)), register_splits=((208, 88), (224, 56), (232, 40), (240, 24)))


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch):
    cache.forget()
    monkeypatch.setenv("TILESTREAM_CACHE", "0")
    yield
    cache.forget()


def report(spills: int = 0, registers: int = 0) -> KernelReport:
    return KernelReport("kernel", b"", registers, spills, 0, 0, 0.0, "")


def compiler(monkeypatch: pytest.MonkeyPatch, *spills: int | CompileError) -> list[int]:
    """NVRTC that spills so much at each split in turn; the consumer registers it is asked for."""
    asked: list[int] = []
    splits = [consumer for consumer, _ in SOURCE.register_splits]

    def compile_text(text: str, name: str, shared_bytes: int, defines: dict[str, int]) -> KernelReport:
        registers = defines["CONSUMER_REGISTERS"]
        asked.append(registers)
        found = spills[splits.index(registers)]
        if isinstance(found, CompileError):
            raise found
        return report(found, registers)

    monkeypatch.setattr(compile, "compile_text", compile_text)
    return asked


SERIAL = CompileError("would run slowly", "choose another strategy")


@pytest.mark.parametrize(
    ("spills", "taken", "most"),
    [
        ((0, 0, 0, 0), 208, 1),
        ((28, 256, 528, 1456), 208, 2),
        ((28, 28, 0, 0), 208, 2),
        ((60, 8, 0, 0), 232, 3),
        ((60, 30, 20, 10), 240, 4),
        ((60, SERIAL, 0, 0), 208, 2),
        ((716, 0, 0, 0), 208, 1),
        ((60, 40, 0, 0), 224, 2),
    ],
)
@pytest.mark.parametrize("ahead", [False, True])
def test_the_split_that_spills_least(monkeypatch: pytest.MonkeyPatch, spills, taken: int, most: int, ahead: bool):
    """One after another, and in the background, where one more may be begun for nothing once the first spills."""
    asked = compiler(monkeypatch, *spills)
    if not ahead:
        assert compile_source(SOURCE).registers == taken
        assert len(asked) == most
    else:
        assert Building(SOURCE, lambda report: report).made.result(WAIT_S).registers == taken
        assert len(asked) <= (most if most == 1 else most + 1)


def test_a_kernel_that_cannot_be_compiled_is_an_error(monkeypatch: pytest.MonkeyPatch):
    compiler(monkeypatch, SERIAL, 0, 0, 0)
    with pytest.raises(CompileError, match="would run slowly"):
        compile_source(SOURCE)
    with pytest.raises(CompileError, match="would run slowly"):
        Building(SOURCE, lambda report: report).made.result(WAIT_S)


def test_what_is_wanted_most_is_compiled_first() -> None:
    """One thread, which is busy when the others are asked for."""
    alone, busy, done = Workers(1), threading.Event(), []
    alone.submit(Task(lambda: busy.wait(WAIT_S) and None), 0)
    tasks = {name: Task(partial(done.append, name)) for name in ("last", "second", "first", "hurried")}
    for name, rank in (("last", 2), ("second", 1), ("first", 0), ("hurried", 3)):
        alone.submit(tasks[name], rank)
    alone.submit(tasks["hurried"], NOW)  # it runs once for all that
    busy.set()
    everything = threading.Event()
    alone.submit(Task(everything.set), 9)
    assert everything.wait(WAIT_S) and done == ["hurried", "first", "second", "last"]
    alone.end()


def test_half_of_many_cores_are_kept_for_what_is_wanted_first() -> None:
    many, go, begun, done = Workers(12), threading.Event(), threading.Semaphore(0), threading.Semaphore(0)

    def busy() -> None:
        begun.release()
        go.wait(WAIT_S)
        done.release()

    def how_many_begin(wanted: int) -> bool:
        return all(begun.acquire(timeout=WAIT_S) for _ in range(wanted)) and not begun.acquire(timeout=0.05)

    for _ in range(9):
        many.submit(Task(busy), 1)
    assert how_many_begin(6)
    for _ in range(4):
        many.submit(Task(busy), 0)
    assert how_many_begin(4)
    go.set()
    assert all(done.acquire(timeout=WAIT_S) for _ in range(13))
    many.end()


def test_nothing_begins_that_nobody_waits_for_while_they_rest() -> None:
    alone, done, wanted, everything = Workers(1), [], threading.Event(), threading.Event()
    with alone.resting():
        alone.submit(Task(lambda: (done.append("ahead"), everything.set())[0]), 0)
        alone.submit(Task(lambda: (done.append("wanted"), wanted.set())[0]), NOW)
        assert wanted.wait(WAIT_S) and not everything.wait(0.05)
    assert everything.wait(WAIT_S) and done == ["wanted", "ahead"]
    alone.end()


def test_a_process_that_ends_drops_what_has_not_begun() -> None:
    alone, begun, go, done = Workers(1), threading.Event(), threading.Event(), []
    alone.submit(Task(lambda: (begun.set(), go.wait(WAIT_S), done.append("begun"))[0]), 0)
    assert begun.wait(WAIT_S)
    alone.submit(Task(lambda: done.append("not begun")), 0)
    threading.Timer(0.05, go.set).start()
    alone.end()
    assert done == ["begun"]


def counted(monkeypatch: pytest.MonkeyPatch, make: Callable[[], None]) -> list[KernelSource]:
    calls: list[KernelSource] = []

    def compile_split(source: KernelSource, index: int) -> KernelReport:
        calls.append(source)
        make()
        return report()

    monkeypatch.setattr(building, "compile_split", compile_split)
    return calls


def test_kernels_are_compiled_side_by_side_and_once(monkeypatch: pytest.MonkeyPatch):
    """Each waits until the other has begun."""
    monkeypatch.setattr(workers, "_all", [Workers(2)])
    both = threading.Barrier(2, timeout=WAIT_S)
    calls = counted(monkeypatch, lambda: both.wait() and None)
    pipelines = [chain(1, 16), chain(2, 16)]
    cuda.start([*pipelines, pipelines[0]])
    for pipeline in pipelines:
        assert cuda.first_ready([[pipeline]], WAIT_S) == 0
        assert cuda.compile_only(pipeline) == [report()]
    assert len(calls) == 2


def test_who_does_not_want_to_wait_finds_the_kernel_later(monkeypatch: pytest.MonkeyPatch):
    go = threading.Event()
    calls = counted(monkeypatch, lambda: go.wait(WAIT_S) and None)
    start = time.monotonic()
    assert cuda.first_ready([[chain(1, 16)]], 0.05) is None and time.monotonic() - start < WAIT_S / 2
    go.set()
    assert cuda.first_ready([[chain(1, 16)]]) == 0 and len(calls) == 1


def test_a_failure_is_told_to_who_asks_and_tried_again(monkeypatch: pytest.MonkeyPatch):
    faults = [CompileError("no NVRTC", "install it")]

    def make() -> None:
        if faults:
            raise faults.pop()

    calls = counted(monkeypatch, make)
    cuda.start([chain(1, 16)])
    assert cuda.first_ready([[chain(1, 16)]]) == 0
    with pytest.raises(CompileError, match="no NVRTC"):
        cuda.compile_only(chain(1, 16))
    assert cuda.compile_only(chain(1, 16)) == [report()] and len(calls) == 2


def test_what_cannot_be_emitted_does_not_keep_others_from_starting(monkeypatch: pytest.MonkeyPatch):
    calls = counted(monkeypatch, lambda: None)
    too_wide = chain(2, 1024)
    cuda.start([too_wide, chain(1, 16)])
    assert cuda.first_ready([[chain(1, 16)]]) == 0 and len(calls) == 1
    assert cuda.first_ready([[too_wide]]) == 0
    with pytest.raises(Exception, match="1024"):
        cuda.compile_only(too_wide)


def test_the_first_of_several_that_is_compiled(monkeypatch: pytest.MonkeyPatch):
    """A group is ready with its last kernel, whichever group was named first."""
    go = threading.Event()
    slow = emit(chain(3, 16)).text

    def compile_split(source: KernelSource, index: int) -> KernelReport:
        assert source.text != slow or go.wait(WAIT_S)
        return report()

    monkeypatch.setattr(building, "compile_split", compile_split)
    monkeypatch.setattr(workers, "_all", [Workers(2)])
    groups = [[chain(1, 16), chain(3, 16)], [chain(2, 16)]]
    assert cuda.first_ready(groups, WAIT_S) == 1
    assert cuda.first_ready(groups[:1], 0.0) is None
    go.set()
    assert cuda.first_ready(groups[:1], WAIT_S) == 0


def test_kernels_behind_one_that_is_there_are_not_looked_at(monkeypatch: pytest.MonkeyPatch):
    """All that is left is asked for again at each of some forty plans."""
    counted(monkeypatch, lambda: None)
    cuda.compile_only(chain(1, 16))
    looked: list[object] = []
    look = cuda._waiting
    monkeypatch.setattr(cuda, "_waiting", lambda group, rank: (looked.append(group), look(group, rank))[1])
    assert cuda.first_ready([[chain(1, 16)], [chain(2, 16)]], WAIT_S) == 0
    assert looked == [[chain(1, 16)]]


@pytest.mark.nvrtc
def test_headers_that_a_test_changes_are_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches that stall, and lanes that all arrive, are tested with headers of tests' own."""
    monkeypatch.setattr(compile, "included", compile.included)
    other_headers.compile_with(headers() | {"ptx.cuh": "#error of a test"})
    with pytest.raises(CompileError, match="of a test"):
        compile_source(SOURCE)
