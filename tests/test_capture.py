"""Capture: functional graphs without decompositions, source lines, symbolic sizes, graph breaks."""

from __future__ import annotations

import pytest
import torch
from modules import Fn, linear
from torch import Tensor, nn

from tilestream.capture import boxed, capture, product, source
from tilestream.errors import CaptureError


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
