"""Capture: functional graphs without decompositions, source lines, symbolic sizes, graph breaks."""

from __future__ import annotations

import pytest
import torch
from modules import Fn, Recurrent, linear
from torch import Tensor, nn

from tilestream.errors import CaptureError
from tilestream.graph.capture import NeedsValuesError, boxed, capture
from tilestream.graph.provenance import module_path, source
from tilestream.graph.sizes import product


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def targets(graph: torch.fx.GraphModule) -> list[str]:
    return [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]


def test_operators_stay_whole():
    module = nn.Sequential(linear(9, 13), nn.LayerNorm(13), nn.GELU())
    (graph,) = capture(module, [torch.randn(37, 9)]).graphs
    names = targets(graph)
    assert {"aten.addmm.default", "aten.native_layer_norm.default", "aten.gelu.default"} <= set(names)


def test_mutation_is_gone():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.layers[0](x)
        h.relu_().add_(1)
        return h

    (graph,) = capture(Fn(forward, linear(9, 13)), [torch.randn(37, 9)]).graphs
    assert not any(name.split(".")[1].endswith("_") for name in targets(graph))


def test_source_is_the_users_line():
    module = Fn(lambda m, x: m.layers[0](x).relu(), linear(9, 13))
    (graph,) = capture(module, [torch.randn(37, 9)]).graphs
    lines = {source(n) for n in graph.graph.nodes if n.op == "call_function"}
    assert len(lines) == 1
    (line,) = lines
    assert line.startswith("test_capture.py:") and line.endswith(
        "module = Fn(lambda m, x: m.layers[0](x).relu(), linear(9, 13))"
    )


def test_graph_breaks_are_told():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.layers[0](x)
        torch._dynamo.graph_break()
        return m.layers[0](h)

    found = capture(Fn(forward, linear(9, 9)), [torch.randn(37, 9)])
    assert len(found.graphs) == 2
    assert found.breaks


def test_what_cannot_run_is_a_capture_error():
    with pytest.raises(CaptureError, match="could not be captured"):
        capture(linear(9, 13), [torch.randn(37, 8)])
    with pytest.raises(CaptureError, match="no graph"):
        capture(lambda: 3, [])


def test_products_of_sizes_compare():
    assert product([2, 3, 4]) == product([24]) == product([4, 6])


def test_boxed_calls_take_one_list():
    call = boxed(sum)
    assert call([1, 2]) == 3 and call._boxed_call  # pyright: ignore[reportFunctionMemberAccess]


def test_sizes_are_not_dynamic_for_another_models_sake():
    for features in range(9, 19):  # more than Dynamo compiles one code for
        (graph,) = capture(nn.Sequential(linear(features, 5)), [torch.randn(37, features)]).graphs
        assert all(isinstance(d, int) for n in graph.graph.nodes for d in getattr(n.meta.get("val"), "shape", ()))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(9, 13), linear(13, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.sum() > 0:
            h = h * 2
        return self.b(h)


def test_nothing_is_computed_and_no_memory_taken():
    x = torch.ones(1, 1).expand(10**11, 64)  # a result would take 800 GB
    (graph,) = capture(nn.Sequential(nn.Linear(64, 2), nn.ReLU()), [x]).graphs
    assert targets(graph)[-1] == "aten.relu.default"


def test_a_graph_break_leaves_the_rest_to_fakes():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.layers[0](x)
        torch._dynamo.graph_break()
        return m.layers[0](h)

    found = capture(Fn(forward, linear(9, 9)), [torch.ones(1, 1).expand(10**11, 9)])
    assert len(found.graphs) == 2 and not found.ran
    assert "graph_break()` at test_capture.py:" in found.breaks[0]


def test_a_model_that_branches_on_values_is_run_and_says_where():
    found = capture(Branches(), [torch.randn(37, 9)])
    assert len(found.graphs) == 2
    assert found.ran.startswith("what it does depends on values at test_capture.py:")
    assert found.breaks[0].startswith("a branch on a tensor's value at test_capture.py:")


def test_a_branch_on_values_without_values():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.randn(37, 9)
    with pytest.raises(NeedsValuesError, match="depends on values at test_capture.py:.*Remedy: give it real tensors"):
        capture(Branches(), [x])


def test_what_dynamo_leaves_to_python_is_seen():
    found = capture(Recurrent(), [torch.randn(4, 7, 9)])
    assert not found.graphs
    assert found.breaks == ("torch.compile does not trace nn.RNN, nn.GRU and nn.LSTM",)
    flops = {e.op: e.flops for e in found.eager}
    assert flops["aten.addmm.default"] == 2 * 4 * 13 * 5
    assert max(flops.values()) == 2 * 4 * 7 * 4 * 13 * (9 + 13)
    assert all(e.source.startswith("modules.py:") for e in found.eager)


def test_operators_inside_of_graphs_are_not_eager():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.layers[1](m.layers[0](x)).relu_()

    found = capture(Fn(forward, linear(9, 13), nn.BatchNorm1d(13)), [torch.randn(37, 9)], training=True)
    assert found.kinds == ("forward", "backward") and found.eager == ()


def test_training_has_forward_and_backward_graphs_and_leaves_no_gradients():
    module = nn.Sequential(linear(9, 13), nn.Tanh(), linear(13, 5))
    found = capture(module, [torch.randn(37, 9)], training=True)
    assert found.kinds == ("forward", "backward")
    assert "aten.tanh_backward.default" in targets(found.graphs[1])
    assert all(p.grad is None for p in module.parameters())
    with pytest.raises(CaptureError, match="nothing of the model takes gradients"):
        capture(module.requires_grad_(False), [torch.randn(37, 9)], training=True)


def test_a_gradient_inside_of_forward_is_no_inference_graph():
    class Physics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(linear(2, 16), nn.Tanh(), linear(16, 1))

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_(True)
                return torch.autograd.grad(self.net(x).sum(), x)[0]

    found = capture(Physics(), [torch.randn(37, 2)])
    assert {"forward", "backward"} <= set(found.kinds)
    assert any("torch.autograd.grad" in reason for reason in found.breaks)


def test_keywords_dicts_and_what_is_no_tensor():
    def forward(batch: dict[str, Tensor], scale: int, kind: str = "sin") -> Tensor:
        return getattr(torch, kind)(batch["x"]) * scale

    (graph,) = capture(forward, [{"x": torch.randn(37, 9)}], {"scale": 3, "kind": "cos"}).graphs
    assert targets(graph) == ["aten.cos.default", "aten.mul.Tensor"]


def test_what_a_model_keeps_for_later_is_not_fake():
    class Keeps(nn.Module):
        table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.ones(9) * 2
            self.last = x + self.table
            return self.last

    module = Keeps()
    capture(module, [torch.randn(37, 9)])
    assert module.table is None and not hasattr(module, "last")
    assert torch.equal(module(torch.zeros(9)), torch.full((9,), 2.0))


def test_nodes_know_the_path_of_their_module():
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(linear(9, 9), nn.Tanh()) for _ in range(2))
            self.heads = nn.ModuleDict({"out": linear(9, 5)})

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.heads["out"](x)

    found = capture(Blocks(), [torch.randn(37, 9)], training=True)
    for graph, op in zip(found.graphs, ("aten.tanh.default", "aten.tanh_backward.default"), strict=True):
        assert {module_path(n) for n in graph.graph.nodes if str(n.target) == op} == {"blocks.0.1", "blocks.1.1"}
    assert "heads.out" in {module_path(n) for n in found.graphs[0].graph.nodes}


def test_a_failure_is_one_line_of_the_users_own(caplog: pytest.LogCaptureFixture):
    def forward(x: Tensor) -> Tensor:
        raise ValueError("no such mode\nand more")

    with pytest.raises(CaptureError, match=r"captured: ValueError: no such mode at test_capture.py:\d+. Remedy"):
        capture(forward, [torch.randn(37, 9)])
    with pytest.raises(CaptureError) as failed:
        capture(linear(9, 13), [torch.randn(37, 8)])
    assert "\n" not in str(failed.value) and "same reduction dim" in str(failed.value)
    assert "Traceback" not in caplog.text
