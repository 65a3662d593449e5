"""The fresh set's kernels, drawn by a seed: sizes that nobody chose, measured once, after the last fit.

``kernels()`` is what ``silicon.py`` times as ``--set fresh``, ``PIPELINES`` what of ours. Sizes are log-uniform between
the bounds of ``Draw``'s calls. The seed and this file were committed before anything was measured; nothing may be
fitted on, or chosen by, what came out (docs/truth.md).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import exp, log
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.lib import silicon_indexed as indexed
from benchmarks.lib.silicon_cases import Call, Case, call, linears, matmuls, randn
from benchmarks.lib.silicon_more import compiled, embedding_backward, norm_backward, rowwise

T = TypeVar("T")
SEED = 240_731
MOST_FLOPS = 6e11
MOST_ELEMENTS = 2**27
FAMILIES = {"linears": 26, "products": 14, "odd": 32, "elementwise": 26, "rows": 26, "by_index": 30, "joined": 12}
"""How many of each are drawn."""
OURS = 24


class Draw:
    """Numbers by a seed, one stream a family: a longer family changes no other."""

    def __init__(self, family: str) -> None:
        self._random = random.Random(f"{SEED} {family}")

    def between(self, low: float, high: float, multiple: int = 1) -> int:
        """Log-uniform, rounded to a multiple."""
        drawn = exp(self._random.uniform(log(low), log(high)))
        return max(multiple, multiple * round(drawn / multiple))

    def odd(self, low: int, high: int) -> int:
        """A width whose rows of 16 bits are no multiple of 16 bytes."""
        while (drawn := self.between(low, high)) % 8 == 0:
            pass
        return drawn

    def one(self, of: Sequence[T]) -> T:
        return self._random.choice(of)


def _product(draw: Draw, width: Callable[[], int]) -> tuple[int, int, int]:
    """(m, k, n) below ``MOST_FLOPS``."""
    while True:
        m, k, n = draw.between(256, 250_000), width(), width()
        if 2.0 * m * k * n < MOST_FLOPS and m * (k + n) < MOST_ELEMENTS:
            return m, k, n


def linear_layers() -> Iterator[Case]:
    draw = Draw("linears")
    drawn = [_product(draw, partial(draw.between, 64, 6000, 8)) for _ in range(FAMILIES["linears"])]
    return linears(drawn)


def products() -> Iterator[Case]:
    """Square products, weight gradients and batches."""
    draw = Draw("products")
    squares = [draw.between(300, 7000, 8) for _ in range(4)]
    gradients = [
        (draw.between(4096, 200_000, 8), draw.between(64, 1600, 8), draw.between(64, 1600, 8)) for _ in range(5)
    ]
    sides = partial(draw.between, 48, 1024, 8)
    batches = [(draw.between(8, 512), sides(), sides(), sides()) for _ in range(5)]
    return matmuls(squares, gradients, batches)


def odd_widths() -> Iterator[Case]:
    """Layers and gradients with one width whose rows are no multiple of 16 bytes."""
    draw = Draw("odd")
    for number in range(FAMILIES["odd"]):
        m, odd, even = draw.between(1024, 100_000), draw.odd(40, 700), draw.between(64, 640, 8)
        if number % 4 == 3:
            yield from matmuls((), [(8 * (m // 8), even, odd)], ())
        else:
            yield from linears([draw.one(((m, odd, even), (m, even, odd)))])


UNARY: dict[str, Callable[..., Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "sin": torch.sin,
    "exp": torch.exp,
    "clone": torch.clone,
}
BINARY: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "sub": torch.sub,
    "relu_backward": lambda dy, y: torch.ops.aten.threshold_backward(dy, y, 0),
    "gelu_backward": torch.ops.aten.gelu_backward,
}


def elementwise() -> Iterator[Case]:
    draw = Draw("elementwise")
    for _ in range(FAMILIES["elementwise"]):
        name, n = draw.one((*UNARY, *BINARY)), draw.between(2**16, 2**26, 8)
        inputs, function = (1, UNARY[name]) if name in UNARY else (2, BINARY[name])
        yield Case(
            f"{name} {n}",
            "elementwise",
            {"op": name, "elements": n, "inputs": inputs},
            lambda f=function, n=n, i=inputs: call(f, *(randn(n) for _ in range(i))),
        )


def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b)


def row_kernels() -> Iterator[Case]:
    """Norms, softmax and sums, eager's and Inductor's."""
    draw = Draw("rows")
    for _ in range(FAMILIES["rows"]):
        kinds = ("layer_norm", "softmax", "sum_rows", "sum_features", "layer_norm_backward")
        op = draw.one((*kinds, "layer_norm compiled", "softmax compiled", "sum_rows compiled"))
        r, f = draw.between(2048, 300_000), draw.between(64, 4096, 8)
        r = min(r, MOST_ELEMENTS // f)
        yield rowwise(op, r, f, partial(_row_kernel, op, r, f))


def _row_kernel(op: str, r: int, f: int) -> tuple[Call, int]:
    torch.compiler.reset()
    if op == "layer_norm_backward":
        return norm_backward(r, f)
    name, *rest = op.split()
    function: Callable[..., Tensor] = {
        "layer_norm": norm,
        "softmax": lambda x: x.softmax(-1),
        "sum_rows": lambda x: x.sum(0),
        "sum_features": lambda x: x.sum(1),
    }[name]
    more = (randn(f), randn(f)) if name == "layer_norm" else ()
    return call(compiled(function) if rest else function, randn(r, f), *more)


def by_index() -> Iterator[Case]:
    """Messages, sums and lookups as Inductor compiles them, and PyTorch's own."""
    draw = Draw("by_index")
    for _ in range(FAMILIES["by_index"]):
        dtype, how = draw.one(("bf16", "f32")), draw.one(("uniform", "uniform", "power"))
        nodes, edges = draw.between(2000, 500_000), draw.between(30_000, 2_000_000)
        features = draw.one((draw.between(8, 400, 4), draw.between(8, 400, 8)))
        edges = min(edges, MOST_ELEMENTS // features)
        sizes = (nodes, edges, features)
        op = draw.one(("message", "message", "scatter_add", "index_put", "gather", "both ends", "lookup", "table"))
        if op == "message":
            yield next(iter(indexed.fused(sizes, dtype, how)))
        elif op in ("scatter_add", "index_put"):
            function = {"scatter_add": indexed.scatter_add, "index_put": indexed.index_put}[op]
            yield from indexed.adding(op, compiled(function), [sizes], dtype)
        elif op == "gather":
            yield indexed.reading(op, lambda x, i: x[i] * 2, sizes, dtype)
        elif op == "both ends":
            yield indexed.reading(op, indexed.both_ends, sizes, dtype)
        elif op == "lookup":
            yield lookup(nodes, min(edges, 400_000), 8 * max(1, features // 8))
        else:
            yield from embedding_backward(nodes, min(edges, 200_000), 8 * max(1, features // 8))


def lookup(nodes: int, edges: int, f: int) -> Case:
    shape: dict[str, int | str] = {"nodes": nodes, "edges": edges, "features": f, "op": "embedding"}

    def make() -> tuple[Call, int]:
        table, index = randn(nodes, f), torch.randint(nodes, (edges,), device="cuda")
        run, _ = call(F.embedding, index, table)
        return run, min(nodes, edges) * f * 2 + 8 * edges + edges * f * 2

    return Case(f"gather embedding {edges}x{f} of {nodes}", "gather", shape, make)


def joined() -> Iterator[Case]:
    """Concatenations and copies to float32."""
    draw = Draw("joined")
    for number in range(FAMILIES["joined"]):
        if number % 4 == 3:
            n = draw.between(2**18, 2**26, 8)
            yield Case(
                f"to f32 {n}", "copy", {"elements": n, "op": "to_f32"}, lambda n=n: call(lambda x: x.float(), randn(n))
            )
            continue
        parts = tuple(draw.between(24, 512, draw.one((1, 8))) for _ in range(draw.one((2, 3))))
        rows = min(draw.between(2048, 250_000), MOST_ELEMENTS // sum(parts))
        yield Case(
            f"cat {rows}x{'+'.join(map(str, parts))}",
            "cat",
            {"rows": rows, "parts": ",".join(map(str, parts)), "a": parts[0], "b": sum(parts[1:])},
            lambda r=rows, p=parts: call(lambda *x: torch.cat(x, -1), *(randn(r, w) for w in p)),
        )


def kernels() -> list[Case]:
    """All, each once."""
    families = (linear_layers, products, odd_widths, elementwise, row_kernels, by_index, joined)
    return list({case.name: case for family in families for case in family()}.values())


def _pipeline(draw: Draw, number: int) -> tuple[str, int, str]:
    """A model's name (``silicon_cases.model_of``), rows and a strategy."""
    act = draw.one(("relu", "silu", "gelu", "tanh"))
    rows = draw.between(8192, 300_000)
    width = draw.between(48, 256, 16)
    if number % 4 == 3:
        return f"chain {draw.between(4, 10)}x{draw.one((128, 192, 256))} {act}", max(rows, 65_536), "spatial"
    kind = draw.one(("chain", "mlp", "norm", "residual"))
    if kind == "chain":
        return f"chain {draw.between(3, 9)}x{width} {act}", rows, "vertical"
    if kind == "mlp":
        sizes = "-".join(str(draw.between(32, 256, 8)) for _ in range(draw.between(3, 6)))
        return f"mlp {sizes} {act}", rows, "vertical"
    if kind == "norm":
        return f"norm {width}-{draw.between(64, 384, 16)}-{width}", rows, "vertical"
    width = draw.between(64, 192, 16)
    return f"residual {width}-{2 * width}-{width} {act}", rows, "vertical"


def pipelines() -> tuple[tuple[str, int, str], ...]:
    """Of ours: models, rows, strategies."""
    draw = Draw("pipelines")
    return tuple(_pipeline(draw, number) for number in range(OURS))
