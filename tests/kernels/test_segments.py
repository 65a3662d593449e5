"""Kernels of ragged pipelines, compiled by g++ and run a thread a lane, beside float64: any width, dtype and graph."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from ragged_programs import Case, Graph, aggregators, attention, dot_products, error, gather_sum, uniform, weighted

from tilestream.cuda.host.build import HostRun, run_on_host
from tilestream.ir.dtypes import TORCH_DTYPES

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def check(case: Case, graph: Graph, dtype: str, busy: bool = True, options: HostRun | None = None) -> None:
    given = case.given(graph)
    pipeline = case.pipeline(busy)
    if not busy:
        given.pop("starts.busy")
    got = run_on_host(pipeline, given, options)
    for name, wanted in case.wanted(graph, given).items():
        exact = 4 * torch.finfo(TORCH_DTYPES[dtype]).eps
        assert error(got[name], wanted) < max(exact, 2e-6), name


PROGRAMS: dict[str, tuple[Callable[[], Case], str]] = {
    "sum, 64 bf16": (lambda: gather_sum(64, "bf16"), "bf16"),
    "sum, 1 f32": (lambda: gather_sum(1, "f32"), "f32"),
    "sum, 33 bf16": (lambda: gather_sum(33, "bf16"), "bf16"),
    "sum, 300 f16": (lambda: gather_sum(300, "f16", base=False), "f16"),
    "max, 20 f32": (lambda: gather_sum(20, "f32", "max"), "f32"),
    "min, 7 bf16": (lambda: gather_sum(7, "bf16", "min"), "bf16"),
    "four aggregators, 75 bf16": (lambda: aggregators(75, "bf16"), "bf16"),
    "four aggregators, 40 f32": (lambda: aggregators(40, "f32"), "f32"),
    "weights of edges, 24 bf16": (lambda: weighted(24, "bf16"), "bf16"),
    "weights of edges and heads, 3 x 17 f32": (lambda: weighted(17, "f32", 3), "f32"),
    "softmax, 4 x 64 bf16": (lambda: attention(4, 64, "bf16", fused=True), "bf16"),
    "softmax in three passes, 4 x 64 bf16": (lambda: attention(4, 64, "bf16", fused=False), "bf16"),
    "softmax with its weights, 16 x 6 f32": (lambda: attention(16, 6, "f32", fused=False, alpha=True), "f32"),
    "scores of products, 2 x 16 bf16": (lambda: dot_products(2, 16, "bf16"), "bf16"),
    "scores of products, 3 x 20 f32": (lambda: dot_products(3, 20, "f32"), "f32"),
    "scores of products, 1 x 300 f16": (lambda: dot_products(1, 300, "f16"), "f16"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    torch.manual_seed(len(name))
    make, dtype = PROGRAMS[name]
    check(make(), uniform(40, 400, busy=150), dtype)


@pytest.mark.parametrize("edges", [0, 5, 3000])
def test_graphs(edges: int) -> None:
    """No edges; hardly any; and a node whose edges several CTAs share."""
    torch.manual_seed(edges)
    graph = uniform(30, edges, busy=edges * 9 // 10)
    check(gather_sum(24, "bf16"), graph, "bf16")
    check(attention(2, 8, "f32", fused=True), graph, "f32")


def test_bounds_that_list_no_busy_nodes() -> None:
    torch.manual_seed(0)
    check(gather_sum(16, "f32"), uniform(20, 500, busy=300), "f32", busy=False)


def test_same_bits() -> None:
    torch.manual_seed(0)
    graph, case = uniform(30, 2500, busy=2300), weighted(24, "bf16")
    given = case.given(graph)
    first = run_on_host(case.pipeline(), given)["y"]
    again = Graph(graph.nodes, graph.index)  # lists its busy pieces in another order
    assert not torch.equal(again.busy, graph.busy)
    assert torch.equal(first, run_on_host(case.pipeline(), given | {"starts.busy": again.busy})["y"])
