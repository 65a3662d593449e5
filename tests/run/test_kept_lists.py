"""Sorted lists of edges that are kept from call to call: only where they are sure to be the same."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilestream.graph.rewrites import operators
from tilestream.options import Options
from tilestream.plan import messages
from tilestream.plan.analyse import analyse
from tilestream.run import device_ops, kept_lists
from tilestream.run.backend import tilestream

pytestmark = pytest.mark.usefixtures("without_inductor")

NODES = 40


class Network(nn.Module):
    """Messages along the edges ``index`` [2, edges], twice; ``prepare`` makes the list that is used of it."""

    def __init__(self, prepare: Callable[[Tensor], Tensor] = lambda index: index, held: Tensor | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.prepare = prepare
        self.register_buffer("held", held)
        self.bfloat16()

    def forward(self, v: Tensor, index: Tensor | None = None) -> Tensor:
        senders, receivers = self.prepare(self.held if index is None else index)
        for _ in range(2):
            v = torch.zeros_like(v).index_add(0, receivers, self.net(v[senders]))
        return v


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """Sums of few rows pay, too."""
    monkeypatch.setattr(messages, "atomics_us", lambda _: 1e9)


@pytest.fixture
def sorts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many edges each sort had."""
    made: list[int] = []
    plain = operators.segments

    def noted(index: Tensor, nodes: int, **how: Any) -> tuple[Tensor, ...]:
        made.append(len(index))
        return plain(index, nodes, **how)

    monkeypatch.setattr(operators, "segments", noted)
    return made


def edges(count: int = 300, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return torch.randint(NODES, (2, count))


def compiled(module: nn.Module, **options: Any) -> Any:
    return torch.compile(module, backend=tilestream, options={"target": "reference", "keep_lists": True, **options})


def check(module: nn.Module, fast: Any, *given: Tensor) -> None:
    v = torch.randn(NODES, 64).bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(fast(v, *given), module(v, *given), rtol=0.05, atol=0.05)


def test_the_same_list_is_sorted_no_more(sorts: list[int]) -> None:
    module, index = Network(), edges()
    fast = compiled(module)
    for calls, made in ((1, 1), (2, 2), (3, 2), (4, 2)):  # remembered, kept, taken, taken
        check(module, fast, index)
        assert len(sorts) == made, calls
    index[1, :50] = 3
    check(module, fast, index)
    assert len(sorts) == 3
    index.copy_(edges(seed=1))
    check(module, fast, index)
    check(module, fast, index.clone())
    assert len(sorts) == 5
    for _ in range(3):
        check(module, fast, index[:, :])
    assert len(sorts) == 6


class Sums(nn.Module):
    """Layers of GIN: whose rows are added is picked in the order of the sort. Then int32 tensors of an edge's size."""

    def __init__(self, gives_order: bool = False) -> None:
        super().__init__()
        self.nets, self.gives_order = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)]), gives_order
        self.bfloat16()

    def forward(self, v: Tensor, index: Tensor) -> Any:
        senders, receivers = index
        order, starts, busy = torch.ops.tilestream.segments(receivers, NODES) if self.gives_order else (None,) * 3
        for net in self.nets:
            rows = v[senders]
            if order is not None:
                v = net(v + torch.ops.tilestream.segment_reduce(None, rows, order, starts, busy))
            else:
                v = net(v + torch.zeros_like(v).index_add(0, receivers, rows))
        after = senders.int() + (v.sum() > 1e9).int()
        return (v, after * 3) if order is None else (v, after * 3, order)


def test_of_a_kept_list_nothing_is_launched(sorts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    module, index = Sums(), edges()
    exact = copy.deepcopy(module).float()
    fast, picked, clone, copies = compiled(module), list[int](), Tensor.clone, list[int]()
    plain = operators.sorted_index

    def noted(index: Tensor, *rest: Any) -> Tensor:
        picked.append(len(index))
        return plain(index, *rest)

    def copying(t: Tensor, **how: Any) -> Tensor:
        copies.extend([1] if type(t) is Tensor and t.dtype == torch.int32 else [])
        return clone(t, **how)

    monkeypatch.setattr(operators, "sorted_index", noted)

    def call() -> tuple[int, int, int]:
        before = len(sorts), len(picked), len(copies)
        v = torch.randn(NODES, 64).bfloat16()
        with torch.no_grad(), monkeypatch.context() as within:
            within.setattr(Tensor, "clone", copying)
            got = fast(v, index)
            wanted = exact(v.float(), index)
        assert (got[0].float() - wanted[0]).norm() < 0.02 * wanted[0].norm()
        assert torch.equal(got[1], wanted[1])
        return len(sorts) - before[0], len(picked) - before[1], len(copies) - before[2]

    assert [call() for _ in range(4)] == [(1, 1, 0), (1, 1, 0), (0, 0, 0), (0, 0, 0)]  # seen, kept, taken, taken
    index[0, :50] = 3  # senders alone: both lists lie in one tensor
    assert [call() for _ in range(3)] == [(1, 1, 0), (1, 1, 0), (0, 0, 0)]


def test_what_a_graph_gives_out_is_a_copy() -> None:
    module, index = Sums(gives_order=True), edges()
    fast, v = compiled(module), torch.randn(NODES, 64).bfloat16()
    for _ in range(4):
        with torch.no_grad():
            got, wanted = fast(v, index), module(v, index)
        assert torch.equal(got[2], wanted[2])
        got[2].zero_()


def test_by_default_every_call_sorts(sorts: list[int]) -> None:
    module, index = Network(), edges()
    fast = torch.compile(module, backend=tilestream, options={"target": "reference"})
    for _ in range(4):
        check(module, fast, index)
    assert len(sorts) == 4


def in_place(index: Tensor) -> Tensor:
    index.add_(1).remainder_(NODES)
    return index


@pytest.mark.parametrize(
    "prepare", [lambda index: index.flip(0) + 0, in_place], ids=["computed", "changed in the graph"]
)
def test_what_is_not_the_argument_is_sorted_in_every_call(prepare: Any, sorts: list[int]) -> None:
    module, index = Network(prepare), edges()
    fast, other = compiled(module), index.clone()
    for _ in range(4):
        v = torch.randn(NODES, 64).bfloat16()
        with torch.no_grad():
            torch.testing.assert_close(fast(v, index), module(v, other), rtol=0.05, atol=0.05)
        assert torch.equal(index, other)
    assert len(sorts) == 4


def test_in_inference_mode_nothing_is_sure(sorts: list[int]) -> None:
    module = Network()
    fast = compiled(module)
    with torch.inference_mode():
        index = edges()
        for seed in range(3):
            index.copy_(edges(seed=seed))
            v = torch.randn(NODES, 64).bfloat16()
            torch.testing.assert_close(fast(v, index), module(v, index), rtol=0.05, atol=0.05)
    assert len(sorts) == 3


def test_training_steps(sorts: list[int]) -> None:
    module, index = Network(), edges()
    fast = compiled(module)

    def gradients(function: Any) -> list[Tensor]:
        module.zero_grad()
        torch.manual_seed(1)
        function(torch.randn(NODES, 64).bfloat16().requires_grad_(), index).square().mean().backward()
        return [p.grad.clone() for p in module.parameters() if p.grad is not None]

    made = []
    for _ in range(4):
        for got, wanted in zip(gradients(fast), gradients(module), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0.1, atol=0.01)
        made.append(len(sorts))
    assert made[3] - made[2] < made[1] - made[0]
    index.copy_(edges(seed=5))
    for got, wanted in zip(gradients(fast), gradients(module), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0.1, atol=0.01)


def sorted_by(lists: kept_lists.KeptLists, index: Tensor, constant: bool = False) -> tuple[Tensor, ...]:
    source = kept_lists.Source(index._version, constant)
    return lists.of(index, NODES, source, lambda: device_ops._sorted(index, NODES))


def test_bounded_and_nothing_is_held_alive() -> None:
    lists, held = kept_lists.KeptLists(), [edges(seed=k)[0] for k in range(kept_lists.MOST + 3)]
    for index in held:
        for _ in range(3):
            got = sorted_by(lists, index)
            assert all(torch.equal(a, b) for a, b in zip(got, operators.segments(index, NODES), strict=True))
            got[0].zero_()  # compiled code writes where it has read
    assert len(lists) == kept_lists.MOST
    del index, held
    gc.collect()
    sorted_by(lists, edges()[0])
    assert len(lists) == 0


def test_seen_otherwise_it_is_another_list() -> None:
    lists, index = kept_lists.KeptLists(), edges(600)[0]
    views = [index, index[:300], index[1:], index[::2], index.flip(0)]
    for _ in range(3):
        for view in views:
            order, starts, _ = sorted_by(lists, view)
            assert torch.equal(order, operators.segments(view, NODES)[0]) and int(starts[-1]) == len(view)


def test_in_a_capture_only_constants_are_taken(monkeypatch: pytest.MonkeyPatch, sorts: list[int]) -> None:
    class OnGpu(Tensor):
        is_cuda = True  # pyright: ignore[reportAssignmentType]

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: torch.Stream("cpu"))
    monkeypatch.setattr(
        device_ops, "_sorted", lambda index, nodes, **_: operators.segments(index.as_subclass(Tensor), nodes)
    )
    lists, index = kept_lists.KeptLists(), edges()[0]
    sorted_by(lists, index, constant=True)
    assert len(sorts) == 1 and len(lists) == 1
    sorted_by(lists, index.as_subclass(OnGpu), constant=True)
    assert len(sorts) == 1
    for _ in range(3):
        sorted_by(lists, index.as_subclass(OnGpu))
    assert len(sorts) == 4


def test_buffers_that_are_constant_are_kept_at_once(sorts: list[int]) -> None:
    module = Network(held=edges())
    fast = compiled(module, keep_lists=False, constant_weights=True)
    for _ in range(3):
        check(module, fast)
    assert len(sorts) == 1
    module.held.copy_(edges(seed=3))
    check(module, fast)
    assert len(sorts) == 2


@pytest.mark.parametrize(
    ("prepare", "keep", "said"), [(None, True, True), (None, False, False), (in_place, True, False)]
)
def test_explain_says_which_lists_are_kept(prepare: Any, keep: bool, said: bool) -> None:
    module = Network(prepare or (lambda index: index)).eval()
    with torch.no_grad():
        made = analyse(module, [torch.zeros(NODES, 64).bfloat16(), edges()], Options(device="h200", keep_lists=keep))
    assert any("sorted lists that are kept" in hint for hint in made.hints) == said
