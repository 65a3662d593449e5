"""Float32 layers by parts of bf16 on the GPU: errors beside eager's, special values, weights that change."""

from __future__ import annotations

import pytest
import torch
from modules import Fn, linear
from torch import Tensor, nn
from torch.nn import functional

from tilestream.bench.accuracy import Oracle, repeatable
from tilestream.cuda.weight_parts import made
from tilestream.ir.float32 import MOST_FEATURES
from tilestream.run.backend import tilestream
from tilestream.run.call import weight_parts
from tilestream.run.timing import capture

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh")]


def chain(width: int, layers: int = 3) -> Fn:
    def forward(m: Fn, x: Tensor) -> Tensor:
        h = x
        for layer in m.layers:
            h = functional.silu(layer(h))
        return h + x

    module = Fn(forward, *(linear(width, width) for _ in range(layers)))
    for layer in module.layers:
        nn.init.kaiming_normal_(layer.weight)
    return module.cuda()


def compiled(module: nn.Module, **options: object):
    given = {"target": "cuda", "strategy": "vertical", "measure": False, **options}
    return torch.no_grad()(torch.compile(module, backend=tilestream, options=given))


def test_parts_are_those_of_torch() -> None:
    weights = [torch.randn(300, 130), torch.randn(70, 64).t(), torch.randn(5, 9) * 1e38]
    for got, want in zip(made([w.cuda() for w in weights]), weight_parts(weights), strict=True):
        assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("width", [50, 64, 100, MOST_FEATURES])
@pytest.mark.parametrize("kind", ["random", "positive"])
def test_error_is_at_most_twice_eagers(width: int, kind: str) -> None:
    module, x = chain(width, 2), torch.randn(3000, width, device="cuda")
    if kind == "positive":
        x = x.abs()
        for layer in module.layers:
            layer.weight.data.abs_().div_(width**0.5)
    fast = compiled(module)
    judged = Oracle(module, [x]).judge(fast(x))
    assert judged.ok, f"error {judged.error:.2e}, eager's own {judged.eager_error:.2e}"
    assert repeatable(lambda: fast(x))


@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan"), 3.4e38, -3.4e38, 1e-45])
def test_special_values_are_eagers(special: float) -> None:
    module, x = chain(64, 1), torch.randn(200, 64, device="cuda")
    x[3, 5] = special
    with torch.no_grad():
        torch.testing.assert_close(compiled(module)(x), module(x), equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("constant", [False, True])
def test_weights_may_change(constant: bool) -> None:
    """Between calls and between replays; constant ones where torch counts the change, between calls."""
    module, x = chain(64), torch.randn(3000, 64, device="cuda")
    fast = compiled(module, constant_weights=constant)
    graph = capture(lambda: fast(x))
    for _ in range(2):
        with torch.no_grad():
            want = module(x)
            torch.testing.assert_close(fast(x), want, rtol=1e-4, atol=1e-4)
            if not constant:
                graph.graph.replay()
                torch.testing.assert_close(graph.outputs, want, rtol=1e-4, atol=1e-4)
            module.layers[1].weight.mul_(0.5)
