"""Rows reduced by an index: sums, means, maxima, minima and products in sorted order."""

from __future__ import annotations

import pytest
import torch
from eager_regions import trace
from rewritten import sort_messages
from test_messages_training import Step, check
from torch import Tensor, nn

from tilestream.graph.rewrites.operators import SEGMENT_REDUCE, SEGMENTS, segment_reduce, segments
from tilestream.plan import messages
from tilestream.run.backend import tilestream

HOW = ["sum", "mean", "amax", "amin", "prod"]
EDGES, NODES = 300, 40


@pytest.fixture(autouse=True)
def _cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sums pay, too."""
    monkeypatch.setattr(messages, "atomics_us", lambda _: 1e9)


def given(shape: tuple[int, ...], dtype: torch.dtype, edges: int = EDGES) -> tuple[Tensor, Tensor, Tensor]:
    """What is reduced with, rows, and an index that leaves out the last nodes."""
    torch.manual_seed(0)
    base, rows = torch.randn(NODES, *shape).to(dtype), torch.randn(edges, *shape).to(dtype)
    return base, rows, torch.randint(NODES - 5, (edges,))


def wide(index: Tensor, rows: Tensor) -> Tensor:
    return index.view(-1, *[1] * (rows.dim() - 1)).expand_as(rows)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (5,), (4, 8)], ids=str)
@pytest.mark.parametrize("base", ["zeros", "ones", "own"])
@pytest.mark.parametrize("include_self", [False, True])
@pytest.mark.every(3)
def test_scatter_reduce(how: str, dtype: torch.dtype, shape: tuple[int, ...], base: str, include_self: bool) -> None:
    def reduce(v: Tensor, e: Tensor, to: Tensor) -> Tensor:
        start = {"zeros": torch.zeros_like(v), "ones": torch.ones_like(v), "own": v}[base]
        return start.scatter_reduce(0, wide(to, e), e, how, include_self=include_self)

    inputs = given(shape, dtype)
    graph = trace(reduce, inputs)
    of_nothing = "ones" if how == "prod" else "zeros"
    assert sort_messages(graph) == int(include_self or base == of_nothing)
    (got,) = graph(*inputs)
    exact = reduce(*(x.double() if x.is_floating_point() else x for x in inputs))
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("how", ["mean", "amax", "amin", "prod"])
def test_index_reduce(how: str) -> None:
    def reduce(v: Tensor, e: Tensor, to: Tensor) -> Tensor:
        return v.index_reduce(0, to, e, how)

    inputs = given((6,), torch.float32)
    graph = trace(reduce, inputs)
    assert sort_messages(graph) == 1
    torch.testing.assert_close(graph(*inputs)[0], reduce(*inputs))


@pytest.mark.parametrize("how", ["sum", "max", "min", "mul"])
def test_nothing_and_nan(how: str) -> None:
    """No edges; NaN goes to its node alone."""
    base, rows, to = given((3,), torch.float32, edges=0)
    parts = segments(to, NODES)
    assert torch.equal(segment_reduce(base, rows, *parts, how), base)
    assert torch.equal(segment_reduce(None, rows, *parts, how), torch.full_like(base, float(how == "mul")))
    base, rows, to = given((3,), torch.float32)
    rows[7, 1] = float("nan")
    bad = segment_reduce(None, rows, *segments(to, NODES), how).isnan()
    assert bad[to[7], 1] and bad.sum() == 1


def degree(x: Tensor, to: Tensor) -> Tensor:
    return x.new_zeros(NODES).scatter_add(0, to, x.new_ones(len(to)))


def test_counts_in_16_bits_do_not_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub's degree, which a layer divides its exact sum by, perhaps in another graph: added up in bfloat16 it stays
    at 256. It is counted in whole numbers, also where nothing else of the graph is ours."""
    monkeypatch.undo()
    x, to = torch.zeros(NODES, dtype=torch.bfloat16), torch.zeros(20_000, dtype=torch.int64)
    torch._dynamo.reset()
    fast = torch.compile(degree, backend=tilestream, options={"target": "reference"})
    with torch.no_grad():
        assert fast(x, to)[0] == torch.tensor(20_000).bfloat16()
    assert sort_messages(trace(degree, (x.float(), to))) == 0


HALVES = {
    "ones": lambda x, to: x.new_zeros(NODES).scatter_add(0, to, x.new_ones(len(to))),
    "many of a half, of int32": lambda x, to: x.new_zeros(NODES).index_add(0, to.int(), x.new_full((len(to),), 0.5)),
    "from the end": lambda x, to: x.new_zeros(NODES).index_put((to - NODES,), x.new_ones(len(to)), accumulate=True),
    "a column": lambda x, to: x.new_zeros(NODES, 1).index_add(0, to, x.new_ones(len(to), 1)),
}


@pytest.mark.parametrize("how", HALVES)
def test_counts_are_not_sorted(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    torch.manual_seed(0)
    x, to = torch.zeros(NODES, dtype=torch.bfloat16), torch.randint(NODES, (9000,))
    to[:4000] = 3
    graph = trace(HALVES[how], (x, to))
    assert sort_messages(graph) == 1
    assert not graph.graph.find_nodes(op="call_function", target=torch.ops.tilestream.segments.default)
    (got,) = graph(x, to)
    assert got.dtype == torch.bfloat16 and torch.equal(got, HALVES[how](x.double(), to).bfloat16())


def test_a_sum_of_weights_in_16_bits_is_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    w, to = torch.rand(900).bfloat16(), torch.randint(NODES, (900,))
    graph = trace(lambda w, to: w.new_zeros(NODES).index_add(0, to, w), (w, to))
    assert sort_messages(graph) == 1
    assert graph.graph.find_nodes(op="call_function", target=torch.ops.tilestream.segments.default)


def test_16_bits_are_sorted_beside_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrow sums whose own sort does not pay, where a wide one's does."""

    def both(v: Tensor, e: Tensor, to: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        return v.index_add(0, to, e), v.index_add(0, others, e)

    v, e, to = given((4,), torch.bfloat16)
    monkeypatch.setattr(messages, "atomics_us", lambda s: 1e9 if s.parts[0].index.name.startswith("arg2") else 0)
    for dtype, replaced in ((torch.bfloat16, 2), (torch.float32, 1)):
        assert sort_messages(trace(both, (v.to(dtype), e.to(dtype), to, to.flip(0)))) == replaced


class Pooled(nn.Module):
    """Two layers that reduce what their neighbours have by ``how``."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, source: Tensor, to: Tensor) -> Tensor:
        for layer in (self.first, self.last):
            e = layer(x)[source]
            zeros = e.new_zeros(len(x), e.shape[1])
            x = zeros.scatter_reduce(0, wide(to, e), e, self.how, include_self=False)
        return x


@pytest.mark.parametrize("how", ["sum", "mean", "amax", "amin"])
def test_gradients(how: str) -> None:
    """Those of maxima compare and count, which are sums too; one sort of receivers serves both graphs."""
    torch.manual_seed(0)
    source, to = torch.randint(NODES, (EDGES,)), torch.randint(NODES - 5, (EDGES,))
    module = Pooled(how)
    step = Step(module)
    check(module, step, torch.randn(NODES, 8), source, to)
    sorts = [len(g.graph.find_nodes(op="call_function", target=SEGMENTS)) for g in step.graphs]
    sums = [len(g.graph.find_nodes(op="call_function", target=SEGMENT_REDUCE)) for g in step.graphs]
    assert sum(sorts) == 2
    # autograd counts the rows of a mean by a sum of ones
    assert sums == {"sum": [2, 2], "mean": [4, 2]}.get(how, [2, 4])
