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

pytestmark = pytest.mark.usefixtures("without_inductor")

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


class Scored(nn.Module):
    """A learned vector scores each edge, as in GATv2."""

    def __init__(self) -> None:
        super().__init__()
        self.of = nn.Parameter(torch.randn(1, 32))

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        (senders, receivers), _ = looped(index)
        both = nn.functional.leaky_relu(x[senders] + x.index_select(0, receivers))
        rows = torch.sigmoid((both * self.of).sum(-1))[:, None] * x[senders]
        return torch.zeros_like(x).index_add(0, receivers, rows)


def compiled(module: nn.Module) -> Callable[..., Tensor]:
    return torch.compile(module, backend=tilestream, options={"target": "reference"}, fullgraph=True)


LISTS = {
    "loops": edges(), "none": edges(loops=0), "all": edges(30, 30), "no edges": torch.zeros(2, 0, dtype=torch.long),
    "another": edges(300, 100, 3),
}  # fmt: skip


@pytest.mark.parametrize("module", [Gcn(), Attention()], ids=["gcn", "attention"])
@pytest.mark.every(2)
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


def gradients(function: Callable[..., Tensor], module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Of a step: of the parameters, and of the inputs of numbers."""
    given = [x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    module.zero_grad()
    function(*given).square().mean().backward()
    every = [*module.parameters(), *(x for x in given if x.is_floating_point())]
    return [torch.zeros_like(x) if x.grad is None else x.grad.clone() for x in every]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.every(2)
def test_a_training_step(sorts: list[int], weighted: bool) -> None:
    """Also of edges' weights; each list is sorted by receiver, and by sender for the gradients of gathers."""
    module = Gcn(3)
    fast = compiled(module)
    for index in (LISTS["loops"], LISTS["none"], LISTS["another"]):
        inputs = [torch.randn(NODES, 32), index, *([torch.rand(index.shape[1])] if weighted else [])]
        got = gradients(fast, module, *inputs)
        wide = Gcn(3).double()
        wide.load_state_dict(module.state_dict())
        exact = gradients(wide, wide, *(x.double() if x.is_floating_point() else x for x in inputs))
        for a, b in zip(got, exact, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-6)
    assert sorts == [300 + NODES] * 2 * 3


@pytest.mark.parametrize("module", [Attention(), Scored()], ids=["attention", "scored"])
@pytest.mark.every(2)
def test_gradients_of_a_softmax(module: nn.Module, sorts: list[int]) -> None:
    """Gathers by advanced indexing, whose gradients are ``index_put``, and a vector whose gradient is of all edges."""
    x = torch.randn(NODES, 32)
    got = gradients(compiled(module), module, x, LISTS["loops"])
    for a, b in zip(got, gradients(module, module, x, LISTS["loops"]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert sorts == [300 + NODES] * 2


def test_a_training_step_that_is_refused(sorts: list[int]) -> None:
    """Rows that are added up one after the other."""

    class Running(nn.Module):
        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            (senders, receivers), _ = looped(index)
            return torch.zeros_like(x).index_add(0, receivers, x.index_select(0, senders).cumsum(0))

    module, x = Running(), torch.randn(NODES, 32)
    got, exact = (gradients(f, module, x, LISTS["loops"]) for f in (compiled(module), module))
    torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5)
    assert not sorts


def test_infinite_gradients_of_what_is_dropped() -> None:
    """Where a loop's row has no finite gradient, nobody has it: weights of loops that are taken out have zero."""

    class Roots(nn.Module):
        def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            mask = index[0] != index[1]
            senders, receivers = index[:, mask]
            return torch.zeros_like(x).index_add(0, receivers, weights[mask].sqrt()[:, None] * x[senders])

    index, weights = torch.tensor([[0, 1, 2], [0, 2, 1]]), torch.tensor([0.0, 1.0, 2.0])
    got = gradients(compiled(Roots()), Roots(), torch.randn(NODES, 32), index, weights)
    assert bool(got[1].isfinite().all()) and got[1][0] == 0 and bool((got[1][1:] != 0).all())


def test_indices_below_zero_where_they_count_from_the_end() -> None:
    class Put(nn.Module):
        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            senders, receivers = index[:, index[0] != index[1]]
            return torch.zeros_like(x).index_put((receivers,), x[senders], accumulate=True)

    index, x = torch.tensor([[0, 1, -2, 3], [0, -1, 5, -NODES]]), torch.randn(NODES, 32)
    fast = compiled(Put())
    with torch.no_grad():
        torch.testing.assert_close(fast(x, index), Put()(x, index))
    for a, b in zip(gradients(fast, Put(), x, index), gradients(Put(), Put(), x, index), strict=True):
        torch.testing.assert_close(a, b)


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
    """Selected rows that leave the graph, meet each other, are counted, or are cut at a number."""
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
    assert made(lambda x, index: put(x * 0, [kept(index)[1]], x[kept(index)[0]], True), x, index) == 1
    assert made(lambda x, index: summed(x[kept(index)[0]][:300], kept(index)[1][:300]), x, index) == 0


def test_explain_has_one_graph_and_one_sort() -> None:
    with torch.no_grad():
        found = analyse(Gcn().eval().bfloat16(), [torch.zeros(NODES, 32).bfloat16(), edges()], Options(device="h200"))
    assert len(found.graphs) == 1 and not found.breaks
    nodes = [n.target for n in found.graphs[0].found.graph.graph.nodes]
    assert nodes.count(operators.SEGMENTS) == 1 and torch.ops.aten.nonzero.default not in nodes
    assert sum(str(n).startswith("aten.index_put") for n in nodes) == 0
