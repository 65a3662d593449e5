"""Models that take loops out of their lists of edges: one graph of known sizes, whose edges are sorted once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilestream.errors import InputError
from tilestream.graph.capture import capture
from tilestream.graph.rewrites import operators
from tilestream.graph.rewrites.masked_edges import keep_masked_edges
from tilestream.graph.rewrites.settings import Settings
from tilestream.options import Options
from tilestream.plan.analyse import analyse
from tilestream.plan.messages import sorted_sums
from tilestream.run.backend import tilestream

NODES = 40


@pytest.fixture(autouse=True)
def counted_by_the_gpu(fresh: None) -> Any:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


@pytest.fixture
def sorts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many edges each sort had."""
    made: list[int] = []
    plain = operators.segments

    def noted(index: Tensor, *rest: Any, **how: Any) -> tuple[Tensor, ...]:
        made.append(len(index))
        return plain(index, *rest, **how)

    monkeypatch.setattr(operators, "segments", noted)
    return made


def edges(count: int = 300, loops: int = 30, seed: int = 0) -> Tensor:
    """With loops, two of them at one node."""
    torch.manual_seed(seed)
    index = torch.randint(NODES, (2, count))
    index[1, :loops] = index[0, :loops]
    index[:, 1:2] = index[:, :1] if loops > 1 else index[:, 1:2]
    return index


def looped(index: Tensor, weights: Tensor | None = None, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """PyG's ``add_remaining_self_loops``, and its weights."""
    mask = index[0] != index[1]
    given = index.new_ones(index.shape[1]).to(dtype) if weights is None else weights
    loops = given.new_full((NODES,), 1.0)
    if weights is not None:
        loops[index[0][~mask]] = given[~mask]
    every = torch.arange(NODES).view(1, -1).repeat(2, 1)
    return torch.cat([index[:, mask], every], dim=1), torch.cat([given[mask], loops])


class Gcn(nn.Module):
    """``GCNConv`` in plain PyTorch, several layers; each normalises anew."""

    def __init__(self, layers: int = 2, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])

    def forward(self, x: Tensor, index: Tensor, weights: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            (senders, receivers), norm = looped(index, weights, x.dtype)
            degree = x.new_zeros(NODES).scatter_add(0, receivers, norm)
            scale = degree.pow(-0.5)
            scale = scale.masked_fill(scale == float("inf"), 0.0)
            norm = scale[senders] * norm * scale[receivers]
            rows = norm[:, None] * layer(x).index_select(0, senders)
            x = torch.relu(x.new_zeros(x.shape).scatter_add(0, receivers[:, None].expand_as(rows), rows))
        return x


class Attention(nn.Module):
    """A softmax over a node's edges, and a mean and a maximum beside it."""

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        (senders, receivers), _ = looped(index)
        score = (x[senders] * x[receivers]).sum(-1)
        most = x.new_zeros(NODES).scatter_reduce(0, receivers, score, "amax", include_self=False)
        exps = torch.exp(score - most[receivers])
        share = exps / x.new_zeros(NODES).scatter_add(0, receivers, exps)[receivers]
        wide = receivers[:, None].expand(-1, x.shape[1])
        summed = torch.zeros_like(x).index_add(0, receivers, share[:, None] * x[senders])
        mean = torch.zeros_like(x).scatter_reduce(0, wide, x[senders], "mean", include_self=False)
        return summed + mean


def compiled(module: nn.Module) -> Callable[..., Tensor]:
    return torch.compile(module, backend=tilestream, options={"target": "reference"}, fullgraph=True)


LISTS = {
    "loops": edges(), "none": edges(loops=0), "all": edges(30, 30), "no edges": torch.zeros(2, 0, dtype=torch.long),
    "another": edges(300, 100, 3),
}  # fmt: skip


@pytest.mark.parametrize("module", [Gcn(), Attention()], ids=["gcn", "attention"])
def test_as_eager(module: nn.Module, sorts: list[int]) -> None:
    fast = compiled(module)
    for index in LISTS.values():
        x = torch.randn(NODES, 32)
        with torch.no_grad():
            torch.testing.assert_close(fast(x, index), module(x, index), rtol=1e-4, atol=1e-5)
    assert sorts == [300 + NODES, 300 + NODES, 30 + NODES, 300 + NODES]  # once a call, where there are edges


def test_weights_of_loops(sorts: list[int]) -> None:
    """The last of a node's own loops counts, as in eager on a CPU."""
    module, x = Gcn(), torch.randn(NODES, 32)
    fast = compiled(module)
    for index in (LISTS["loops"], LISTS["another"]):
        weights = torch.rand(index.shape[1])
        with torch.no_grad():
            torch.testing.assert_close(fast(x, index, weights), module(x, index, weights), rtol=1e-4, atol=1e-5)
    assert len(sorts) == 2


def test_what_is_dropped_is_never_read() -> None:
    """Not multiplied by nothing: the sender of an edge that is dropped may hold infinities."""
    x, index = torch.randn(NODES, 32), torch.tensor([[0, 1, 2], [0, 2, 1]])

    class Neighbours(nn.Module):
        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            senders, receivers = index[:, index[0] != index[1]]
            return torch.zeros_like(x).index_add(0, receivers, x[senders])

    x[0] = float("inf")
    with torch.no_grad():
        got = compiled(Neighbours())(x, index)
        assert torch.equal(got, Neighbours()(x, index)) and bool(got.isfinite().all())


@pytest.mark.parametrize("bad", [NODES, -1, operators.DROPPED])
def test_an_index_that_is_no_node(bad: int) -> None:
    module, index = Gcn(1), edges()
    index[1, 200] = bad
    with torch.no_grad(), pytest.raises((InputError, IndexError, RuntimeError)):
        compiled(module)(torch.randn(NODES, 32), index)


def made(function: Callable[..., Any], *inputs: Tensor) -> int:
    class Model(nn.Module):
        def forward(self, *given: Tensor) -> Any:
            return function(*given)

    (graph,) = capture(Model(), inputs).graphs
    before = str(graph.graph)
    count = keep_masked_edges(graph.graph, Settings(sums=sorted_sums))
    assert count or str(graph.graph) == before
    return count


def summed(rows: Tensor, index: Tensor) -> Tensor:
    return rows.new_zeros(NODES, *rows.shape[1:]).index_add(0, index, rows)


def test_where_rows_meet_the_graph_stays() -> None:
    """Selected rows that leave the graph, meet each other, or are counted; and advanced indices below zero."""
    x, index = torch.randn(NODES, 8), edges()

    def kept(index: Tensor) -> Tensor:
        return index[:, index[0] != index[1]]

    assert made(lambda x, index: summed(x[kept(index)[0]], kept(index)[1]), x, index) == 2
    assert made(lambda x, index: kept(index), x, index) == 0
    assert made(lambda x, index: summed(x[kept(index)[0]].cumsum(0), kept(index)[1]), x, index) == 0
    assert made(lambda x, index: summed(x[kept(index)[0]] - x[kept(index)[0]].mean(0), kept(index)[1]), x, index) == 0
    assert made(lambda x, index: summed(x[kept(index)[0]] / kept(index).shape[1], kept(index)[1]), x, index) == 0
    assert made(lambda x, index: summed(x[kept(index)[0]].flip(0), kept(index)[1]), x, index) == 0
    put = torch.ops.aten.index_put
    assert made(lambda x, index: put(x * 0, [kept(index)[1]], x[kept(index)[0]], True), x, index) == 0


def test_explain_has_one_graph_and_one_sort() -> None:
    with torch.no_grad():
        found = analyse(Gcn().eval().bfloat16(), [torch.zeros(NODES, 32).bfloat16(), edges()], Options(device="h200"))
    assert len(found.graphs) == 1 and not found.breaks
    nodes = [n.target for n in found.graphs[0].found.graph.graph.nodes]
    assert nodes.count(operators.SEGMENTS) == 1 and torch.ops.aten.nonzero.default not in nodes
    assert sum(str(n).startswith("aten.index_put") for n in nodes) == 0
