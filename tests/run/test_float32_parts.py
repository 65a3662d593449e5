"""Float32 layers by parts of bf16: as exact as eager's, on every kind of numbers, and only where they are."""

from __future__ import annotations

import shutil
from pathlib import Path

import on_reference
import pytest
import sass
import torch
from modules import Fn, linear
from torch import Tensor, nn
from torch.nn import functional

from tilestream import devices, explain
from tilestream.cuda.cache import compiled as compiled_kernel
from tilestream.cuda.host.build import HostRun, run_on_host
from tilestream.graph.capture import capture
from tilestream.graph.region import Region
from tilestream.graph.selection import partition
from tilestream.ir.float32 import MOST_FEATURES, PAIRS, by_parts
from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.stream.emit import emit
from tilestream.options import Options
from tilestream.plan.planner import plan
from tilestream.run import oracle
from tilestream.run.call import apply
from tilestream.run.prepare import analyses

pytestmark = pytest.mark.usefixtures("without_inductor")

gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def chain(width: int = 128, layers: int = 3) -> Fn:
    def forward(m: Fn, x: Tensor) -> Tensor:
        h = x
        for layer in m.layers:
            h = functional.silu(layer(h))
        return h + x

    return Fn(forward, *(linear(width, width) for _ in range(layers)))


def region_of(module: nn.Module, x: Tensor) -> Region:
    (region,) = partition(capture(module, [x]).graphs[0]).regions
    return region


def vertical(region: Region, replicas: int = 2) -> Pipeline:
    chosen = plan(region.program, 65536, devices.get("h200"), Options(strategy="vertical")).chosen.pipeline
    assert chosen is not None
    (stage,) = chosen.stages
    return chosen.with_stages((stage.with_(replicas=replicas),))


def numbers(kind: str, *shape: int) -> Tensor:
    x = torch.randn(shape)
    return {
        "random": x,
        "positive": x.abs(),
        "cancelling": torch.cat([x[..., : shape[-1] // 2], -x[..., : shape[-1] // 2] * (1 + 1e-3)], -1),
        "scales": x * torch.logspace(-6, 6, shape[-1]),
        "large": x * 1e30,
        "small": x * 1e-20,
    }[kind]


@pytest.mark.parametrize("kind", ["random", "positive", "cancelling", "scales", "large", "small"])
@pytest.mark.parametrize("features", [50, 64, 128, MOST_FEATURES])
@pytest.mark.every(3)
def test_values(kind: str, features: int):
    module = nn.Sequential(linear(features, 24), nn.ReLU())
    on_reference.check(module, numbers(kind, 70, features))
    (made,) = analyses()[-1:]
    assert by_parts(made.program)


@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan"), 3.4e38, -3.4e38, 1e-45])
@pytest.mark.parametrize("where", ["input", "weight"])
@pytest.mark.every(3)
def test_special_values_are_eagers(special: float, where: str):
    module, x = chain(32, 1), torch.randn(9, 32)
    with torch.no_grad():
        (module.layers[0].weight if where == "weight" else x)[3, 5] = special
        got, want = on_reference.compiled(module)(x), module(x)
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5, atol=1e-5)


def test_gradients():
    module, x = chain(48, 2), torch.randn(70, 48, requires_grad=True)

    def gradients(m: nn.Module, run, x: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(run(x).square().mean(), [x, *m.parameters()]))

    got = gradients(module, on_reference.compiled(module), x)
    eager = gradients(module, module, x)
    exact = gradients(module.double(), module, x.double())
    error, own, good = oracle.judge(got, eager, exact)
    assert good, f"error {error:.2e}, eager's {own:.2e}"
    assert sum(by_parts(a.program) for a in analyses()[-4:]) >= 2  # forward and backward


def test_switched_off():
    x = torch.randn(1000, 64)
    with torch.no_grad():
        on, off = (str(explain(chain(64), x, device="h200", float32_parts=given)) for given in (True, False))
    assert "are float32, and multiplied as parts of bf16" in on
    assert "a float32 matmul" in off and "a float32 matmul" not in on and "multiplied as" not in off


def test_products_of_one_tile_share_its_parts():
    module = Fn(lambda m, x: m.layers[0](x) * m.layers[1](x), linear(64, 64), linear(64, 64))
    region = region_of(module, torch.randn(9, 64))
    assert sum(op.kind == "cast" for op in region.program.stages[0].ops) == 3


def on_host(region: Region, given: list[Tensor], folder: Path) -> list[Tensor]:
    """The kernel's own text: its registers' parts, its sums. ``given``: the region's arguments."""
    operands = (*region.inputs, *region.parameters)
    tensors = {o.tensor: apply(given[o.index].detach(), o.steps) for o in operands}
    return list(run_on_host(vertical(region), tensors, HostRun(folder=folder)).values())


@gxx
@pytest.mark.parametrize("width", [128, 50])
def test_kernel_on_the_host(width: int, tmp_path: Path):
    module, x = chain(width, 2), torch.randn(130, width)
    first, second = module.layers
    given = [first.weight, first.bias, x, second.weight, second.bias]  # as the graph has them
    (got,) = on_host(region_of(module, x), given, tmp_path)
    with torch.no_grad():
        eager, exact = module(x), module.double()(x.double())
    assert oracle.error(got, exact) <= 2 * oracle.error(eager, exact)


class Filters(nn.Module):
    """Of SchNet's interactions: layers of one input, two each, by a cutoff."""

    def __init__(self, pairs: int) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(nn.Sequential(linear(50, 32), nn.Softplus(), linear(32, 32)) for _ in range(pairs))

    def forward(self, x: Tensor, cutoff: Tensor) -> list[Tensor]:
        return [pair(x) * cutoff for pair in self.pairs]


@gxx
def test_pairs_of_layers_are_a_loop(tmp_path: Path):
    """The cutoff is read before them, as no product of theirs would wait for it then."""
    module, x, cutoff = Filters(3), torch.randn(130, 50), torch.randn(130, 1)
    (region,) = partition(capture(module, [x, cutoff]).graphs[0]).regions
    source = emit(vertical(region))
    assert "for (int l = 0; l < 3; ++l)" in source.text
    named = {str(n.name): n for n in region.graph.graph.find_nodes(op="placeholder")}
    values = iter(module.parameters())
    of_shape = {(130, 50): x, (130, 1): cutoff}
    given = [of_shape.get(tuple(named[a].meta["val"].shape)) for a in region.arguments]
    given = [next(values) if g is None else g for g in given]
    got = on_host(region, given, tmp_path)
    with torch.no_grad():
        eager, exact = module(x, cutoff), module.double()(x.double(), cutoff.double())
    for mine, plain, true in zip(got, eager, exact, strict=True):
        assert oracle.error(mine, true) <= 2 * oracle.error(plain, true)


@pytest.mark.nvrtc
@pytest.mark.skipif(
    sass.disassembler() is None, reason="cuobjdump is not installed (pip install nvidia-cuda-cuobjdump)"
)
def test_machine_code():
    """Three layers of 128: what is read once is split once, and nothing spills."""
    region = region_of(chain(), torch.randn(9, 128))
    source = emit(vertical(region, 132))
    assert source.text.count("bf16::round") <= len(PAIRS) * 3
    made = compiled_kernel(source)
    assert made.spills == 0 and sass.lint(made.cubin, source) == []
