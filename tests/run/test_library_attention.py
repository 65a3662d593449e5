"""Which fused attention of PyTorch's runs: flash attention in the place of cuDNN's where it is faster."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from alternatives import UNKEPT, are_timed, replaced
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tilestream.devices import get
from tilestream.errors import PlanError
from tilestream.graph.rewrites.insert import call
from tilestream.options import Options
from tilestream.plan.candidates import FALLBACK, Candidate
from tilestream.run import library_attention, timing
from tilestream.run.attention import Alternative, kind_of
from tilestream.run.target import Target
from tilestream.run.timer import Timer, Trial

CUDNN = library_attention.CUDNN


def graph_of(
    batch: int = 2, features: int = 64, bias: bool = False, causal: bool = False, tokens: int = 128
) -> fx.GraphModule:
    """cuDNN's attention of three heads, on fake tensors of a GPU, and a view of its result."""
    graph = fx.Graph()
    with FakeTensorMode():
        operands = []
        for name in ("q", "k", "v"):
            node = graph.placeholder(name)
            node.meta["val"] = torch.empty(batch, tokens, 3, features, device="cuda", dtype=torch.bfloat16).transpose(
                1, 2
            )
            operands.append(node)
        mask = graph.placeholder("mask") if bias else None
        if mask is not None:
            mask.meta["val"] = torch.empty(batch, 3, tokens, tokens, device="cuda", dtype=torch.bfloat16)
        made = call(operands[0], library_attention.CUDNN, *operands, mask, False, 0.0, causal)
        result = call(made, operator.getitem, made, 0)
        turned = call(made, torch.ops.aten.transpose.int, result, 1, 2)
        graph.output((call(made, torch.ops.aten.view.default, turned, [batch * tokens, 3 * features]),))
    return fx.GraphModule({}, graph)


def streamed(
    monkeypatch: pytest.MonkeyPatch,
    graph: fx.GraphModule,
    measure: Any,
    options: Options = UNKEPT,
    by: Alternative = library_attention.FLASH_ATTENTION,
) -> list:
    """The attentions of a graph after the choice, which ``measure`` times."""
    replaced(monkeypatch, graph, by, measure, options)
    return [n.target for n in graph.graph.nodes if "attention" in str(n.target)]


@pytest.mark.parametrize(("flash", "cudnn", "wins"), [(5.0, 10.0, True), (10.0, 5.0, False)])
def test_the_faster_one_runs(flash: float, cudnn: float, wins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = library_attention.FLASH if wins else library_attention.CUDNN
    assert streamed(monkeypatch, graph_of(), lambda *_: [flash, cudnn]) == [taken]


@pytest.mark.parametrize("tokens", [49, 128])
@pytest.mark.parametrize("bias", [False, True])
def test_the_memory_efficient_one_takes_windows(bias: bool, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(features=32, bias=bias, tokens=tokens)
    by = library_attention.EFFICIENT_ATTENTION
    assert streamed(monkeypatch, graph, lambda *_: [5.0, 10.0], by=by) == [library_attention.EFFICIENT]
    padded = [n for n in graph.graph.nodes if n.target is torch.ops.aten.constant_pad_nd.default]
    assert len(padded) == (bias and tokens == 49)  # rows of 128 start where the kernel wants them
    (node,) = [n for n in graph.graph.nodes if n.target is library_attention.EFFICIENT]
    if bias:
        rows = node.args[3].meta["val"]
        assert rows.shape == (2, 3, tokens, tokens) and rows.stride(2) % library_attention.ALIGNED == 0


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (3, 5, 7), (1, 1, 5, 1), (5, 8), (2, 1, 1, 16)])
def test_what_is_added_keeps_its_values(shape: tuple[int, ...]) -> None:
    keys = max(shape[-1], 7)
    mask = torch.randn(shape)
    got = library_attention.added_to(mask, [2, 3, 5, keys], lambda op, *args: op(*args))
    assert torch.equal(got, mask.expand(2, 3, 5, keys))
    assert got.stride(3) == 1 and not any(n % library_attention.ALIGNED for n in got.stride()[:3])


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
def test_the_memory_efficient_one_is_right(bias: bool) -> None:
    (node,) = [n for n in graph_of(features=32, bias=bias, tokens=49).graph.nodes if n.target is CUDNN]
    assert are_timed(node, library_attention.EFFICIENT_ATTENTION)


def test_what_flash_attention_does_not_do_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> list[float]:
        raise AssertionError

    for graph in (graph_of(bias=True), graph_of(features=512), graph_of(batch=512)):
        assert streamed(monkeypatch, graph, never) == [library_attention.CUDNN]
    assert streamed(monkeypatch, graph_of(), never, Options(attention=False)) == [library_attention.CUDNN]


def test_a_mistake_costs_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object) -> list[float]:
        raise PlanError("it is wrong", "use cuDNN's")

    assert streamed(monkeypatch, graph_of(), wrong) == [library_attention.CUDNN]
    with pytest.raises(PlanError):
        streamed(monkeypatch, graph_of(), wrong, Options(cache=False, fallback=False))


def test_times_are_taken_once(cache_dir: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process, and by the next one from the disk."""
    asked: list[int] = []

    def measure(*_: object) -> list[float]:
        asked.append(1)
        return [5.0, 10.0]

    for _ in range(2):
        assert streamed(monkeypatch, graph_of(), measure, Options()) == [library_attention.FLASH]
    assert asked == [1]


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_both_compute_the_same(causal: bool) -> None:
    (node,) = [n for n in graph_of(causal=causal).graph.nodes if n.target is library_attention.CUDNN]
    assert kind_of(node).causal == causal and are_timed(node, library_attention.FLASH_ATTENTION)


def test_attention_is_held_to_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    class Arm:
        def __init__(self, run: Any) -> None:
            self.outputs: list[Tensor] = run()
            self._run = run

        def replay(self) -> None:
            for out, right in zip(self.outputs, self._run(), strict=True):
                out.copy_(right)

    exact = torch.randn(4, 8, dtype=torch.float64)
    off = [0.0]
    monkeypatch.setattr(timing, "capture", Arm)
    monkeypatch.setattr(timing, "to_choose", lambda arms: [[1.0], [2.0]][: len(arms)])
    trial = Trial(
        "attention", lambda: [exact.bfloat16()], lambda *_: lambda: [exact.bfloat16() + off[0]], lambda x: [x]
    )
    here = Target("reference", torch.device("cpu"), get("h200"))
    candidates = Candidate("one", None, None, operator="one"), Candidate(FALLBACK, None, None)
    assert Timer(trial, here)(candidates) == [1.0, 2.0]
    off[0] = 1.0
    wrong, _ = Timer(trial, here)(candidates)
    assert isinstance(wrong, PlanError) and "wrong result" in str(wrong)
