"""Triton's driver is made beside the compilation, once, and costs nobody a call."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import ModuleType

import pytest

from tilestream.run.triton_driver import begin_driver


class Drivers:
    """Triton's ``runtime.driver``: ``active`` is made when it is first asked for."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.asked, self.over = fails, [], threading.Event()

    @property
    def active(self) -> object:
        self.asked.append(threading.current_thread())
        self.over.set()
        if self.fails:
            raise RuntimeError("no C compiler")
        return object()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    begin_driver.cache_clear()
    yield
    begin_driver.cache_clear()


@pytest.mark.parametrize("fails", [False, True])
def test_a_thread_makes_it_once(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    drivers, runtime = Drivers(fails), ModuleType("triton.runtime")
    runtime.__dict__["driver"] = drivers
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.runtime", runtime)
    begin_driver()
    begin_driver()
    assert drivers.over.wait(60)
    (thread,) = drivers.asked
    assert thread is not threading.current_thread()
    thread.join(60)
    assert not raised


def test_where_there_is_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    before = threading.active_count()
    begin_driver()
    assert threading.active_count() == before
