"""Attention of few queries: its kernel on the host, a fiber a lane, and compiled; where it stands in a graph."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from attention_cases import BF16, F16, case, judged
from eager_regions import trace
from host_runs import gxx, is_caught
from shared_keys import attended, operands
from torch import fx

from tilestream.cuda import beside, driver
from tilestream.cuda import few_queries as launched
from tilestream.cuda.compile import compile_text
from tilestream.cuda.host.build import HostRun
from tilestream.cuda.host.lanes import on_lanes
from tilestream.graph.rewrites.shared_keys import is_attention, share_keys
from tilestream.graph.rewrites.table import rewrite
from tilestream.kernels.operators.few_queries import NAME, kernel
from tilestream.options import Options
from tilestream.plan.candidates import FALLBACK, Candidate
from tilestream.run import few_queries
from tilestream.run.attention import attention_trial, replace_attention
from tilestream.run.target import resolve

CASES = {
    "two of 32": case(3, 2, 32, 37),
    "four of 64, f16, a mask": case(2, 4, 64, 170, F16, "one"),
    "eight of 128, a mask each": case(2, 8, 128, 9, BF16, "each"),
}


def attention_on_host(q, k, v, mask, scale: float, options: HostRun | None = None, resident: int = 2) -> torch.Tensor:
    return on_lanes(partial(launched.call, q, k, v, mask, scale, resident), options=options)[0]


@gxx
@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    q, k, v, mask = CASES[name]
    for resident in (1, 2) if q.shape[2] < 5 else (1,):
        got = attention_on_host(q, k, v, mask, q.shape[-1] ** -0.5, resident=resident)
        assert judged(got, q, k, v, mask), resident


@gxx
def test_a_head_of_which_all_is_masked_is_zero() -> None:
    q, k, v, _ = CASES["two of 32"]
    mask = torch.full((3, 1, 1, 37), float("-inf"), dtype=BF16)
    mask[2] = 0
    got = attention_on_host(q, k, v, mask, 1.0)
    assert not got[:2].any() and got[2].all()


@gxx
def test_lanes_do_not_race() -> None:
    q, k, v, mask = CASES["two of 32"]
    assert judged(attention_on_host(q, k, v, mask, 32**-0.5, HostRun(sanitize=True)), q, k, v, mask)


MUTANTS = {
    "warps are put together too early": ("  lanes::all_together();\n", "", True),
    "a position behind the last": (
        "const bool there = s < p.positions;",
        "const bool there = s <= p.positions;",
        False,
    ),
    "old values keep their weight": ("values[k] * before", "values[k]", False),
    "groups of a warp are left out": ("far = GROUP; far < LANES", "far = LANES; far < LANES", False),
}


@gxx
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.every(2)
def test_mutants_are_caught(name: str) -> None:
    case = CASES["two of 32"]
    assert is_caught(
        lambda options: judged(attention_on_host(*case, 32**-0.5, options), *case), "few_queries.cuh", *MUTANTS[name]
    )


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("queries", "features", "resident"), [(1, 64, 2), (2, 128, 1), (4, 64, 2), (4, 256, 2), (8, 256, 1)]
)
@pytest.mark.every(2)
def test_compiles_without_spills(queries: int, features: int, resident: int) -> None:
    lanes = kernel(queries, features, resident)
    made = compile_text(lanes.text, NAME, lanes.shared_bytes)
    assert made.spills == 0 and made.stack == 0
    assert made.registers * 32 * lanes.warps * resident <= 65536


def test_heads_that_share_an_sm_have_fewer_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[str, tuple[int, int], int, bytes]] = []

    def function(cubin: str, *_: object) -> SimpleNamespace:
        def prepare(grid: tuple[int, int], threads: int, stream: int, raw: bytes, *_: bool) -> Callable[[], None]:
            return lambda: launches.append((cubin, grid, threads, raw))

        return SimpleNamespace(prepare=prepare, blocks_per_sm=lambda _: 1)

    monkeypatch.setattr(beside, "compiled", lambda source: SimpleNamespace(cubin=source.text))
    monkeypatch.setattr(driver, "ensure_context", lambda _: None)
    monkeypatch.setattr(driver, "Function", function)
    beside.loaded.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    for heads, resident, threads in ((8, 1, 256), (256, 2, 128)):
        q, k, v, mask = case(heads, 2, 32, 40, BF16, "one")
        assert launched.attention(q, k, v, mask, 0.5).shape == q.shape
        text, grid, count, raw = launches[-1]
        assert f"#define RESIDENT {resident}\n" in text and (grid, count) == ((heads, 1), threads)
        strides, rows = struct.unpack_from("<4q", raw, 40), struct.unpack_from("<4if", raw, 72)
        assert strides == (128, 2560, 2560, 0) and rows == (64, 64, 64, 40, 0.5)


def test_it_stands_where_queries_share_keys() -> None:
    rows = [(1, 32), (1, 1, 1, 32), (2, 1, 1, 32)]
    for features, taken, shape in ((16, 0, rows[0]), *((32, 1, shape) for shape in rows)):  # no kernel has lanes for 16
        q, k, v = (t.bfloat16() for t in operands())
        inputs = [t.repeat(1, 1, 1, features // 16) for t in (q, k, v)] + [torch.randn(shape).bfloat16()]
        graph = trace(attended, inputs)
        (want,) = graph(*inputs)
        options, target = Options(attention=True, target="reference"), resolve(Options(target="reference"), inputs)
        assert target is not None and rewrite(graph, share_keys) == 1
        assert replace_attention(graph, few_queries.STREAMED, options.with_(attention=False), target) == 0
        assert replace_attention(graph, few_queries.STREAMED, options, target) == taken
        torch.testing.assert_close(graph(*inputs)[0], want)


def test_both_ways_are_called_on_values_like_the_operands() -> None:
    for shape in ((1, 32), (2, 1, 1, 32)):
        inputs = [t.bfloat16().repeat(1, 1, 1, 2) for t in operands()] + [torch.randn(shape).bfloat16()]
        graph = trace(attended, inputs)
        assert rewrite(graph, share_keys) == 1
        (node,) = [n for n in graph.graph.nodes if is_attention(n)]
        trial = attention_trial(node, few_queries.STREAMED.ours)
        values = trial.make()
        assert trial.plain is not None and [v.shape for v in values] == [n.meta["val"].shape for n in values_of(node)]
        (right,) = trial.plain(*[v.double() for v in values])
        for candidate in (Candidate("ours", None, None, operator="ours"), Candidate(FALLBACK, None, None)):
            (made,) = trial.call(candidate, values)()
            torch.testing.assert_close(made.double(), right, atol=0.05, rtol=0.05)


def values_of(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if n.meta["val"].is_floating_point()]
