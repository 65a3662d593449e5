"""The kernels that ``silicon.py`` times: PyTorch's own by size, and tilestream's by model.

The validation sets have other sizes and other models: no constant was fitted on them, but choices were made by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BF16 = torch.bfloat16

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One kernel. ``shape`` is what a model of it needs; ``make`` gives a call on its own tensors, and their bytes."""

    name: str
    kind: str
    shape: dict[str, int | str]
    make: Callable[[], tuple[Call, int]]


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def size(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def call(function: Callable[..., Tensor], *inputs: Tensor, **words: Any) -> tuple[Call, int]:
    out = function(*inputs, **words)
    return lambda: function(*inputs, **words), size(*inputs, out)


LINEARS = (
    (262144, 256, 256),
    (65536, 256, 256),
    (16384, 256, 256),
    (262144, 128, 128),
    (32768, 384, 128),
    (262144, 384, 128),
    (65536, 1536, 512),
    (65536, 512, 512),
    (16384, 512, 512),
    (2048, 512, 256),
    (2048, 479, 1024),
    (2048, 1024, 1024),
    (32768, 1024, 1024),
    (1024, 4096, 4096),
    (1024, 4096, 1024),
    (1024, 4096, 14336),
    (1024, 14336, 4096),
    (8192, 4096, 4096),
    (1, 4096, 4096),
    (1, 4096, 14336),
    (16, 4096, 14336),
    (64, 4096, 4096),
    (128, 1024, 1024),
    (4096, 2048, 2048),
    (10242, 1024, 512),
    (81900, 1536, 512),
)
LINEARS_VALIDATION = (
    (131072, 256, 256),
    (49152, 512, 512),
    (20480, 384, 384),
    (98304, 192, 384),
    (65536, 1024, 512),
    (8192, 768, 3072),
    (8192, 3072, 768),
    (4096, 1024, 4096),
    (2048, 2048, 2048),
    (12288, 640, 640),
    (32, 4096, 11008),
    (256, 2048, 2048),
    (6000, 512, 1536),
    (512, 8192, 1024),
)


def linears(shapes: Sequence[tuple[int, int, int]]) -> Iterator[Case]:
    for m, k, n in shapes:
        shape: dict[str, int | str] = {"m": m, "k": k, "n": n}
        yield Case(
            f"linear {m}x{k}x{n}",
            "linear",
            shape,
            lambda m=m, k=k, n=n: call(F.linear, randn(m, k), randn(n, k), randn(n)),
        )


SQUARES = (256, 512, 1024, 2048, 3072, 4096, 6144, 8192)
GRADIENTS = ((65536, 256, 256), (262144, 128, 128), (2048, 1024, 1024), (16384, 512, 512), (65536, 512, 1536))
BATCHES = ((32, 1024, 128, 1024), (32, 1024, 1024, 128), (2048, 27, 128, 27), (512, 128, 128, 128))
SQUARES_VALIDATION = (384, 768, 1536, 2560, 5120, 7168)
GRADIENTS_VALIDATION = ((131072, 256, 256), (8192, 768, 768), (32768, 512, 512), (10240, 320, 256))
BATCHES_VALIDATION = ((16, 2048, 64, 2048), (64, 512, 128, 512), (128, 256, 256, 256))


def matmuls(
    squares: Sequence[int], gradients: Sequence[tuple[int, int, int]], batches: Sequence[tuple[int, int, int, int]]
) -> Iterator[Case]:
    for s in squares:
        shape: dict[str, int | str] = {"m": s, "k": s, "n": s}
        yield Case(f"matmul {s}", "matmul", shape, lambda s=s: call(torch.mm, randn(s, s), randn(s, s)))
    for k, m, n in gradients:
        shape = {"m": m, "k": k, "n": n}
        yield Case(
            f"weight gradient {m}x{k}x{n}",
            "matmul",
            shape | {"layout": "tn"},
            lambda m=m, k=k, n=n: call(lambda dy, x: dy.t() @ x, randn(k, m), randn(k, n)),
        )
    for b, m, k, n in batches:
        shape = {"b": b, "m": m, "k": k, "n": n}
        yield Case(
            f"bmm {b}x{m}x{k}x{n}",
            "bmm",
            shape,
            lambda b=b, m=m, k=k, n=n: call(torch.bmm, randn(b, m, k), randn(b, k, n)),
        )


def elementwise(sizes: Sequence[int], more: Sequence[int]) -> Iterator[Case]:
    unary: dict[str, Callable[..., Tensor]] = {
        "relu": F.relu,
        "gelu": F.gelu,
        "silu": F.silu,
        "sigmoid": torch.sigmoid,
        "exp": torch.exp,
        "clone": torch.clone,
    }
    binary: dict[str, Callable[..., Tensor]] = {
        "add": torch.add,
        "mul": torch.mul,
        "relu_backward": lambda dy, y: torch.ops.aten.threshold_backward(dy, y, 0),
        "gelu_backward": torch.ops.aten.gelu_backward,
    }
    for name, function, inputs in [(n, f, 1) for n, f in unary.items()] + [(n, f, 2) for n, f in binary.items()]:
        for n in (*(more if name in ("relu", "add") else ()), *sizes):
            yield Case(
                f"{name} {n}",
                "elementwise",
                {"op": name, "elements": n, "inputs": inputs},
                lambda f=function, n=n, i=inputs: call(f, *(randn(n) for _ in range(i))),
            )


def reductions() -> Iterator[Case]:
    for rows, features in ((262144, 128), (65536, 512), (8192, 4096), (1024, 4096), (32768, 1024)):
        shape: dict[str, int | str] = {"rows": rows, "features": features}
        yield Case(
            f"layer_norm {rows}x{features}",
            "reduction",
            shape | {"op": "layer_norm"},
            lambda r=rows, f=features: call(
                lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b), randn(r, f), randn(f), randn(f)
            ),
        )
        yield Case(
            f"softmax {rows}x{features}",
            "reduction",
            shape | {"op": "softmax"},
            lambda r=rows, f=features: call(torch.softmax, randn(r, f), dim=-1),
        )
    for rows, features in ((262144, 256), (65536, 1024), (2048, 1024), (8192, 4096)):
        for dim, name in ((0, "sum_rows"), (1, "sum_features")):
            yield Case(
                f"{name} {rows}x{features}",
                "reduction",
                {"op": name, "rows": rows, "features": features},
                lambda r=rows, f=features, d=dim: call(torch.sum, randn(r, f), dim=d),
            )


def movement() -> Iterator[Case]:
    def gather(nodes: int, edges: int, f: int) -> tuple[Call, int]:
        table, index = randn(nodes, f), torch.randint(nodes, (edges,), device="cuda")
        return lambda: table.index_select(0, index), size(table, index) + edges * f * 2

    def scatter(nodes: int, edges: int, f: int) -> tuple[Call, int]:
        values, index = randn(edges, f), torch.randint(nodes, (edges,), device="cuda")
        out = torch.zeros(nodes, f, device="cuda", dtype=BF16)
        return lambda: out.index_add_(0, index, values), size(values, index, out)

    for nodes, edges, f in ((10242, 81900, 512), (1900, 11000, 128), (40962, 327660, 512)):
        shape: dict[str, int | str] = {"nodes": nodes, "edges": edges, "features": f}
        yield Case(f"gather {edges}x{f}", "gather", shape, lambda n=nodes, e=edges, f=f: gather(n, e, f))
        yield Case(f"scatter {edges}x{f}", "scatter", shape, lambda n=nodes, e=edges, f=f: scatter(n, e, f))
    for rows, a, b in ((262144, 256, 63), (65536, 512, 512), (2048, 128, 351)):
        yield Case(
            f"cat {rows}x{a}+{b}",
            "cat",
            {"rows": rows, "a": a, "b": b},
            lambda r=rows, a=a, b=b: call(lambda x, y: torch.cat([x, y], -1), randn(r, a), randn(r, b)),
        )
    for rows, columns in ((8192, 8192), (1024, 4096)):
        yield Case(
            f"transpose {rows}x{columns}",
            "transpose",
            {"rows": rows, "columns": columns},
            lambda r=rows, c=columns: call(lambda x: x.t().contiguous(), randn(r, c)),
        )
    for heads, tokens, width in ((32, 1024, 128), (32, 4096, 128), (16, 512, 64)):
        yield Case(
            f"sdpa {heads}x{tokens}x{width}",
            "sdpa",
            {"heads": heads, "tokens": tokens, "width": width},
            lambda h=heads, t=tokens, w=width: call(
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
                *(randn(1, h, t, w) for _ in range(3)),
            ),
        )


def empty() -> Iterator[Case]:
    yield Case("one element", "launch", {}, lambda: call(lambda x: x.add_(1), randn(1)))


OURS = (
    ("chain", 262144, "vertical"),
    ("chain", 65536, "vertical"),
    ("chain", 16384, "vertical"),
    ("chain", 262144, "spatial"),
    ("chain", 65536, "spatial"),
    ("nerf", 262144, "vertical"),
    ("nerf", 16384, "vertical"),
    ("nerf", 262144, "spatial"),
    ("meshgraphnets", 262144, "vertical"),
    ("meshgraphnets", 32768, "vertical"),
    ("meshgraphnets", 262144, "spatial"),
    ("autoencoder", 131072, "vertical"),
    ("mixer", 131072, "vertical"),
    ("two_tower", 131072, "vertical"),
    ("gated_ffn", 131072, "vertical"),
    ("dlrm_bottom", 65536, "spatial"),
)
OURS_VALIDATION = (
    ("chain 4x128 relu", 262144, "vertical"),
    ("chain 4x128 relu", 32768, "vertical"),
    ("chain 6x192 silu", 131072, "vertical"),
    ("chain 5x256 relu", 196608, "vertical"),
    ("chain 5x256 relu", 49152, "vertical"),
    ("chain 4x256 gelu", 131072, "vertical"),
    ("chain 6x64 tanh", 262144, "vertical"),
    ("norm 256-512-256", 65536, "vertical"),
    ("norm 192-192-192", 131072, "vertical"),
    ("chain 6x128 relu", 262144, "spatial"),
    ("chain 6x128 relu", 65536, "spatial"),
    ("chain 4x192 silu", 131072, "spatial"),
    ("chain 10x256 relu", 131072, "spatial"),
)
"""Models that nothing else measures; ``model_of`` makes them."""


ACTIVATIONS = {"relu": nn.ReLU, "silu": nn.SiLU, "gelu": nn.GELU, "tanh": nn.Tanh}


def chain(layers: int, width: int, act: type[nn.Module]) -> nn.Module:
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), act())))


def normed(into: int, hidden: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(into, hidden), nn.SiLU(), nn.Linear(hidden, out), nn.LayerNorm(out))


class Residual(nn.Module):
    """``x + body(x)``."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def residual(blocks: int, width: int, hidden: int, act: type[nn.Module]) -> nn.Module:
    return nn.Sequential(
        *(
            Residual(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), act(), nn.Linear(hidden, width)))
            for _ in range(blocks)
        )
    )


def model_of(name: str, rows: int, device: str = "cuda") -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model of ``tilestream.apps``, or one that its name describes, in bf16 on ``device``.

    ``chain 4x128 relu``: layers of one width; ``mlp 416-400-1 relu``: layers of these sizes; ``norm 256-512-256``: two
    layers and a LayerNorm; ``residual 192-384-192 gelu``: four blocks of LayerNorm, two layers and a residual.
    """
    from tilestream.apps import APPS
    from tilestream.apps.zoo import mlp

    if name in APPS:
        return APPS[name].make(rows, device=device)
    kind, sizes, *rest = name.split()
    numbers = list(map(int, sizes.replace("x", "-").split("-")))
    features = numbers[0]
    if kind == "chain":
        layers, features = numbers
        module = chain(layers, features, ACTIVATIONS[rest[0]])
    elif kind == "mlp":
        module = mlp(numbers, ACTIVATIONS[rest[0]])
    elif kind == "residual":
        module = residual(4, features, numbers[1], ACTIVATIONS[rest[0]])
    else:
        module = normed(*numbers)
    inputs = torch.randn(rows, features, device=device, dtype=BF16)
    return module.to(device, BF16).eval().requires_grad_(False), (inputs,)


def cases(validation: bool) -> list[Case]:
    if validation:
        return [
            *linears(LINEARS_VALIDATION),
            *matmuls(SQUARES_VALIDATION, GRADIENTS_VALIDATION, BATCHES_VALIDATION),
            *elementwise((3 * 2**20, 5 * 2**22, 5 * 2**24), (2**18, 3 * 2**21)),
        ]
    return [
        *empty(),
        *linears(LINEARS),
        *matmuls(SQUARES, GRADIENTS, BATCHES),
        *elementwise((2**22, 2**26), (2**16, 2**20, 2**23)),
        *reductions(),
        *movement(),
    ]
