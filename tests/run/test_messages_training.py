"""Messages in training: one sort for forward and backward, one sum for both ends of an edge, the right gradients.

``test_apps_compiled.py`` has the applications as they run, with their regions.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from rewritten import sort_messages
from small_sizes import SMALL
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from tilestream.apps.models import MODELS
from tilestream.graph.capture import boxed, capture
from tilestream.graph.rewrites.operators import SEGMENT_REDUCE, SEGMENTS
from tilestream.options import Options
from tilestream.plan import messages
from tilestream.run import oracle
from tilestream.run.graphs import Compilation
from tilestream.run.joint import Partitioner
from tilestream.run.target import resolve

aten = torch.ops.aten
ADDS = (aten.index_add, aten.scatter_add, aten.index_put, aten.embedding_dense_backward)


class Step:
    """Training without regions: AOTAutograd, our cut into forward and backward, and both operator by operator.

    ``graphs`` are the forward graph, then the backward one.
    """

    def __init__(self, module: nn.Module, dynamic: bool | None = None) -> None:
        self.graphs: list[fx.GraphModule] = []
        torch._dynamo.reset()
        self.run: Any = torch.compile(module, backend=self._backend, dynamic=dynamic)

    def _backend(self, graph: fx.GraphModule, inputs: list[Any]) -> Any:
        options = Options(target="reference")
        target = resolve(options, inputs)
        assert target is not None
        cut = Partitioner(Compilation(options, target, inputs))
        return aot_autograd(fw_compiler=self._kept, bw_compiler=self._kept, partition_fn=cut, decompositions={})(
            graph, inputs
        )

    def _kept(self, graph: fx.GraphModule, _: Any) -> Any:
        self.graphs.append(graph)
        return boxed(lambda arguments: graph.forward(*arguments))

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self.run(*inputs)

    @property
    def sorted_sums(self) -> tuple[int, list[int]]:
        """Sorts of both graphs, which are where less is saved, and sums of each; none adds in another way."""
        sorts, sums = zip(*(sorted_sums(graph) for graph in self.graphs), strict=True)
        return sum(sorts), list(sums)


def sorted_sums(graph: fx.GraphModule) -> tuple[int, int]:
    assert not any(getattr(n.target, "overloadpacket", None) in ADDS for n in graph.graph.nodes)
    sorts, sums = (graph.graph.find_nodes(op="call_function", target=op) for op in (SEGMENTS, SEGMENT_REDUCE))
    return len(sorts), len(sums)


@pytest.fixture(autouse=True)
def _cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sums pay, too."""
    monkeypatch.setattr(messages, "atomics_us", lambda _: 1e9)


def gradients(function: Any, module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    module.zero_grad(set_to_none=True)
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    function(*leaves).double().square().mean().backward()
    found = [p.grad for p in module.parameters()] + [x.grad for x in leaves if x.is_floating_point()]
    return torch.cat([g.double().flatten() for g in found if g is not None])


def check(module: nn.Module, step: Step, *inputs: Tensor) -> None:
    """Gradients are as near to float64 as eager's, and the same bits twice."""
    got, again = gradients(step, module, inputs), gradients(step, module, inputs)
    eager = gradients(module, module, inputs)
    wide = copy.deepcopy(module).double()
    exact = gradients(wide, wide, tuple(x.double() if x.is_floating_point() else x for x in inputs))
    error, own = oracle.error(got, exact), oracle.error(eager, exact)
    assert error <= 2 * own, f"error {error:.2e}, eager's {own:.2e}"
    assert torch.equal(got, again)


# Receivers are sorted for both graphs, senders for the backward one; each end of the edges is a sum of its own, since
# dY is what is summed. GraphCast has three kinds of edges, whose senders are sorted.
@pytest.mark.parametrize(("name", "wanted"), [("mgn", (2, [2, 4])), ("graphcast_small", (6, [4, 8]))])
def test_all_sums_of_the_applications(name: str, wanted: tuple[int, list[int]]) -> None:
    module, inputs = MODELS[name].make(device="cpu", training=True, **SMALL[name])
    step = Step(module)
    check(module, step, *inputs)
    assert step.sorted_sums == wanted


@pytest.mark.parametrize(("name", "wanted"), [("mgn", (1, 2)), ("graphcast_small", (3, 4))])
def test_inference_of_the_applications(name: str, wanted: tuple[int, int]) -> None:
    """GraphCast takes its receivers from its index in every layer anew: they are sorted once all the same."""
    module, inputs = MODELS[name].make(device="cpu", **SMALL[name])
    (graph,) = capture(module, inputs).graphs
    sort_messages(graph)
    assert sorted_sums(graph) == wanted


def test_gradients_of_tables_are_one_sum() -> None:
    """DLRM's: the gradients of 26 tables' rows are slices of one tensor, and so are what is summed to them."""
    module, inputs = MODELS["dlrm"].make(device="cpu", training=True, **SMALL["dlrm"])
    step = Step(module)
    check(module, step, *inputs)
    (_, backward) = step.graphs
    assert not backward.graph.find_nodes(op="call_function", target=aten.embedding_dense_backward.default)
    ((total,), (_,)) = (backward.graph.find_nodes(op="call_function", target=op) for op in (SEGMENT_REDUCE, SEGMENTS))
    tables = sorted(len(t.weight) for t in module.modules() if isinstance(t, nn.Embedding))
    assert total.meta["val"].shape == (sum(tables), 128)
    assert sorted(len(user.meta["val"]) for user in total.users) == tables


@pytest.mark.parametrize(("batch", "rows", "sums"), [(2048, 100_000, 1), (32768, 100_000, 1), (128, 1000, 0)])
def test_where_one_sort_for_all_tables_pays(batch: int, rows: int, sums: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    module, inputs = MODELS["dlrm"].make(training=True, batch=batch, max_rows=rows)
    backward = capture(module, inputs, training=True).graphs[1]
    sort_messages(backward)
    assert len(backward.graph.find_nodes(op="call_function", target=SEGMENT_REDUCE)) == sums


class Layers(nn.Module):
    """Messages of a node to its neighbours; ``how`` they are gathered and added."""

    def __init__(self, how: str, width: int = 16) -> None:
        super().__init__()
        self.how = how
        self.nets = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, v: Tensor, senders: Tensor, receivers: Tensor) -> Tensor:
        for net in self.nets:
            given = net, v, senders, receivers
            v = checkpoint(self.layer, *given, use_reentrant=False) if self.how == "checkpoint" else self.layer(*given)
        return v

    def layer(self, net: nn.Module, v: Tensor, senders: Tensor, receivers: Tensor) -> Tensor:
        zeros = torch.zeros_like(v)
        if self.how == "gather and scatter_add":
            rows = v.gather(0, senders.unsqueeze(1).expand(-1, v.shape[1]))
            return v + zeros.scatter_add(0, receivers.unsqueeze(1).expand_as(rows), net(rows))
        if self.how == "index and index_put":
            return v + zeros.index_put((receivers - len(v),), net(v[senders]), accumulate=True)
        if self.how == "embedding":
            return v + zeros.index_add(0, receivers, net(nn.functional.embedding(senders, v)))
        return v.index_add(0, receivers, torch.relu(net(v.index_select(0, senders))).to(v.dtype))


def mesh(nodes: int = 40, edges: int = 150, width: int = 16, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """Node 0 receives most, node 1 nothing; no edge is sorted."""
    torch.manual_seed(0)
    senders, receivers = torch.randint(2, nodes, (2, edges))
    receivers[torch.randperm(edges)[: 2 * edges // 3]] = 0
    return torch.randn(nodes, width).to(dtype), senders, receivers


@pytest.mark.parametrize("how", ["index_add", "gather and scatter_add", "index and index_put", "embedding"])
@pytest.mark.every(2)
def test_ways_to_gather_and_to_add(how: str) -> None:
    module = Layers(how).bfloat16()
    step = Step(module)
    check(module, step, *mesh())
    assert step.sorted_sums == (2, [2, 2])


def test_a_sort_of_the_forward_graph_is_saved() -> None:
    """Who sends receives as well, so that both graphs sum along one index."""

    class Loops(Layers):
        def forward(self, v: Tensor, index: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().forward(v, index, index)

    module = Loops("index_add").bfloat16()
    step = Step(module)
    check(module, step, *mesh()[:2])
    assert step.sorted_sums == (1, [2, 2])
    saved = [n.meta["val"] for n in step.graphs[1].graph.find_nodes(op="placeholder")]
    integers = {(x.dtype, len(x)) for x in saved if isinstance(x, Tensor) and not x.is_floating_point()}
    # Where nodes start and which are busy; the index, and its order.
    assert integers == {(torch.int32, 41), (torch.int32, 5), (torch.int64, 150), (torch.int32, 150)}


def test_sizes_may_be_symbolic() -> None:
    module = Layers("index and index_put").bfloat16()
    step = Step(module, dynamic=True)
    for nodes, edges in ((40, 150), (33, 90)):
        check(module, step, *mesh(nodes, edges))
    assert step.sorted_sums == (2, [2, 2])


class Ends(nn.Module):
    """An edge reads both of its ends, beside ``features`` of its own."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features, self.net = features, nn.Linear(32 + features, 16)

    def forward(self, v: Tensor, e: Tensor, senders: Tensor, receivers: Tensor) -> Tensor:
        for _ in range(2):
            e = self.net(torch.cat([v[senders], e[:, : self.features], v[receivers]], -1))
            v = v.index_add(0, receivers, e)
        return v


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("features", "most", "wanted"), [(16, 75, 2), (8, 75, 4), (16, 150, 4), (8, 150, 4)])
@pytest.mark.every(3)
def test_both_ends_of_an_edge(features: int, most: int, wanted: int, dynamic: bool) -> None:
    """One sum where their gradients are rows of one matrix; columns 0 and 24 of 40 are not, in steps of 16. Then the
    receivers' share the sort of the forward graph. So they do where there are more than two edges for each of 40 nodes:
    rows of dY are what is summed."""
    module = Ends(features).bfloat16()
    step = Step(module, dynamic=dynamic)
    for edges in (most, most - 10)[: 1 + dynamic]:
        v, senders, receivers = mesh(edges=edges)
        check(module, step, v, torch.randn(edges, 16).bfloat16(), senders, receivers)
    assert step.sorted_sums == (2, [2, wanted])


def test_under_a_users_checkpoint_the_sort_is_made_once() -> None:
    module = Layers("checkpoint").bfloat16()
    step = Step(module)
    check(module, step, *mesh())
    assert step.sorted_sums[0] == 2


def test_what_torch_is_to_make_deterministic_is_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "atomics_us", lambda _: 0.0)
    module, inputs = Layers("index_add"), mesh(dtype=torch.float32)
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            step = Step(module)
            with torch.autocast("cpu", torch.bfloat16):
                gradients(step, module, inputs)
        finally:
            torch.use_deterministic_algorithms(False)
        if deterministic:
            assert step.sorted_sums == (2, [2, 2])
        else:
            assert not any(graph.graph.find_nodes(op="call_function", target=SEGMENTS) for graph in step.graphs)
