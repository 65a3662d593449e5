"""Training steps on a GPU: gradients against float64 beside eager's, the same bits twice, captured and replayed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilestream import cuda
from tilestream.apps.edge_block import meshgraphnets
from tilestream.apps.nerf import NeRF
from tilestream.ir.pipeline import Pipeline, Role, Stage, Tile, TileOp
from tilestream.ir.pipeline import Tensor as Named
from tilestream.run import prepare
from tilestream.run.backend import tilestream

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh")]

ROWS = 9001
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "nerf": (lambda: NeRF(depth=6), (63, 27)),
    "edges": (meshgraphnets, (128, 128, 128)),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(33, 200), nn.GELU(), nn.Linear(200, 150), nn.SiLU(), nn.Linear(150, 7)),
        (33,),
    ),
    "derivatives": (
        lambda: nn.Sequential(
            *(nn.Linear(64, 256), nn.Softplus(), nn.Linear(256, 256), nn.Softplus(2.0, 3.0)),
            *(nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 8)),
        ),
        (64,),
    ),
    "norms": (
        lambda: nn.Sequential(
            *(
                nn.Linear(40, 128),
                nn.SiLU(),
                nn.Linear(128, 128),
                nn.LayerNorm(128),
                nn.Linear(128, 64),
                nn.RMSNorm(64),
            ),
            *(nn.Linear(64, 64), nn.Mish(), nn.Linear(64, 32), nn.LogSoftmax(-1), nn.Linear(32, 7)),
        ),
        (40,),
    ),
}


def compiled(module: nn.Module, **options: Any) -> Callable[..., Any]:
    """Without measuring: so that it is our kernels that run."""
    return torch.compile(module, backend=tilestream, options={"target": "cuda", "measure": False, **options})


def step(function: Callable[..., Tensor], module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    module.zero_grad(set_to_none=True)
    made = function(*inputs)
    weights = torch.linspace(-1, 1, made.numel(), device="cuda").view_as(made)  # in fp16 its steps would be none
    (made * weights.to(made.dtype)).sum().backward()
    return [p.grad for p in module.parameters() if p.grad is not None]


def judged(module: nn.Module, got: list[Tensor], inputs: tuple[Tensor, ...]) -> None:
    own = step(module, module, inputs)
    wide = copy.deepcopy(module).double()
    exact = step(wide, wide, tuple(x.double() for x in inputs))
    for mine, eager, want in zip(got, own, exact, strict=True):
        error, allowed = ((g.double() - want).norm() for g in (mine, eager))
        assert error <= 2 * allowed + 1e-3 * want.norm()
        assert mine.shape == eager.shape and mine.dtype == eager.dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_gradients(name: str, dtype: torch.dtype) -> None:
    make, widths = MODELS[name]
    module = make().to("cuda", dtype)
    inputs = tuple(torch.randn(ROWS, n, device="cuda", dtype=dtype) for n in widths)
    fast = compiled(module)
    got = [g.clone() for g in step(fast, module, inputs)]
    assert any(a.name.startswith("gradients") for a in prepare.analyses())
    for _ in range(5):
        again = step(fast, module, inputs)
        names = [n for n, _ in module.named_parameters()]
        changed = {n: int((a != b).sum()) for n, a, b in zip(names, got, again, strict=True) if not torch.equal(a, b)}
        assert not changed, changed
    judged(module, got, inputs)


def test_autocast_and_a_fused_optimizer_in_a_graph() -> None:
    make, widths = MODELS["mlp"]
    module, x = make().cuda(), torch.randn(ROWS, widths[0], device="cuda")
    other = copy.deepcopy(module)
    ends = []
    for net, function in ((module, compiled(module)), (other, other)):
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True, capturable=True)

        def run(net: nn.Module = net, function: Any = function, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16):
                loss = (function(x).float() - 1).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = run()
        for _ in range(50):
            graph.replay()
        ends.append(float(loss))
    assert abs(ends[0] - ends[1]) <= 0.05 * ends[1] + 1e-3, ends


def test_weights_that_lie_transposed() -> None:
    ops = (
        TileOp("load", Tile.of("a", 96, "bf16"), (), ("x",)),
        TileOp("linear", Tile.of("b", 72, "bf16"), ("a",), ("w0",)),
        TileOp("linear", Tile.of("c", 33, "bf16"), ("b",), ("w1",)),
        TileOp("store", None, ("c",), ("y",)),
    )
    named = (
        Named.of("x", Role.INPUT, (96,), "bf16"), Named.of("w0", Role.PARAMETER, (72, 96), "bf16"),
        Named.of("w1", Role.PARAMETER, (33, 72), "bf16"), Named.of("y", Role.OUTPUT, (33,), "bf16"),
    )  # fmt: skip
    kernel = cuda.build(Pipeline("turned", named, (Stage.of("all", ops),)))
    x = torch.randn(1000, 96, device="cuda").bfloat16()
    wide = torch.randn(96, 100, device="cuda").bfloat16()
    weights = {"w0": wide[:, 11:83].t(), "w1": torch.randn(72, 33, device="cuda").bfloat16().t()}
    straight = {name: w.contiguous() for name, w in weights.items()}
    results = []
    for given in (weights, straight):
        y = torch.full((1000, 33), float("nan"), device="cuda", dtype=torch.bfloat16)
        bound = kernel.bind({"x": x, **given}, 1000, ("y",))
        for _ in range(3):
            bound([y])
        results.append(y)
    torch.cuda.synchronize()
    assert torch.equal(*results)


class Neighbours(nn.Module):
    """Attention over 196 pixels, a block, and a depthwise convolution, as Twins has them."""

    def __init__(self, width: int = 256, side: int = 14) -> None:
        super().__init__()
        self.heads, self.side = width // 32, side
        self.query, self.keys = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.block = nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width))
        self.mixed = nn.Conv2d(width, width, 3, 1, 1, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        images, rows, width = x.shape
        q = self.query(x).view(images, rows, self.heads, -1).transpose(1, 2)
        k, v = self.keys(x).view(images, rows, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(images, rows, width)
        picture = self.block(x).transpose(1, 2).view(images, width, self.side, self.side)
        return self.block(self.mixed(picture).flatten(2).transpose(1, 2))


def test_attention_in_front_of_a_convolution() -> None:
    """What its backward graph reads Inductor saves channels last, which cuDNN's attention would not take."""
    module, inputs = Neighbours().cuda().bfloat16(), (torch.randn(4, 196, 256, device="cuda").bfloat16(),)
    judged(module, step(compiled(module), module, inputs), inputs)
