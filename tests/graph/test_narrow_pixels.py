"""Convolutions of few channels, as a network's first: the pixels of a window's row side by side."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tilestream.graph.capture import capture
from tilestream.graph.convolutions import is_convolution
from tilestream.graph.rewrites.narrow_pixels import narrow
from tilestream.graph.rewrites.pixels import to_pixels
from tilestream.graph.rewrites.table import rewrite
from tilestream.options import Options
from tilestream.plan.analyse import analyse
from tilestream.run.backend import tilestream

pytestmark = pytest.mark.usefixtures("without_inductor")


def stem(*sizes, **words) -> nn.Module:
    """A convolution, a batch norm and a ReLU, channels last."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(*sizes, **words), nn.BatchNorm2d(sizes[1]), nn.ReLU())
    nn.init.normal_(model[1].running_mean, 0.0, 0.1)  # pyright: ignore
    nn.init.uniform_(model[1].running_var, 0.5, 2.0)  # pyright: ignore
    return model.bfloat16().to(memory_format=torch.channels_last).eval()


def picture(channels: int, height: int, width: int, count: int = 2) -> torch.Tensor:
    x = torch.randn((count, channels, height, width), generator=torch.Generator().manual_seed(1))
    return x.bfloat16().contiguous(memory_format=torch.channels_last)


CASES = {
    "resnet": (stem(3, 16, 7, 2, 3, bias=False), picture(3, 18, 16)),
    "same": (stem(3, 16, 3, padding=1), picture(3, 9, 8)),
    "one pixel": (stem(4, 16, 1), picture(4, 5, 6)),
    "dilated": (stem(4, 16, (3, 2), (2, 1), (0, 1), (1, 2), bias=False), picture(4, 12, 10)),
    "contiguous": (stem(3, 16, 3), picture(3, 9, 8).contiguous()),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(2)
def test_through_torch_compile(name: str) -> None:
    """As eager has it, a convolution, its norm and ReLU in one region."""
    model, x = CASES[name]
    torch._dynamo.reset()
    options = {"target": "reference", "convolutions": "bulk", "cache": False}
    with torch.no_grad():
        found = analyse(model, (x,), Options(convolutions="bulk"))
        got, own = torch.compile(model, backend=tilestream, options=options)(x), model(x)
        exact = model.double()(x.double())
        model.bfloat16()
    assert [r.operators[0] for r in found.regions] == ["convolution"] and len(found.regions[0].operators) > 3
    assert any("side by side" in e.reason for e in found.exclusions)
    error, eager = (float((y.double() - exact).norm() / exact.norm()) for y in (got, own))
    assert error <= 2 * eager and got.stride() == own.stride()


def test_the_window_of_a_resnet() -> None:
    """7 x 7 over three channels: pixels of 21 and three zeros, in seven rows."""
    model, x = stem(3, 64, 7, 2, 3, bias=False), picture(3, 224, 224, 1)
    with torch.no_grad():
        (graph,) = capture(model, (x,)).graphs
    (found,) = [made for n in graph.graph.nodes if (made := narrow(n)) is not None]
    assert (found.made, found.window.out, found.window.kernel) == (24, (112, 112), (7, 1))
    rewrite(graph, to_pixels)
    graph.graph.lint()
    (made,) = [n for n in graph.graph.nodes if is_convolution(n)]
    taken, weight = (n.meta["val"] for n in made.args[:2])
    assert taken.shape == (1, 224, 112, 24) and taken.is_contiguous()
    assert weight.shape == (64, 24, 7, 1) and weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dilation", [1, 2])
def test_a_symbolic_batch(dilation: int) -> None:
    model = stem(3, 16, 3, padding=1, dilation=dilation)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=tilestream, dynamic=True, options={"target": "reference", "cache": False})
    with torch.no_grad():
        for count in (2, 3):
            x = picture(3, 9, 8, count)
            torch._dynamo.mark_static(x, 2)
            torch._dynamo.mark_static(x, 3)
            got, want = compiled(x), model(x)
            torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
            assert got.stride() == want.stride()


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (stem(8, 16, 3), picture(8, 8, 8)),  # pixels of 16 bytes are copied as they are
        (stem(12, 16, 7), picture(12, 8, 8)),  # 84 elements are more than a chunk
        (stem(6, 16, 3, groups=2), picture(6, 8, 8)),
        (stem(3, 16, 3).float(), picture(3, 8, 8).float()),
    ],
    ids=["eight channels", "wide", "groups", "fp32"],
)
def test_what_stays_as_it_is(model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        (graph,) = capture(model, (x,)).graphs
    assert not any(narrow(n) is not None for n in graph.graph.nodes)
