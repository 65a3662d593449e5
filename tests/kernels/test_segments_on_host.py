"""The kernels of sorted sums, compiled by g++ and run with threads: nodes of no edge and of many, rows in any order."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from segments_on_host import launcher
from torch import Tensor

from tilestream.cuda import segments
from tilestream.cuda.host.build import Mutation
from tilestream.graph.rewrites import operators

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Results begin as NaN: memory that was freed just before holds what another test has summed rightly."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    return launcher(tmp_path_factory.mktemp("segments"))


def order_of(index: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """As ``sorted_keys.segments`` has them."""
    to = torch.where(index < 0, index + nodes, index)
    order, starts, busy = operators.segments(index, nodes)
    counts = torch.bincount(to, minlength=nodes).tolist()
    many = [(node, min(8, -(-edges // 1024))) for node, edges in enumerate(counts) if edges > operators.LONG]
    items = [word for node, pieces in many for k in range(pieces) for word in (node, k << 16 | pieces)]
    busy[: 1 + len(items)] = torch.tensor([len(items) // 2, *items])
    return order, starts, busy


def exact(base: Tensor | None, rows: Tensor, order: Tensor, index: Tensor, nodes: int) -> Tensor:
    to = torch.where(index < 0, index + nodes, index).sort(stable=True).values.long()
    start = torch.zeros(nodes, rows.shape[1], dtype=torch.float64) if base is None else base.double()
    return start.index_add(0, to, rows[order].double())


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / (wanted.norm() + 1e-30))


SUMS = [(900, 70, 128, 700), (300, 40, 72, 65), (2600, 4, 40, 2500), (0, 5, 8, 0), (400, 999, 40, 90)]
"""Edges, nodes, features, edges of node 0: a CTA sums 700, several CTAs 2,500; 16 lanes, 9 lanes, 5 lanes, and one."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("edges", "nodes", "features", "busy"), SUMS)
def test_sums(
    edges: int,
    nodes: int,
    features: int,
    busy: int,
    dtype: torch.dtype,
    on_host: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(segments, "_launch", on_host)
    monkeypatch.setattr(segments, "CTAS", 2)  # several nodes a group, where most have no edge
    torch.manual_seed(edges)
    index = torch.randint(1, nodes - 1, (edges,))  # nothing for the last one
    index[torch.randperm(edges)[:busy]] = 0
    order, starts, busy_nodes = order_of(index.int() - nodes if features == 72 else index, nodes)
    matrix = torch.randn(3 * edges + 1, features).to(dtype)
    base = torch.randn(nodes, features).to(dtype)
    for added, rows in ((None, order), (base, 3 * order + 1), (base, order // 2)):  # rows as often as the order says
        got = segments.sums(added, matrix, rows, starts, busy_nodes)
        wanted = exact(added, matrix, rows, index, nodes)
        assert error(got, wanted) < 2 * torch.finfo(dtype).eps
        assert torch.equal(got, segments.sums(added, matrix, rows, starts, busy_nodes))
    if edges == 0:
        assert torch.equal(got, base)


MUTANTS = {
    "rows of another node": ("const int from = starts[k], to", "const int from = starts[k] + 1, to"),
    "half of a busy node": ("p.starts[node + 1], groups);", "p.starts[node + 1], 2 * groups);"),
    "a part of the threads of a busy node": ("group < left - half", "group < left - half - 1"),
    "the place instead of the row": ("(u32)p.order[at + k * step]", "(u32)(at + k * step)"),
}


@pytest.mark.parametrize("what", MUTANTS)
def test_mutants_show(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = MUTANTS[what]
    monkeypatch.setattr(segments, "_launch", launcher(tmp_path, Mutation("segments.cuh", old, new)))
    torch.manual_seed(0)
    nodes, index = 70, torch.randint(70, (1900,))
    index[:1200] = 3
    order, *starts = order_of(index - 70, nodes)
    matrix, base = torch.randn(1900, 128).bfloat16(), torch.randn(nodes, 128).bfloat16()
    found = error(segments.sums(base, matrix, order, *starts), exact(base, matrix, order, index, nodes))
    assert not found <= 0.02  # NaN where something was never written


def test_rows_that_begin_within_a_lane(on_host: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_launch", on_host)
    index = torch.randint(10, (50,))
    order, *starts = order_of(index, 10)
    rows = torch.randn(50 * 8 + 1).bfloat16()[1:].view(50, 8)
    assert rows.data_ptr() % 16
    assert error(segments.sums(None, rows, order, *starts), exact(None, rows, order, index, 10)) < 0.01
