"""Layers over tokens in models: which are taken, by which choice, and what is explained."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch
from mixer_blocks import BF16, Mixer
from torch import Tensor, fx, nn

from tilestream.errors import TilestreamError
from tilestream.graph.capture import capture
from tilestream.graph.nodes import aten, packet
from tilestream.graph.token_mixing import TOKEN_MIXING, place, sites
from tilestream.options import Options
from tilestream.plan.analyse import analyse
from tilestream.plan.candidates import FALLBACK, Candidate
from tilestream.plan.token_mixing import TOKEN_LAYERS, kind_of
from tilestream.run import replacements
from tilestream.run import trials as run
from tilestream.run.backend import tilestream
from tilestream.run.target import resolve


def images(count: int = 2, tokens: int = 36, channels: int = 64) -> Tensor:
    return torch.randn(count, tokens, channels, generator=torch.Generator().manual_seed(1)).to(BF16)


def graph_of(model: Callable[..., Tensor], x: Tensor) -> fx.GraphModule:
    return capture(model.to(BF16).eval() if isinstance(model, nn.Module) else model, (x,)).graphs[0]


class Turned(nn.Module):
    """Layers over tokens with what is said of them: ``of`` their input, ``between`` them, and ``behind`` them."""

    def __init__(
        self,
        of: Callable[[Tensor], Tensor] = lambda x: x.transpose(1, 2),
        between: Callable[[Tensor], Tensor] = nn.functional.gelu,
        behind: Callable[[Tensor, Tensor], Tensor] = lambda x, y: x + y.transpose(1, 2),
        tokens: int = 36,
    ) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(tokens, 72), nn.Linear(72, tokens)
        self.of, self.between, self.behind = of, between, behind

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(x, self.two(self.between(self.one(self.of(x)))))


def test_what_is_taken_in() -> None:
    graph = graph_of(Mixer(), images())
    (site,) = sites(graph.graph)
    numbers = {"tokens": 36, "hidden": 72, "channels": 64, "dtype": "bf16", "normed": True, "residual": True}
    assert asdict(site.mixing) == numbers | {"activation": "gelu"} and site.images == 2
    assert place(graph, site)
    kinds = [packet(n) for n in graph.graph.nodes]
    assert kinds.count(aten.native_layer_norm) == 1 and aten.transpose not in kinds
    (plain,) = sites(graph_of(Turned(behind=lambda _, y: y.transpose(1, 2)), images()).graph)
    assert not plain.mixing.normed and not plain.mixing.residual
    (tanh,) = sites(graph_of(Mixer(act=lambda: nn.GELU("tanh")), images()).graph)  # pyright: ignore[reportArgumentType]
    assert tanh.mixing.activation == "gelu_tanh"


LEFT: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "the hidden layer is read": lambda: (Turned(behind=lambda x, y: x + y.transpose(1, 2) * y.mean()), images()),
    "another activation": lambda: (Turned(between=torch.tanh), images()),
    "nothing between": lambda: (Turned(between=lambda x: x), images()),
    "not turned back": lambda: (Turned(behind=lambda x, y: x.transpose(1, 2) + y), images()),
    "not turned": lambda: (Turned(of=lambda x: x, behind=torch.add), images(tokens=64, channels=36)),
    "a part is added": lambda: (Turned(behind=lambda x, y: x[:1] + y.transpose(1, 2)), images()),
    "twice what was made": lambda: (
        Turned(behind=lambda x, y: torch.add(x, y.transpose(1, 2), alpha=2)[:, :, :8].contiguous()),
        images(),
    ),
    "images for channels": lambda: (Turned(between=lambda h: torch.relu(h.transpose(0, 1))), images(64)),
    "an odd number of tokens": lambda: (Turned(tokens=35), images(tokens=35)),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name: str) -> None:
    model, x = LEFT[name]()
    found = sites(graph_of(model, x).graph)
    assert not any(site.mixing.residual for site in found)
    assert not found or name in ("a part is added", "twice what was made")  # without the sum


def test_float32_and_other_dtypes_are_left() -> None:
    assert not sites(capture(Mixer().eval(), (images().float(),)).graphs[0].graph)


@pytest.mark.parametrize("lies", ["channels last", "tokens last"])
def test_compiled(lies: str) -> None:
    model = nn.Sequential(Mixer(), Mixer()).to(BF16).eval()
    x = images() if lies == "channels last" else images(tokens=64, channels=36).transpose(1, 2)
    compiled = torch.compile(model, backend=tilestream, options={"target": "reference", "token_mixing": True})
    with torch.no_grad():
        exact, eager, got = copy.deepcopy(model).double()(x.double()), model(x), compiled(x)
    assert (got - exact).norm() <= 1.5 * (eager - exact).norm()


def test_any_number_of_images() -> None:
    model = nn.Sequential(Mixer(), Mixer()).to(BF16).eval()
    compiled = torch.compile(
        model, backend=tilestream, options={"target": "reference", "token_mixing": True}, dynamic=True
    )
    with torch.no_grad():
        for count in (2, 5):
            torch.testing.assert_close(compiled(images(count)), model(images(count)), rtol=0.05, atol=0.1)


def test_a_result_that_is_returned_as_it_lies_keeps_its_strides() -> None:
    """Where tokens lie side by side the sum does so too, and who called would see it."""
    model, x = Turned().to(BF16).eval(), images(tokens=64, channels=36).transpose(1, 2)
    graph = graph_of(model, x)
    (site,) = sites(graph.graph)
    assert not graph.graph.find_nodes(op="call_function", target=TOKEN_MIXING) and not place(graph, site)
    compiled = torch.compile(model, backend=tilestream, options={"target": "reference", "token_mixing": True})
    with torch.no_grad():
        assert compiled(x).stride() == model(x).stride()


def test_the_option_leaves_them_alone() -> None:
    model, x = Mixer().to(BF16).eval(), images()
    for asked in (True, False):
        options = Options(device="h200", target="reference", token_mixing=asked)
        graph = analyse(model, (x,), options).graphs[0].found.graph.graph
        assert len(graph.find_nodes(op="call_function", target=TOKEN_MIXING)) == asked
    target = resolve(Options(target="reference"), [x])
    assert target is not None
    assert not replacements.replace_by(
        TOKEN_LAYERS, graph_of(model, x), Options(target="reference", token_mixing=False), target
    )


def test_few_images_stay_with_inductor() -> None:
    """One image is four CTAs: predicted to take longer than a library's products, and nothing is timed here."""
    model = Mixer(196, 512, 256).to(BF16).eval()
    for count, taken in ((1, 0), (32, 1)):
        graph = (
            analyse(model, (images(count, 196, 512),), Options(device="h200", token_mixing=True))
            .graphs[0]
            .found.graph.graph
        )
        assert len(graph.find_nodes(op="call_function", target=TOKEN_MIXING)) == taken


def test_both_ways_are_called_on_values_like_the_operands() -> None:
    target = resolve(Options(target="reference"), [images()])
    assert target is not None
    for model in (Mixer(), Turned(behind=lambda _, y: y.transpose(1, 2))):
        (site,) = sites(graph_of(model, images()).graph)
        trial = run.mixing_trial(kind_of(site), target)
        values = trial.make()
        assert trial.plain is not None
        (right,) = trial.plain(*values)
        (made,) = trial.call(Candidate("ours", None, None, operator="ours"), values)()
        torch.testing.assert_close(made, right)
        (plain,) = trial.call(Candidate(FALLBACK, None, None), values)()
        assert plain.numel() == made.numel() == 2 * 36 * 64


def test_an_exception_costs_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise TilestreamError("no", "yes")

    monkeypatch.setattr(replacements, "choice", fails)
    monkeypatch.delenv("TILESTREAM_STRICT")
    model, x = Mixer().to(BF16).eval(), images()
    compiled = torch.compile(model, backend=tilestream, options={"target": "reference", "token_mixing": True})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=0.05, atol=0.1)
