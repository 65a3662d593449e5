"""Python's collector while a graph is compiled: young objects alone, and as it was behind it."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from modules import linear

from tilestream.run import inductor
from tilestream.run.backend import tilestream
from tilestream.run.collector import NEVER, young_only


@pytest.fixture(autouse=True)
def threshold():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield (700, 10, 10)
    gc.set_threshold(*before)


def test_old_objects_are_left_alone_and_young_ones_collected(threshold: tuple[int, int, int]):
    with young_only():
        assert gc.get_threshold() == (*threshold[:2], NEVER)
        with young_only():
            pass
        assert gc.get_threshold()[2] == NEVER  # the outer one still runs
    assert gc.get_threshold() == threshold


def test_it_is_as_it_was_behind_an_exception(threshold: tuple[int, int, int]):
    with pytest.raises(RuntimeError), young_only():
        raise RuntimeError
    assert gc.get_threshold() == threshold


def test_compilations_of_two_threads_end_in_any_order(threshold: tuple[int, int, int]):
    begun, end = threading.Event(), threading.Event()

    def other():
        with young_only():
            begun.set()
            end.wait(10)

    thread = threading.Thread(target=other)
    with young_only():
        thread.start()
        begun.wait(10)
    assert gc.get_threshold()[2] == NEVER
    end.set()
    thread.join()
    assert gc.get_threshold() == threshold


def test_a_compilation_and_its_backward_graph_use_it(monkeypatch: pytest.MonkeyPatch, threshold: tuple[int, int, int]):
    seen: list[int] = []
    own = inductor.compile_inner

    def compiled(*given: Any) -> Any:
        seen.append(gc.get_threshold()[2])
        return own(*given)

    monkeypatch.setattr(inductor, "compile_inner", compiled)
    module, x = torch.nn.Sequential(linear(9, 13), torch.nn.ReLU()).bfloat16(), torch.randn(37, 9).bfloat16()
    fast = torch.compile(module, backend=tilestream, options={"target": "reference"})
    fast(x).cumsum(0).sum().backward()
    assert seen and set(seen) == {NEVER} and gc.get_threshold() == threshold
