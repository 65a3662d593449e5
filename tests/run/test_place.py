"""Calls in the place of regions: legal order, right values, what the operator's text says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from modules import Fn, linear
from rewritten import normal
from streamed import stream
from torch import Tensor, fx, nn

from tilestream.errors import CacheError
from tilestream.graph.capture import capture
from tilestream.graph.selection import partition
from tilestream.run.operator import REGION
from tilestream.run.place import place
from tilestream.run.spec import decode, encode, spec_of


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def graph_of(module: nn.Module, *shapes: tuple[int, ...]) -> fx.GraphModule:
    (graph,) = capture(module.bfloat16(), [torch.randn(s).bfloat16() for s in shapes]).graphs
    return graph


def values_of(graph: fx.GraphModule) -> list[Tensor]:
    return [torch.randn(n.meta["val"].shape).bfloat16() / 3 for n in graph.graph.find_nodes(op="placeholder")]


def calls(graph: fx.GraphModule) -> list[fx.Node]:
    return graph.graph.find_nodes(op="call_function", target=REGION)


def around(m: nn.Module, x: Tensor) -> Tensor:
    a = m.layers[0](x).cumsum(0)
    b = m.layers[1](a).sort(-1)[0]
    return m.layers[2](a + b)


def crossing(m: nn.Module, x: Tensor) -> Tensor:
    h = m.layers[0](x)
    return m.layers[1](h).relu() + h.cumsum(-1).relu()


@pytest.mark.parametrize(("forward", "layers"), [(around, 3), (crossing, 2)])
def test_every_value_is_made_before_it_is_used(forward: Any, layers: int):
    graph = graph_of(Fn(forward, *(linear(9, 9) for _ in range(layers))), (37, 9))
    values = values_of(graph)
    (eager,) = graph(*values)
    found, placed = stream(graph)
    assert len(calls(graph)) == len(placed) == len(found.regions) >= 1
    (got,) = graph(*values)
    torch.testing.assert_close(got, eager, rtol=0.1, atol=0.1)


def test_a_region_without_a_pipeline_stays_as_it_is():
    graph = graph_of(Fn(around, *(linear(9, 9) for _ in range(3))), (37, 9))
    before = graph.code
    assert place(graph, partition(graph), lambda region: None, "reference") == [] and graph.code == before


def mutating() -> fx.GraphModule:
    """Reads ``x``, overwrites it, and reads it again: two linears that may not change places with the copy."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    x.meta["val"], w.meta["val"] = torch.randn(37, 9).bfloat16(), torch.randn(9, 9).bfloat16()

    def add(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = target(*(a.meta["val"].clone() if isinstance(a, fx.Node) else a for a in args))
        return node

    aten = torch.ops.aten
    first = add(aten.relu.default, add(aten.mm.default, x, w))
    doubled = add(aten.mul.Tensor, add(aten.cumsum.default, first, 0), 2.0)
    add(aten.copy_.default, x, doubled)
    second = add(aten.relu.default, add(aten.mm.default, x, w))
    graph.output((first, second))
    return fx.GraphModule(nn.Module(), graph)


def test_calls_do_not_change_places_with_a_mutation():
    graph = mutating()
    x, w = torch.randn(37, 9).bfloat16(), torch.randn(9, 9).bfloat16() / 3
    want = graph(x.clone(), w)
    _, placed = stream(graph)
    assert len(placed) == 2
    for got, plain in zip(graph(x.clone(), w), want, strict=True):
        torch.testing.assert_close(got, plain, rtol=0.1, atol=0.1)


def test_equal_layers_are_one_text():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        for index in range(4):
            x = m.layers[index](x).relu().cumsum(0)
        return x

    graph = graph_of(Fn(forward, *(linear(9, 9) for _ in range(4))), (37, 9))
    _, placed = stream(graph)
    assert len(placed) == 4 and len({str(call.args[2]) for call in calls(graph)}) == 1
    assert len({region.sources for region in placed}) >= 1 and all(region.sources for region in placed)


def test_a_spec_comes_back_from_its_text():
    graph = normal(graph_of(Fn(around, *(linear(9, 9) for _ in range(3))), (37, 9)))
    for region in partition(graph).regions:
        spec = spec_of(region, region.program, "reference")
        assert decode(encode(spec)) == spec and encode(decode(encode(spec))) == encode(spec)
        assert spec.is_static


def test_views_of_one_address_have_texts_of_their_own():
    """A square matrix and its transpose lie at one address: what is remembered by address must not mix them up."""
    graph = graph_of(Fn(lambda m, x: (m.layers[0](x).relu(), m.layers[0](x.t()).relu()), linear(9, 9)), (9, 9))
    x, *_ = values = values_of(graph)
    want = graph(*values)
    _, placed = stream(graph)
    assert len({str(call.args[2]) for call in calls(graph)}) == len(placed)
    for got, plain in zip(graph(*values), want, strict=True):
        torch.testing.assert_close(got, plain, rtol=0.1, atol=0.1)
    assert x.shape == (9, 9)


@pytest.mark.parametrize("text", ["", "AAAA", "not base 64!", "eJwDAAAAAAE="])
def test_damaged_text_is_an_error_with_a_remedy(text: str):
    with pytest.raises(CacheError, match="Remedy: delete torch's caches"):
        decode(text)
