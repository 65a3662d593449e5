"""Convolutions of patches as layers over rows: which are, by which choice, and what becomes of them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from tilestream.devices import get
from tilestream.errors import TilestreamError
from tilestream.graph.capture import capture
from tilestream.graph.nodes import aten, packet
from tilestream.graph.patches import place, sites
from tilestream.graph.rewrites.patches import multiply_patches
from tilestream.graph.rewrites.table import rewrite
from tilestream.options import Options
from tilestream.plan.analyse import analyse
from tilestream.plan.candidates import FALLBACK, Candidate
from tilestream.plan.patches import kind_of, library, ours
from tilestream.run import replacements
from tilestream.run import trials as run
from tilestream.run.backend import tilestream
from tilestream.run.target import resolve

pytestmark = pytest.mark.usefixtures("without_inductor")

BF16 = torch.bfloat16
LAYOUTS = {"first": torch.contiguous_format, "last": torch.channels_last}


class Embedding(nn.Module):
    """ViT's: patches to tokens, and a place for each."""

    def __init__(self, channels: int = 3, wide: int = 64, size: int = 4, bias: bool = True) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, wide, size, size, bias=bias)
        self.place = nn.Parameter(torch.randn(1, 16, wide) * 0.1)
        self.norm = nn.LayerNorm(wide)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x).flatten(2).transpose(1, 2) + self.place)


def pictures(channels: int = 3, size: int = 16, count: int = 2, layout: str = "first") -> Tensor:
    x = torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(1))
    return x.to(BF16).to(memory_format=LAYOUTS[layout])


def ready(model: nn.Module, layout: str = "first") -> nn.Module:
    return model.to(BF16).to(memory_format=LAYOUTS[layout]).eval()  # pyright: ignore[reportCallIssue]


def graph_of(model: nn.Module, x: Tensor) -> fx.GraphModule:
    return capture(model, (x,)).graphs[0]


def convolution(**words: object) -> nn.Module:
    return ready(nn.Conv2d(**({"in_channels": 4, "out_channels": 8, "kernel_size": 4, "stride": 4} | words)))  # pyright: ignore


LEFT: dict[str, Callable[[], nn.Module]] = {
    "windows overlap": lambda: convolution(stride=2),
    "windows apart": lambda: convolution(kernel_size=2),
    "padding": lambda: convolution(padding=2),
    "dilation": lambda: convolution(kernel_size=4, dilation=2),
    "groups": lambda: convolution(groups=2),
    "1 x 1": lambda: convolution(kernel_size=1, stride=1),
    "a rest of a picture": lambda: convolution(kernel_size=5, stride=5),
    "transposed": lambda: ready(nn.ConvTranspose2d(4, 8, 4, 4)),
}


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.every(3)
def test_what_is_left(name: str) -> None:
    assert not sites(graph_of(LEFT[name](), pictures(4)).graph)
    assert len(sites(graph_of(convolution(), pictures(4)).graph)) == 1


def test_float32_stays() -> None:
    assert not sites(graph_of(nn.Conv2d(3, 8, 4, 4), pictures().float()).graph)


def flattened() -> nn.Module:
    """A view over channels and pixels of a result whose channels lie first."""
    return nn.Sequential(nn.Conv2d(4, 8, 4, 4), nn.Flatten(), nn.Linear(128, 8))


@pytest.mark.parametrize("make", [convolution, flattened])
def test_what_is_returned_or_viewed_as_it_lies_is_copied_so(make: Callable[[], nn.Module]) -> None:
    model, x = ready(make()), pictures(4)
    graph = graph_of(model, x)
    (site,) = sites(graph.graph)
    assert place(graph, site) and not sites(graph.graph)
    clones = graph.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert any(n.meta["val"].shape == site.node.meta["val"].shape and n.meta["val"].is_contiguous() for n in clones)
    compiled = torch.compile(model, backend=tilestream, options={"target": "reference"})
    with torch.no_grad():
        exact, eager, got = copy.deepcopy(model).double()(x.double()), model(x), compiled(x)
    assert got.stride() == eager.stride() and (got - exact).norm() <= 1.5 * (eager - exact).norm()


@pytest.mark.parametrize("weights", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.every(3)
def test_compiled(layout: str, weights: str, bias: bool) -> None:
    model, x = ready(Embedding(bias=bias), weights), pictures(layout=layout)
    graph = graph_of(model, x)
    (site,) = sites(graph.graph)
    assert place(graph, site)
    assert aten.convolution not in [packet(n) for n in graph.graph.nodes]
    compiled = torch.compile(model, backend=tilestream, options={"target": "reference"})
    with torch.no_grad():
        exact, eager, got = copy.deepcopy(model).double()(x.double()), model(x), compiled(x)
    assert got.stride() == eager.stride() and (got - exact).norm() <= 1.5 * (eager - exact).norm()


def gradients(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    y = call(x)
    (y.double() if y.dtype == torch.float64 else y.float()).square().mean().backward()
    return [p.grad.double() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("weights", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.every(3)
def test_trained(layout: str, weights: str, bias: bool) -> None:
    """Gradients are products too, and lie as the parameters do."""
    model, x = ready(Embedding(bias=bias), weights), pictures(layout=layout)
    wide = copy.deepcopy(model).double()
    exact, eager = gradients(wide, wide, x.double()), gradients(model, model, x)
    compiled = torch.compile(model, backend=tilestream, options={"target": "reference"})
    got = gradients(model, compiled, x)
    assert [p.grad.stride() for p in model.parameters()] == [p.stride() for p in model.parameters()]  # pyright: ignore
    for a, b, c in zip(got, eager, exact, strict=True):
        assert (a - c).norm() <= 2 * (b - c).norm() + 1e-9 * c.norm()


def joint_of(model: nn.Module, x: Tensor, of_pictures: bool = False) -> fx.GraphModule:
    names, given = zip(*model.named_parameters(), strict=True)

    def step(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        y = torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (x,))
        return torch.autograd.grad(y.sum(), [x, *parameters] if of_pictures else parameters)

    return make_fx(step, tracing_mode="fake")(x.requires_grad_(of_pictures), *given)


def test_convolutions_of_pictures_are_products_in_a_joint_graph() -> None:
    """Those of wide pixels stay, and those whose pictures want a gradient too."""
    for channels, of_pictures, left in ((3, False, 0), (16, False, 2), (3, True, 2)):
        graph = joint_of(ready(Embedding(channels)), pictures(channels), of_pictures)
        assert bool(rewrite(graph, multiply_patches)) == (left == 0)
        kinds = [packet(n) for n in graph.graph.nodes]
        assert kinds.count(aten.convolution) + kinds.count(aten.convolution_backward) == left


def test_channels_last_between_pixels() -> None:
    """ConvNeXt's: 2 x 2 between layers of pixels, windows of unlike sides, any number of pictures."""
    layers = nn.Conv2d(16, 32, 1), nn.ReLU(), nn.Conv2d(32, 16, (2, 4), (2, 4)), nn.ReLU(), nn.Conv2d(16, 32, 1)
    model = ready(nn.Sequential(*layers), "last")
    compiled = torch.compile(model, backend=tilestream, options={"target": "reference"}, dynamic=True)
    with torch.no_grad():
        for count in (2, 3):
            x = pictures(16, count=count, layout="last")
            eager, got = model(x), compiled(x)
            assert got.stride() == eager.stride()
            torch.testing.assert_close(got, eager, rtol=0.05, atol=0.05)


def test_the_option_leaves_them_alone_and_few_cost_a_launch() -> None:
    model, x = ready(Embedding()), pictures()
    for convolutions, left in (("auto", 0), ("off", 1)):
        options = Options(device="h200", target="reference", convolutions=convolutions)  # pyright: ignore
        nodes = analyse(model, (x,), options).graphs[0].found.graph.graph.nodes
        assert [packet(n) for n in nodes].count(aten.convolution) == left
    first, last = (kind_of(sites(graph_of(model, pictures(layout=name)).graph)[0]) for name in LAYOUTS)
    assert ours(first, get("h200")).us < library(first, get("h200")).us
    assert ours(last, get("h200")).us > library(last, get("h200")).us


def test_both_ways_are_called_on_values_like_the_operands() -> None:
    target = resolve(Options(target="reference"), [pictures()])
    assert target is not None
    for layout in LAYOUTS:
        (site,) = sites(graph_of(ready(Embedding(), layout), pictures(layout=layout)).graph)
        trial = run.patches_trial(kind_of(site), target)
        values = trial.make()
        assert values[0].shape == (2, 3, 16, 16) and trial.plain is not None
        (made,) = trial.call(Candidate("ours", None, None, operator="ours"), values)()
        (plain,) = trial.call(Candidate(FALLBACK, None, None), values)()
        torch.testing.assert_close(made, plain, rtol=0.02, atol=0.02)


def test_an_exception_costs_the_rewrite(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise TilestreamError("no", "yes")

    monkeypatch.setattr(replacements, "choice", fails)
    monkeypatch.delenv("TILESTREAM_STRICT")
    model, x = ready(Embedding()), pictures()
    compiled = torch.compile(model, backend=tilestream, options={"target": "reference"})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=0.05, atol=0.1)
