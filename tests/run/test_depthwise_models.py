"""Depthwise convolutions in models: which are taken, with what behind them, by which choice, and what is explained."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from depthwise_blocks import Inverted, Next, ready
from torch import Tensor, fx, nn

from tilestream.devices import get
from tilestream.errors import TilestreamError
from tilestream.graph.capture import capture
from tilestream.graph.convolutions import is_convolution
from tilestream.graph.depthwise import DEPTHWISE, TAKEN, Site, site_of
from tilestream.graph.nodes import aten, packet
from tilestream.graph.rewrites.pixels import to_pixels
from tilestream.graph.rewrites.table import rewrite
from tilestream.graph.squeeze import SQUEEZE
from tilestream.options import Options
from tilestream.plan.analyse import analyse
from tilestream.plan.candidates import FALLBACK, Candidate
from tilestream.plan.depthwise import Kind, kind_of, library, ours, take
from tilestream.plan.squeeze import kinds_of
from tilestream.run import replacements
from tilestream.run import trials as run
from tilestream.run.backend import tilestream
from tilestream.run.target import resolve

pytestmark = pytest.mark.usefixtures("without_inductor")


def pictures(channels: int, size: int = 12, count: int = 2, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    x = torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(1))
    return x.to(dtype).to(memory_format=torch.channels_last)


def graph_of(model: nn.Module, x: Tensor) -> fx.GraphModule:
    return capture(model, (x,)).graphs[0]


def sites(graph: fx.GraphModule) -> list[Site]:
    return [site for node in graph.graph.nodes if (site := site_of(node)) is not None]


def convolution(channels: int = 16, **words: object) -> nn.Module:
    return ready(nn.Conv2d(channels, channels, **({"kernel_size": 3, "padding": 1, "groups": channels} | words)))  # pyright: ignore


LEFT: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "groups of five": lambda: (convolution(20, groups=4), pictures(20)),
    "two results a channel": lambda: (ready(nn.Conv2d(16, 32, 3, groups=16)), pictures(16)),
    "dilation": lambda: (convolution(dilation=2), pictures(16)),
    "a stride of three": lambda: (convolution(stride=3), pictures(16)),
    "unlike strides": lambda: (convolution(stride=(1, 2)), pictures(16)),
    "9 x 9": lambda: (convolution(kernel_size=9), pictures(16)),
    "a tap reads padding alone": lambda: (convolution(padding=3), pictures(16)),
    "an odd number of channels": lambda: (convolution(15), pictures(15)),
    "float32": lambda: (convolution().float(), pictures(16, dtype=torch.float32)),
    "channels first": lambda: (convolution().to(memory_format=torch.contiguous_format), pictures(16).contiguous()),
    "transposed": lambda: (ready(nn.ConvTranspose2d(16, 16, 3, groups=16)), pictures(16)),
}


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.every(3)
def test_what_is_left(name: str) -> None:
    model, x = LEFT[name]()
    assert not sites(graph_of(model, x))
    assert sites(graph_of(convolution(), pictures(16)))


@pytest.mark.parametrize(
    ("act", "activation"),
    [(nn.SiLU, "silu"), (nn.ReLU6, "relu6"), (nn.Hardswish, "hardswish"), (nn.GELU, "gelu"), (nn.Tanh, "none")],
)
@pytest.mark.every(2)
def test_what_is_taken_in(act: type[nn.Module], activation: str) -> None:
    graph = graph_of(ready(Inverted(kernel=5, act=act)), pictures(16))
    (site,) = sites(graph)
    assert (site.conv.kernel, site.conv.scaled, site.conv.activation) == ((5, 5), True, activation)
    assert site.conv.pooled == (activation != "none") == bool(site.means)
    take(site, get("h200"))
    assert rewrite(graph, to_pixels)
    (made,) = graph.graph.find_nodes(op="call_function", target=DEPTHWISE)
    assert made.args[3] is not None and made.args[7] == activation
    kinds = [packet(n) for n in graph.graph.nodes]
    assert aten.convolution not in kinds and aten._native_batch_norm_legit_no_training not in kinds
    assert (aten.mean in kinds) == (activation == "none")
    assert not any(TAKEN in n.meta for n in graph.graph.nodes)


def gates_of(model: nn.Module, squeezed: bool = True) -> list[fx.Node]:
    """The gates that become our operator, where every convolution does."""
    graph = graph_of(model, pictures(16))
    for site in sites(graph):
        take(site, get("h200"), squeezed)
    assert rewrite(graph, to_pixels)
    assert (aten.sum in [packet(n) for n in graph.graph.nodes]) != squeezed
    return graph.graph.find_nodes(op="call_function", target=SQUEEZE)


def test_squeeze_and_excite_becomes_one_operator() -> None:
    (made,) = gates_of(ready(Inverted()))
    assert made.args[1] == 1 / 144 and made.args[6:] == ("relu", "sigmoid")
    assert not gates_of(ready(Inverted()), squeezed=False)
    (kind,) = kinds_of(sites(graph_of(ready(Inverted()), pictures(16)))[0], get("h200"))
    assert (kind.shape.channels, kind.shape.hidden, kind.pictures) == (32, 8, 2)


class Gated(nn.Module):
    """A depthwise convolution, and a gate of its mean by what is given."""

    def __init__(self, down: nn.Module, up: nn.Module, gate: Callable[[Tensor], Tensor], act: nn.Module) -> None:
        super().__init__()
        self.conv, self.down, self.up = nn.Conv2d(16, 16, 3, padding=1, groups=16), down, up
        self.gate, self.act = gate, act

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y * self.gate(self.up(self.act(self.down(y.mean((2, 3), keepdim=True)))))


GATES: dict[str, tuple[bool, Callable[[], nn.Module]]] = {
    "as MobileNet has them": (
        True, lambda: Gated(nn.Conv2d(16, 8, 1), nn.Conv2d(8, 16, 1), nn.functional.hardsigmoid, nn.ReLU())),
    "without biases": (
        True, lambda: Gated(nn.Conv2d(16, 8, 1, bias=False), nn.Conv2d(8, 16, 1, bias=False), torch.sigmoid, nn.SiLU())
    ),
    "another gate": (False, lambda: Gated(nn.Conv2d(16, 8, 1), nn.Conv2d(8, 16, 1), torch.tanh, nn.ReLU())),
    "another activation": (False, lambda: Gated(nn.Conv2d(16, 8, 1), nn.Conv2d(8, 16, 1), torch.sigmoid, nn.ELU())),
    "groups": (False, lambda: Gated(nn.Conv2d(16, 8, 1, groups=2), nn.Conv2d(8, 16, 1), torch.sigmoid, nn.ReLU())),
    "3 x 3": (False, lambda: Gated(nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(8, 16, 1), torch.sigmoid, nn.ReLU())),
    "one gate for all": (False, lambda: Gated(nn.Conv2d(16, 8, 1), nn.Conv2d(8, 1, 1), torch.sigmoid, nn.ReLU())),
    "an odd hidden layer": (False, lambda: Gated(nn.Conv2d(16, 7, 1), nn.Conv2d(7, 16, 1), torch.sigmoid, nn.ReLU())),
}  # fmt: skip


@pytest.mark.parametrize("name", GATES)
@pytest.mark.every(3)
def test_gates_that_are_taken_and_left(name: str) -> None:
    taken, make = GATES[name]
    graph = graph_of(ready(make()), pictures(16))
    (site,) = sites(graph)
    assert len(kinds_of(site, get("h200"))) == taken
    take(site, get("h200"), squeezed=True)
    rewrite(graph, to_pixels)
    assert len(graph.graph.find_nodes(op="call_function", target=SQUEEZE)) == taken


def test_gates_that_are_compiled() -> None:
    for name in ("as MobileNet has them", "without biases", "one gate for all"):
        model, x = ready(GATES[name][1]()), pictures(16)
        compiled = torch.compile(model, backend=tilestream, options={"target": "reference"})
        with torch.no_grad():
            exact, eager, got = copy.deepcopy(model).double()(x.double()), model(x), compiled(x)
        assert (got - exact).norm() <= 1.5 * (eager - exact).norm()


def test_both_ways_to_a_gate_are_called() -> None:
    target = resolve(Options(target="reference"), [pictures(16)])
    assert target is not None
    (kind,) = kinds_of(sites(graph_of(ready(Inverted()), pictures(16)))[0], get("h200"))
    trial = run.gate_trial(kind, target)
    values = trial.make()
    assert trial.plain is not None
    (made,) = trial.call(Candidate("ours", None, None, operator="ours"), values)()
    torch.testing.assert_close(made, trial.plain(*values)[0])
    (plain,) = trial.call(Candidate(FALLBACK, None, None), values)()
    assert plain.shape == made.shape == (2, 32)


def test_a_norm_with_other_readers_stays() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return torch.relu(self.norm(y)) + y

    (site,) = sites(graph_of(ready(Both()), pictures(16)))
    assert site.norm is None and site.last is site.node and site.conv.activation == "none"


def test_a_scale_of_each_channel_and_a_residual_join_the_rows() -> None:
    """ConvNeXt's block, written with channels first around the layers: all but the convolution is one region."""
    model, x = ready(Next(), Next()), pictures(32, 28, 32)
    found = analyse(model, (x,), Options(device="h200"))
    names = [[n.rpartition(".")[0] for n in r.operators] for r in found.regions]
    assert len(names) == 2 and all(n[0].endswith("layer_norm") and n[-1].endswith("add") for n in names)
    assert all("aten.mul" in n for n in names) and not found.exclusions


@pytest.mark.parametrize(
    "blocks", [(Inverted(), Inverted(kernel=5)), (Next(), Next()), (Inverted(stride=2), Inverted())]
)
def test_compiled(blocks: tuple[nn.Module, ...]) -> None:
    model = ready(*blocks)
    x = pictures(32 if isinstance(blocks[0], Next) else 16, 13)
    compiled = torch.compile(model, backend=tilestream, options={"target": "reference", "fallback": True})
    with torch.no_grad():
        exact, eager, got = copy.deepcopy(model).double()(x.double()), model(x), compiled(x)
    assert got.stride() == eager.stride()
    assert (got - exact).norm() <= 1.5 * (eager - exact).norm()


def test_any_number_of_pictures() -> None:
    model = ready(Inverted(), Next(16))
    compiled = torch.compile(model, backend=tilestream, options={"target": "reference"}, dynamic=True)
    with torch.no_grad():
        for count in (2, 5):
            x = pictures(16, count=count)
            torch.testing.assert_close(compiled(x), model(x), rtol=0.05, atol=0.1)


def test_the_option_leaves_them_alone() -> None:
    model, x = ready(Inverted()), pictures(16)
    for convolutions, count in (("auto", 1), ("off", 0)):
        options = Options(device="h200", target="reference", convolutions=convolutions)  # pyright: ignore
        found = analyse(model, (x,), options)
        assert len(found.graphs[0].found.graph.graph.find_nodes(op="call_function", target=DEPTHWISE)) == count
    target = resolve(Options(target="reference"), [x])
    assert target is not None
    graph = graph_of(model, x)
    assert not replacements.replace(graph, Options(target="reference", convolutions="off"), target)
    made = replacements.replace(graph, Options(target="reference"), target)
    assert len(made) == 2 and all(plan.wins for plan in made) and sum(TAKEN in n.meta for n in graph.graph.nodes) == 1


def test_both_ways_are_called_on_values_like_the_operands() -> None:
    x = pictures(16)
    target = resolve(Options(target="reference"), [x])
    assert target is not None
    for model in (ready(Inverted(stride=2)), convolution(bias=True)):
        (site,) = sites(graph_of(model, x))
        trial = run.depthwise_trial(kind_of(site), target)
        values = trial.make()
        assert values[0].shape == (2, site.conv.height, site.conv.width, site.conv.channels) and trial.plain is not None
        right = trial.plain(*values)
        (made, *sums) = trial.call(Candidate("ours", None, None, operator="ours"), values)()
        torch.testing.assert_close(made, right[0])
        assert len(sums) == len(right) - 1 == site.conv.pooled
        (plain,) = trial.call(Candidate(FALLBACK, None, None), values)()
        assert plain.shape == made.shape and plain.is_contiguous()
        if not site.conv.scaled:
            torch.testing.assert_close(plain, made, rtol=0.02, atol=0.02)


def test_an_exception_costs_the_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise TilestreamError("no", "yes")

    monkeypatch.setattr(replacements, "choice", fails)
    monkeypatch.delenv("TILESTREAM_STRICT")
    model, x = ready(Inverted()), pictures(16)
    compiled = torch.compile(model, backend=tilestream, options={"target": "reference"})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=0.05, atol=0.1)


def test_what_is_expected() -> None:
    """Explained with our kernel in it, beside Inductor's graph without; a library's pixels are a product's rows."""
    found = analyse(ready(Next(96)), (pictures(96, 56, 32),), Options(device="h200"))
    (site,) = sites(graph_of(ready(Next(96)), pictures(96, 56, 32)))
    kind, device = kind_of(site), get("h200")
    assert isinstance(kind, Kind) and found.plain_graphs
    mine, theirs = ours(kind, device).us, library(kind, device).us
    assert found.predicted_us is not None and found.inductor_predicted_us is not None
    assert found.inductor_predicted_us - found.predicted_us > 0.8 * (theirs - mine)
    down = nn.Conv2d(384, 768, 2, 2).bfloat16().to(memory_format=torch.channels_last).eval()
    alone = analyse(down, (pictures(384, 14, 32),), Options(device="h200"))
    (node,) = [n for n in alone.graphs[0].found.graph.graph.nodes if is_convolution(n)]
    assert node.meta["val"].shape == (32, 7, 7, 768)
    assert alone.predicted_us is not None and alone.predicted_us < 30
