"""The fresh set's whole models: architectures that are in no fit, sizes drawn by the seed of ``fresh_cases.py``.

``MODELS`` has a function a model, of a ``Draw`` and a device; each gives a module and its inputs, bf16. Those of
``TRAINED`` are measured as training steps too: they return a loss then, so that nothing of a step lies outside of the
module. ``sage`` is PyTorch Geometric's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.lib import graph_models
from benchmarks.lib.fresh_cases import Draw

BF16 = torch.bfloat16
Made = tuple[nn.Module, tuple[Tensor, ...]]


class Loss(nn.Module):
    """The mean square of all results of a module, in float32."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *inputs: Tensor) -> Tensor:
        made = self.body(*inputs)
        results = made if isinstance(made, tuple) else (made,)
        return sum((y.float().square().mean() for y in results), start=torch.zeros((), device=results[0].device))


def layers(*sizes: int, act: Callable[[], nn.Module] = nn.ReLU, last: bool = False) -> nn.Sequential:
    parts = [p for a, b in zip(sizes, sizes[1:], strict=False) for p in (nn.Linear(a, b), act())]
    return nn.Sequential(*(parts if last else parts[:-1]))


class Residual(nn.Module):
    """``x + body(norm(x))``."""

    def __init__(self, width: int, body: nn.Module) -> None:
        super().__init__()
        self.norm, self.body = nn.LayerNorm(width), body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(self.norm(x))


def residual_mlp(draw: Draw) -> Made:
    width, hidden = draw.between(96, 256, 16), draw.between(128, 512, 16)
    act = draw.one((nn.GELU, nn.SiLU, nn.ReLU))
    blocks = [Residual(width, layers(width, hidden, width, act=act)) for _ in range(draw.between(3, 6))]
    into = draw.between(16, 128, 8)
    module = nn.Sequential(nn.Linear(into, width), *blocks, nn.LayerNorm(width), nn.Linear(width, 8))
    return module, (torch.randn(draw.between(16_384, 200_000), into),)


def tabular(draw: Draw) -> Made:
    width = draw.between(128, 448, 16)
    module = layers(draw.between(64, 400, 8), *[width] * draw.between(3, 6), 16, act=draw.one((nn.Tanh, nn.ELU)))
    return module, (torch.randn(draw.between(16_384, 150_000), module[0].in_features),)  # pyright: ignore


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(30.0 * x)


def siren(draw: Draw) -> Made:
    width = draw.between(96, 256, 16)
    return layers(2, *[width] * draw.between(3, 6), 3, act=Sine), (torch.randn(draw.between(32_768, 250_000), 2),)


class PointNet(nn.Module):
    """A network a point, the greatest over points, a head."""

    def __init__(self, points: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.points, self.head = points, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.points(x).amax(1))


def point_cloud(draw: Draw) -> Made:
    first, wide = draw.between(48, 128, 16), draw.between(192, 512, 16)
    module = PointNet(layers(3, first, first, wide, last=True), layers(wide, 256, 40))
    return module, (torch.randn(draw.between(16, 64), draw.between(1024, 4096, 8), 3),)


class ActorCritic(nn.Module):
    """A trunk with two heads."""

    def __init__(self, seen: int, width: int, actions: int) -> None:
        super().__init__()
        self.trunk = layers(seen, width, width, act=nn.Tanh, last=True)
        self.actor, self.critic = nn.Linear(width, actions), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return self.actor(h).softmax(-1), self.critic(h)


def actor_critic(draw: Draw) -> Made:
    seen = draw.between(32, 400, 8)
    module = ActorCritic(seen, draw.between(96, 384, 16), draw.between(4, 32))
    return module, (torch.randn(draw.between(8192, 100_000), seen),)


class Gated(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def gated_blocks(draw: Draw) -> Made:
    width = draw.between(128, 768, 32)
    blocks = [Residual(width, Gated(width, draw.between(width, 3 * width, 32))) for _ in range(draw.between(2, 4))]
    return nn.Sequential(*blocks), (torch.randn(draw.between(4096, 65_536), width),)


class Recommender(nn.Module):
    """Tables whose rows are concatenated with dense features."""

    def __init__(self, rows: list[int], width: int, dense: int, hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, width) for n in rows)
        self.mlp = layers(width * len(rows) + dense, hidden, hidden // 2, 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        found = [table(ids[:, at]) for at, table in enumerate(self.tables)]
        return self.mlp(torch.cat([dense, *found], -1))


def recommender(draw: Draw) -> Made:
    rows = [draw.between(2000, 200_000) for _ in range(draw.between(3, 6))]
    dense, batch = draw.between(8, 64), draw.between(8192, 65_536)
    module = Recommender(rows, draw.between(16, 128, 8), dense, draw.between(128, 512, 16))
    return module, (torch.randn(batch, dense), torch.randint(min(rows), (batch, len(rows))))


class Mesh(nn.Module):
    """Steps of message passing over edges, summed at their receivers."""

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.edges = nn.ModuleList(layers(2 * width, width, width) for _ in range(steps))
        self.nodes = nn.ModuleList(layers(2 * width, width, width) for _ in range(steps))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        senders, receivers = ends
        for edge, node in zip(self.edges, self.nodes, strict=True):
            message = edge(torch.cat([x[senders], x[receivers]], -1))
            total = torch.zeros_like(x).index_add(0, receivers, message)
            x = x + node(torch.cat([x, total], -1))
        return x


def mesh(draw: Draw) -> Made:
    width, nodes = draw.between(48, 160, 16), draw.between(8000, 60_000)
    module = Mesh(width, draw.between(2, 5))
    return module, (torch.randn(nodes, width), torch.randint(nodes, (2, nodes * draw.between(3, 9))))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (p.view(b, t, self.heads, -1).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c))


def encoder(draw: Draw) -> Made:
    heads = draw.between(3, 8)
    width = 64 * heads
    parts = []
    for _ in range(draw.between(2, 4)):
        parts += [Residual(width, Attention(width, heads))]
        parts += [Residual(width, layers(width, draw.between(2 * width, 4 * width, 64), width, act=nn.GELU))]
    return nn.Sequential(*parts), (torch.randn(draw.between(4, 32), draw.between(128, 512, 8), width),)


def sage(draw: Draw) -> Made:
    """PyTorch Geometric's."""
    nodes = draw.between(20_000, 150_000)
    width, deep = draw.between(32, 160, 8), draw.between(2, 4)
    module, inputs = graph_models.make("sage", width, deep, nodes, nodes * draw.between(3, 12), str(_device()))
    return module, inputs


class Mixing(nn.Module):
    """A network over tokens, then one over features."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.tokens = layers(tokens, 2 * tokens, tokens, act=nn.GELU)
        self.features = Residual(width, layers(width, 4 * width, width, act=nn.GELU))

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x + self.tokens(self.norm(x).transpose(1, 2)).transpose(1, 2))


def mixer(draw: Draw) -> Made:
    tokens, width = draw.between(64, 256, 8), draw.between(192, 512, 32)
    blocks = [Mixing(tokens, width) for _ in range(draw.between(2, 5))]
    return nn.Sequential(*blocks), (torch.randn(draw.between(8, 64), tokens, width),)


MODELS: dict[str, Callable[[Draw], Made]] = {
    made.__name__: made
    for made in (
        *(residual_mlp, tabular, siren, point_cloud, actor_critic, gated_blocks, recommender, mesh, encoder),
        *(mixer, sage),
    )
}
TRAINED = ("residual_mlp", "tabular", "siren", "point_cloud", "gated_blocks", "recommender", "mesh", "encoder")


def _device() -> torch.device:
    return torch.get_default_device()


def make(name: str, training: bool, device: str = "cpu") -> Made:
    """A model and its inputs; with ``training`` it returns a loss, and its parameters take gradients."""
    with torch.random.fork_rng(devices=[]), torch.device(device), graph_models.default(BF16):
        torch.manual_seed(0)
        module, inputs = MODELS[name](Draw(name))
        module = Loss(module) if training else module
        return module.train(training).requires_grad_(training), inputs
