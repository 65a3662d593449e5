"""Layers of graph networks as ragged regions: which operators, one sort, values and gradients as eager's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from graph_layers import GIN, LAYERS, Layer, scatter, softmax
from test_messages_training import Step
from torch import Tensor, fx, nn

from tilestream import devices
from tilestream.graph.capture import capture
from tilestream.graph.rewrites.operators import SEGMENTS, SORTED_INDEX
from tilestream.kernels.families import why_no_kernel
from tilestream.options import Options
from tilestream.plan import messages
from tilestream.plan.find import Found, find
from tilestream.plan.ragged import plan
from tilestream.run import oracle, prepare
from tilestream.run.backend import tilestream
from tilestream.run.made_up import random_arguments
from tilestream.run.place import Calls

OPTIONS, H200 = Options(target="reference"), devices.get("h200")
NODES, EDGES, FEATURES, OF_EDGES = 20, 60, 16, 8
KEPT_ROWS = {"EdgeConv", "CGConv"}
"""What every edge has is made by products: the sum alone is left."""


@pytest.fixture(autouse=True)
def _cheap(monkeypatch: pytest.MonkeyPatch, tf32: None) -> None:
    """Small sums pay, too; products are streamed."""
    monkeypatch.setattr(messages, "atomics_us", lambda _: 1e9)


def given(nodes: int = NODES, edges: int = EDGES, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes, edges [2, edges] that leave out the last nodes, and what edges have."""
    torch.manual_seed(0)
    ends = torch.randint(max(1, nodes - 5), (2, edges))
    return torch.randn(nodes, FEATURES).to(dtype), ends, torch.randn(edges, OF_EDGES).to(dtype)


def found(module: nn.Module, *inputs: Any) -> Found:
    (graph,) = capture(module, inputs).graphs
    return find(graph, "inference", Options(), devices.get("h200"))


def ragged(f: Found) -> list[Any]:
    return [cut for cut in f.cuts if cut.region.program.ragged]


class Placed(Step):
    """A module whose ragged regions are calls on the reference machine; all else runs operator by operator."""

    def __init__(self, module: nn.Module, training: bool, dynamic: bool | None = None) -> None:
        self.training, self.runners = training, list[str]()
        super().__init__(module, dynamic)

    def _kept(self, graph: fx.GraphModule, _: Any) -> Any:
        kind = ("forward", "backward")[len(self.graphs)] if self.training else "inference"
        cuts = ragged(find(graph, kind, OPTIONS, H200))
        calls = Calls(graph)
        for cut in cuts:
            chosen = plan(cut.region, H200, OPTIONS).chosen
            assert chosen.pipeline is not None
            self.runners.append(chosen.strategy)
            calls.of_region(cut, chosen.pipeline, "reference")
        calls.settle()
        return super()._kept(graph, _)


class Stacked(nn.Module):
    def __init__(self, *layers: Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, edges: Tensor, e: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edges, e)
        return x


@pytest.mark.parametrize("name", sorted(LAYERS.keys() - KEPT_ROWS))
@pytest.mark.every(3)
def test_a_layer_has_one_region(name: str) -> None:
    """With all gathers and all between the products; what is left outside has no edges."""
    (cut,) = ragged(found(LAYERS[name](), *given()))
    assert len(cut.outputs) == (4 if name == "PNA" else 1) and all(len(o.meta["val"]) == NODES for o in cut.outputs)


@pytest.mark.parametrize("name", sorted(KEPT_ROWS))
def test_products_keep_their_epilogues(name: str) -> None:
    assert not ragged(found(LAYERS[name](), *given()))


def test_five_layers_are_five_regions_and_one_sort() -> None:
    f = found(Stacked(*(GIN() for _ in range(5))), *given())
    cuts = ragged(f)
    assert len(cuts) == 5 and len({cut.region.program for cut in cuts}) == 1
    operators = ["index_select.default", "mul.Tensor", "add.Tensor"]  # ``1 + eps`` times a node's own row
    assert [o.removeprefix("aten.") for o in cuts[0].region.operators] == operators
    for target in (SEGMENTS, SORTED_INDEX):
        assert len(f.graph.graph.find_nodes(op="call_function", target=target)) == 1


@pytest.mark.parametrize("name", ["GAT", "PNA", "Transformer"])
def test_kernels_take_them(name: str) -> None:
    """Scores and values of a head have their features along one axis, whatever views made them."""
    (cut,) = ragged(found(LAYERS[name](), *given()))
    assert not why_no_kernel(plan(cut.region, H200, Options(target="reference")).chosen.pipeline)


def test_several_reductions_of_what_a_product_made_are_one() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(OF_EDGES, FEATURES)

        def forward(self, x: Tensor, edges: Tensor, e: Tensor) -> Tensor:
            rows = self.net(e)
            return torch.cat([scatter(rows, edges[1], NODES, how) for how in ("sum", "max", "min")], -1)

    (cut,) = ragged(found(Several(), *given()))
    assert len(cut.outputs) == 3 and _check(Several(), given(), False).runners == ["segments"]


class Deep(nn.Module):
    """Messages of many steps, each of which reads the one before twice."""

    def forward(self, x: Tensor, edges: Tensor, e: Tensor) -> Tensor:
        message = torch.cat([e, e], 1)
        for _ in range(40):
            message = message * torch.sigmoid(message)
        return torch.zeros_like(x).index_add(0, edges[1], message * x[edges[0]])


def test_long_messages_are_found_in_no_time() -> None:
    """Each way through 40 steps would be one of 2^40."""
    (cut,) = ragged(found(Deep(), *given()))
    assert sum("mul" in name for name in cut.region.operators) == 41


def test_what_counts_edges_alone_is_no_region() -> None:
    class Degree(nn.Module):
        def forward(self, x: Tensor, edges: Tensor, e: Tensor) -> Tensor:
            return scatter(x.new_ones(edges.shape[1]), edges[1], NODES).clamp(min=1).sqrt()

    assert not ragged(found(Degree(), *given())) and _check(Degree(), given(), False).runners == []


def test_a_softmax_over_edges_is_one_region() -> None:
    class Softmax(nn.Module):
        def forward(self, scores: Tensor, to: Tensor) -> Tensor:
            return softmax(scores, to, NODES)

    (cut,) = ragged(found(Softmax(), torch.randn(EDGES, 4), given()[1][1]))
    assert [len(o.meta["val"]) for o in cut.outputs] == [EDGES]


@pytest.mark.parametrize("name", sorted(LAYERS))
@pytest.mark.every(3)
def test_values(name: str) -> None:
    torch.manual_seed(0)
    assert _check(LAYERS[name](), given(), False).runners == ([] if name in KEPT_ROWS else ["segments"])


TRAINED = ["GAT", "GIN", "PNA", "SAGEMax"]


@pytest.mark.parametrize(
    "name", [*TRAINED, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in sorted(LAYERS.keys() - TRAINED))]
)
@pytest.mark.every(2)
def test_values_and_gradients(name: str) -> None:
    torch.manual_seed(0)
    _check(LAYERS[name](), given(), True)


def _check(module: nn.Module, inputs: tuple[Tensor, ...], training: bool, fast: Any = None) -> Any:
    """As near to float64 as twice what eager is. What ran."""
    fast = Placed(module, training) if fast is None else fast
    wide = copy.deepcopy(module).double()
    doubles = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    runs = [_run(fast, module, inputs, training), _run(module, module, inputs, training)]
    exact = _run(wide, wide, doubles, training)
    error, own = (oracle.error(run, exact) for run in runs)
    assert error <= max(2 * own, 3e-7), f"error {error:.2e}, eager's {own:.2e}"
    return fast


def _run(call: Any, module: nn.Module, inputs: tuple[Tensor, ...], training: bool) -> Tensor:
    """Results; in training all gradients beside them, as one vector."""
    if not training:
        with torch.no_grad():
            return call(*inputs)
    module.zero_grad(set_to_none=True)
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    out = call(*leaves)
    out.double().square().mean().backward()
    grads = [out.detach(), *(x.grad for x in leaves if x.is_floating_point()), *(p.grad for p in module.parameters())]
    return torch.cat([g.double().flatten() for g in grads if g is not None])


@pytest.mark.parametrize("name", ["SAGEMax", pytest.param("GAT", marks=pytest.mark.exhaustive)])
def test_16_bits(name: str) -> None:
    module = LAYERS[name]().bfloat16()
    _check(module, given(dtype=torch.bfloat16), training=False)
    _check(module, given(dtype=torch.bfloat16), training=True)


def test_compiled() -> None:
    """Beside Inductor's kernels, and the regions of rows."""
    module = LAYERS["GAT"]()
    torch._dynamo.reset()
    fast = torch.compile(module, backend=tilestream, options={"target": "reference"})
    _check(module, given(), False, fast)
    assert [a.runner for a in prepare.analyses() if a.kind == "ragged"][-1] == "segments"


@pytest.mark.parametrize("name", ["GAT", "SAGEMax"])
def test_dynamic_sizes_lists_that_change_and_no_edges(name: str) -> None:
    """One compilation serves graphs of any size; a list that is written between calls counts as it is then."""
    module = LAYERS[name]()
    fast = Placed(module, False, dynamic=True)
    for nodes, edges in ((20, 60), (15, 30), (25, 25)):
        inputs = given(nodes, edges)
        _check(module, inputs, False, fast)
        inputs[1][1] = inputs[1][1].flip(0)
        inputs[1][0, 0] = 3
        _check(module, inputs, False, fast)
    assert fast.runners == ["segments"]
    _check(module, given(edges=0), False)


def test_indices_below_zero_and_of_32_bits() -> None:
    class Weighted(nn.Module):
        def forward(self, x: Tensor, source: Tensor, to: Tensor) -> Tensor:
            return x.new_zeros(x.shape).index_put((to,), x[source] * 2, accumulate=True)

    x, (source, to), _ = given()
    _check(Weighted(), (x, (source - NODES).int(), (to - NODES).int()), False)


def test_values_that_are_made_up_are_a_graph() -> None:
    """Candidates are timed on lists that fit each other."""
    (cut,) = ragged(found(LAYERS["GAT"](), *given()))
    values = random_arguments(cut.region)
    (made,) = cut.region.graph(*values)
    assert made.isfinite().all() and made.abs().sum() > 0
    edges = cut.region.edges
    source, ordered, _ = edges.sources[0]
    assert torch.equal(values[source][values[edges.order]].int(), values[ordered])
