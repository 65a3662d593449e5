"""Gradients of norms that no region takes in: one operator for rows, weight and bias, with the same values."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from tilestream.graph.capture import capture
from tilestream.graph.cut import Cutter
from tilestream.graph.nodes import aten, packet
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.norm_sums import NORM_GRADIENTS, join_norm_gradients
from tilestream.graph.rewrites.norms import open_norms
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.rewrites.table import When, rewrite

pytestmark = pytest.mark.usefixtures("fresh")


class Blocks(nn.Module):
    """Two of a transformer's, a layer in front so that each norm's input has a gradient."""

    def __init__(self, width: int, norm: Any = nn.LayerNorm, **given: Any) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.norms = nn.ModuleList(norm(width, **given) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x


def backward_of(model: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    """In its normal form, no region taken out of it."""
    _, backward = capture(model, inputs, training=True, partition=Cutter(Settings(1))).graphs
    rewrite(backward, When.BACKWARD)
    rewrite(backward, When.NORMAL_FORM)
    return backward


def joined(graph: fx.GraphModule) -> list[fx.Node]:
    return graph.graph.find_nodes(op="call_function", target=NORM_GRADIENTS)


def values(graph: fx.GraphModule) -> list[Tensor]:
    """What a graph makes of random inputs."""
    generator = torch.Generator().manual_seed(0)
    fakes = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")]
    given = [torch.randn(tuple(f.shape), generator=generator).to(f.dtype) for f in fakes]
    return [t for t in fx.Interpreter(graph).run(*given) if t is not None]


@pytest.mark.parametrize("shape", [(40, 64), (3, 10, 64)])
def test_what_was_opened_is_joined(shape: tuple[int, ...]) -> None:
    graph = backward_of(Blocks(64).bfloat16(), torch.randn(shape).bfloat16())
    before = copy.deepcopy(graph)
    assert rewrite(graph, join_norm_gradients) == 2
    assert [n.args[5] is not None for n in joined(graph)] == [True, True]  # with the residual's gradient
    assert not any(packet(n) in (aten.rsqrt, aten.mean) for n in graph.graph.nodes)
    for got, want in zip(values(graph), values(before), strict=True):
        assert (got - want).norm() <= 0.01 * want.norm()


def test_root_mean_squares() -> None:
    """As a GPU's graph has them: on a CPU torch takes the operator apart."""
    mode, graph = FakeTensorMode(), fx.Graph()
    sizes = {"g": (40, 64), "x": (40, 64), "w": (64,)}
    g, x, w = (graph.placeholder(name) for name in sizes)
    with mode:
        for node, size in zip((g, x, w), sizes.values(), strict=True):
            node.meta["val"] = torch.empty(size, dtype=torch.bfloat16)
    norm = call(x, aten._fused_rms_norm.default, x, [64], w, 1e-3)
    scale = call(x, operator.getitem, norm, 1)
    made = call(x, aten._fused_rms_norm_backward.default, g, x, [64], scale, w, [True, True])
    graph.output(tuple(call(x, operator.getitem, made, k) for k in range(2)))
    module = fx.GraphModule(nn.Module(), graph)
    assert rewrite(module, open_norms) == 1 and rewrite(module, join_norm_gradients) == 1
    given = [torch.randn(size).bfloat16() for size in sizes.values()]
    rows, weight = (t.double().requires_grad_() for t in given[1:])
    want = torch.autograd.grad(F.rms_norm(rows, [64], weight, 1e-3), (rows, weight), given[0].double())
    for got, wanted in zip(module(*given), want, strict=True):
        assert (got - wanted).norm() <= 0.01 * wanted.norm()


def test_wide_norms_are_joined_where_both_halves_are_one_graph() -> None:
    graph = backward_of(Blocks(768).bfloat16(), torch.randn(40, 768).bfloat16())
    assert len(joined(graph)) == 2 and not any(packet(n) is aten.native_layer_norm_backward for n in graph.graph.nodes)


def test_a_norm_without_a_weight_or_a_bias() -> None:
    x = torch.randn(40, 64).bfloat16()
    graph = backward_of(Blocks(64, bias=False).bfloat16(), x)
    assert rewrite(graph, join_norm_gradients) == 2
    graph = backward_of(Blocks(64, elementwise_affine=False).bfloat16(), x)
    assert rewrite(graph, join_norm_gradients) == 0  # the rows alone, which one kernel of Inductor's has


@pytest.mark.parametrize(
    ("width", "dtype"), [(64, torch.float32), (65, torch.bfloat16), (1056, torch.bfloat16)], ids=str
)
def test_what_has_no_kernel_stays(width: int, dtype: torch.dtype) -> None:
    graph = backward_of(Blocks(width).to(dtype), torch.randn(40, width).to(dtype))
    assert rewrite(graph, join_norm_gradients) == 0 and not joined(graph)


def test_rows_that_lie_otherwise_stay() -> None:
    class Turned(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).transpose(0, 1)

    class Norm(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.transpose(0, 1)).transpose(0, 1)

    graph = backward_of(Turned(64, Norm).bfloat16(), torch.randn(6, 10, 64).bfloat16())
    assert rewrite(graph, join_norm_gradients) == 0


def test_a_norm_in_part_in_a_region_stays() -> None:
    graph = backward_of(Blocks(64).bfloat16(), torch.randn(40, 64).bfloat16())
    total = next(n for n in graph.graph.nodes if packet(n) is aten.rsqrt)
    with graph.graph.inserting_after(total):
        other = graph.graph.call_function(aten.neg.default, (total,))
    other.meta = dict(total.meta)
    total.replace_all_uses_with(other, delete_user_cb=lambda user: user is not other)
    assert rewrite(graph, join_norm_gradients) == 1


def test_a_sum_that_is_made_before_the_input_stays() -> None:
    """As where the forward graph's rows are made again late in the backward graph."""
    graph = backward_of(Blocks(64).bfloat16(), torch.randn(40, 64).bfloat16())
    before = copy.deepcopy(graph)
    gradient = next(n for n in graph.graph.nodes if packet(n) is aten.mm)
    total = next(n for n in graph.graph.nodes if packet(n) is aten.sum and n.args[0] is gradient)
    x = next(n for n in graph.graph.nodes if packet(n) is aten.sub).args[0]
    gradient.append(total)
    with graph.graph.inserting_after(total):
        late = graph.graph.call_function(aten.clone.default, (x,))  # pyright: ignore[reportArgumentType]
    late.meta = dict(x.meta)  # pyright: ignore
    x.replace_all_uses_with(late, delete_user_cb=lambda user: user is not late and total < user)  # pyright: ignore
    assert rewrite(graph, join_norm_gradients) == 2 and packet(total) is aten.sum and total.users
    for got, want in zip(values(graph), values(before), strict=True):
        assert (got - want).norm() <= 0.01 * want.norm()


def test_what_is_alike_in_part_stays() -> None:
    """Products with numbers, and sums of what is no norm's."""

    def run(g: Tensor, x: Tensor, shift: Tensor) -> tuple[Tensor, ...]:
        normal = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + shift)
        return (normal * g).sum(0), (2.0 * g).sum(0), (normal * 0.5).sum(0)

    graph = make_fx(run, tracing_mode="fake")(*(torch.randn(40, 64).bfloat16() for _ in range(2)), torch.ones(40, 1))
    assert rewrite(graph, join_norm_gradients) == 0
