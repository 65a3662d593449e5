"""Inductor's code of a region is generated before others are timed, and its kernels waited for when it is."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from eager_regions import trace
from torch import fx, nn
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import LambdaFuture

from tilestream.run import fallback, late_kernels
from tilestream.run.late_kernels import finished_together, waiting_later


@pytest.fixture(scope="module")
def given() -> tuple[fx.GraphModule, list[torch.Tensor], torch.Tensor]:
    """A graph with fake values, arguments, and what it makes of them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.LayerNorm(40))
    values = [torch.randn(70, 24), *(p.detach() for p in net.parameters())]

    def call(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, dict(zip(dict(net.named_parameters()), parameters, strict=True)), (x,))

    return trace(call, values), values, call(values[0], *values[1:])


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads in which code waited for its kernels."""
    threads: list[int] = []
    wait = AsyncCompile.wait

    def noted(self: AsyncCompile, scope: dict[str, Any]) -> None:
        threads.append(threading.get_ident())
        wait(self, scope)

    monkeypatch.setattr(AsyncCompile, "wait", noted)
    return threads


@config.patch(fx_graph_cache=False)
def test_kernels_are_waited_for_when_it_is_wanted(given, waited: list[int]) -> None:
    graph, values, exact = given
    begun = fallback.begin(graph)
    assert not waited
    call = begun()
    assert len(waited) == 1
    (got,) = call(values)
    torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5)
    fallback.rest(graph)
    assert len(waited) == 2, "what does not begin early waits at once"


@config.patch(fx_graph_cache=False)
def test_a_fault_is_left_to_who_compiles_it_again(given, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed as operators one by one, Inductor would lose regions that it wins."""
    graph, values, exact = given
    left = [RuntimeError("a process died")]
    wait = AsyncCompile.wait

    def failing(self: AsyncCompile, scope: dict[str, Any]) -> None:
        if left:
            raise left.pop()
        wait(self, scope)

    monkeypatch.setattr(AsyncCompile, "wait", failing)
    monkeypatch.setattr(fallback, "eager", lambda _: pytest.fail("it runs operator by operator"))
    (got,) = fallback.begin(graph)()(values)
    assert not left
    torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5)


@config.patch(fx_graph_cache=False)
def test_code_of_other_threads_waits_as_always(waited: list[int]) -> None:
    with waiting_later() as waits:
        other = threading.Thread(target=lambda: AsyncCompile().wait({}))
        other.start()
        other.join()
        assert len(waited) == 1 and not waits
        AsyncCompile().wait({})
    assert len(waited) == 1 and len(waits) == 1


@config.patch(compile_threads=2)
def test_kernels_are_finished_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first by itself, since what it imports must not be half there for another; one that cannot be is left to
    who says why."""
    monkeypatch.setattr(late_kernels, "THREADS", 3)
    monkeypatch.setattr(late_kernels.os, "cpu_count", lambda: 8)
    together, order, faults = threading.Barrier(3, timeout=60), [], [RuntimeError("no registers")]

    def made(name: str) -> LambdaFuture:
        def result() -> str:
            if name == "b" and faults:
                raise faults.pop()
            order.append(name)
            if name in "cde":
                together.wait()
            return name.upper()

        return LambdaFuture(result)

    scope: dict[str, Any] = {name: made(name) for name in "abcde"} | {"call": len}
    with finished_together():
        AsyncCompile().wait(scope)
    assert scope == {name: name.upper() for name in "abcde"} | {"call": len}
    assert order[0] == "a" and order[-1] == "b" and not faults


def test_threads_that_leave_in_any_order_leave_nothing_behind() -> None:
    """The first to come leaves first: what the other one put in its place must not stay for good."""
    inside, leave = threading.Event(), threading.Event()
    late: list[Any] = []

    def first() -> None:
        with waiting_later() as waits:
            late.append(waits)
            inside.set()
            assert leave.wait(60)

    one = threading.Thread(target=first)
    one.start()
    assert inside.wait(60)
    with waiting_later() as waits:
        leave.set()
        one.join()
        AsyncCompile().wait({})
        assert len(waits) == 1
    AsyncCompile().wait({})  # waits here, and now
    assert len(waits) == 1 and late == [[]]
