"""Edges sorted by node on the GPU: against torch's stable sort, in CUDA graphs, on lists that change."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tilestream.cuda.sorted_keys import TILE
from tilestream.run.device_ops import segments

pytestmark = pytest.mark.gpu


def check(index: Tensor, nodes: int) -> None:
    order, starts, busy = segments(index, nodes)
    to = torch.where(index < 0, index + nodes, index)
    ordered, wanted = to.sort(stable=True)
    assert torch.equal(order.long(), wanted)
    some = (
        torch.randint(nodes + 1, (100_000,), device="cuda") if nodes > 10**7 else torch.arange(nodes + 1, device="cuda")
    )
    some = torch.cat([some, to, to + 1, torch.tensor([0, nodes], device="cuda")])
    assert torch.equal(starts[some].long(), torch.searchsorted(ordered, some))
    names, counts = ordered.unique_consecutive(return_counts=True)
    many = {int(n): int(c) for n, c in zip(names[counts > 64], counts[counts > 64], strict=True)}
    items = sorted(map(tuple, busy[1 : 1 + 2 * int(busy[0])].view(-1, 2).tolist()))
    pieces = {node: which & 0xFFFF for node, which in items}
    assert set(pieces) == set(many) and all(0 < n <= -(-many[node] // 256) for node, n in pieces.items())
    assert items == [(node, k << 16 | n) for node, n in sorted(pieces.items()) for k in range(n)]


SIZES = [1, 2, 31, TILE - 1, TILE, TILE + 1, 2 * TILE + 1, 100_003, 300_000, 1_000_000, 2_000_000]
NODES = [1, 2, 1000, 1024, 1025, 100_000, 2**17 + 1, 2**20, 2**20 + 1, 5_000_000]


@pytest.mark.parametrize("edges", SIZES)
def test_sizes(edges: int) -> None:
    torch.manual_seed(edges)
    for nodes in NODES:
        check(torch.randint(nodes, (edges,), device="cuda"), nodes)


@pytest.mark.parametrize("nodes", [2**24 + 1, 2**30 + 1, 2**31 - 1])
def test_many_nodes(nodes: int) -> None:
    for edges in (3000, 70_000):
        check(torch.randint(nodes, (edges,), device="cuda"), nodes)


def test_random_lists() -> None:
    """Uniform, of few nodes, of one, ascending, descending, and nearly so; int32 and int64, negative, with steps."""
    choose = random.Random(0)
    for seed in range(120):
        torch.manual_seed(seed)
        edges, nodes = int(2 ** choose.uniform(0, 19)), int(2 ** choose.uniform(0, 20))
        index = torch.randint(min(nodes, choose.choice([nodes, nodes, 3, 1])), (edges,), device="cuda")
        kind = choose.choice(["", "up", "down", "nearly"])
        if kind:
            index = index.sort(descending=kind == "down").values
        if kind == "nearly":
            index[-1] = 0
        if choose.random() < 0.3:
            index = index - nodes * torch.randint(2, (edges,), device="cuda")
        if choose.random() < 0.3:
            index = torch.stack([index, index], 1)[:, 1]
        check(index.int() if choose.random() < 0.5 else index, nodes)


@pytest.mark.parametrize(("edges", "nodes"), [(3000, 200), (500_000, 40_000)])
def test_lists_that_change_between_replays(edges: int, nodes: int) -> None:
    """Sorted ones among them: what the graph launches is decided on the GPU."""
    index = torch.randint(nodes, (edges,), device="cuda")
    graph = torch.cuda.CUDAGraph()
    segments(index, nodes)
    with torch.cuda.graph(graph):
        order, starts, _ = segments(index, nodes)
    for change in ("random", "sorted", "random", "equal", "backwards"):
        made = torch.randint(nodes, (edges,), device="cuda") if change != "equal" else torch.full_like(index, nodes - 1)
        index.copy_(made if change in ("random", "equal") else made.sort(descending=change == "backwards").values)
        graph.replay()
        ordered, wanted = index.sort(stable=True)
        assert torch.equal(order.long(), wanted), change
        assert torch.equal(starts.long(), torch.searchsorted(ordered, torch.arange(nodes + 1, device="cuda"))), change
    first = order.clone()
    graph.replay()
    assert torch.equal(order, first)
