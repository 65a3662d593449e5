"""Further kernels for ``silicon.py``: GEMMs of odd widths, and kernels that reduce, gather, scatter and concatenate.

``widths``: the layers of NeRF and DLRM whose rows are no multiple of 16 bytes (63, 283, 319, 351, 479 features), their
aligned neighbours, and 282 and 284, whose rows are multiples of 4 and of 8 bytes; forward, dX and dW. ``others``: sizes
of MeshGraphNets, GraphCast, DLRM and Llama, and others; names that end in ``compiled`` are kernels of Inductor's.
``backward``: what training alone runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.lib.silicon_cases import BF16, Call, Case, call, linears, randn, size

aten = torch.ops.aten

WIDTHS = (63, 64, 282, 283, 284, 288, 319, 320, 351, 352, 479, 480)
ROWS = (2048, 10240, 65536)
FIXED = 256
"""Columns of the other side of the weight."""


def widths() -> list[Case]:
    both = [pair for w in WIDTHS for pair in ((w, FIXED), (FIXED, w))]
    return [*linears([(m, k, n) for m in ROWS for k, n in both]), *gradients()]


def gradients() -> Iterator[Case]:
    """Of a layer from ``w`` to 256 features: dX = dY W has ``w`` columns, dW = dY' X has ``w`` columns."""
    for m in ROWS[1:]:
        for w in (63, 64, 283, 284, 288, 319, 320, 479, 480):
            yield Case(
                f"input gradient {m}x{FIXED}x{w}",
                "matmul",
                {"m": m, "k": FIXED, "n": w, "layout": "nn"},
                lambda m=m, w=w: call(torch.mm, randn(m, FIXED), randn(FIXED, w)),
            )
            yield Case(
                f"weight gradient {FIXED}x{m}x{w}",
                "matmul",
                {"m": FIXED, "k": m, "n": w, "layout": "tn"},
                lambda m=m, w=w: call(lambda dy, x: dy.t() @ x, randn(m, FIXED), randn(m, w)),
            )


def others() -> list[Case]:
    return [*norms(), *sums(), *gathers(), *scatters(), *concatenations(), *copies()]


Made = Callable[[], tuple[Call, int]]


def rowwise(op: str, rows: int, features: int, make: Made, kind: str = "reduction") -> Case:
    return Case(f"{op} {rows}x{features}", kind, {"op": op, "rows": rows, "features": features}, make)


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=False)


def norms() -> Iterator[Case]:
    def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), w, b)

    for r, f in ((32768, 256), (131072, 256), (16384, 1024), (81900, 512), (2048, 4096), (15200, 128), (88000, 128)):
        yield rowwise("layer_norm", r, f, lambda r=r, f=f: call(norm, randn(r, f), randn(f), randn(f)))
    for r, f in ((65536, 256), (15200, 128), (88000, 128), (81900, 512), (16384, 1024)):
        yield rowwise("layer_norm_backward", r, f, lambda r=r, f=f: norm_backward(r, f))
    for r, f in ((131072, 256), (16384, 2048), (32768, 1024), (4096, 1024), (65536, 256)):
        yield rowwise("softmax", r, f, lambda r=r, f=f: call(torch.softmax, randn(r, f), dim=-1))
    for r, f in ((131072, 256), (32768, 1024)):
        yield rowwise("softmax_backward", r, f, lambda r=r, f=f: softmax_backward(r, f))
    for r, f in ((131072, 256), (16384, 1024), (2048, 4096), (88000, 128)):
        yield rowwise(
            "layer_norm compiled", r, f, lambda r=r, f=f: call(compiled(norm), randn(r, f), randn(f), randn(f))
        )
    for r, f in ((131072, 256), (32768, 1024)):
        yield rowwise("softmax compiled", r, f, lambda r=r, f=f: call(compiled(lambda x: x.softmax(-1)), randn(r, f)))


def norm_backward(r: int, f: int) -> tuple[Call, int]:
    dy, x, w, b = randn(r, f), randn(r, f), randn(f), randn(f)
    _, mean, inverse = aten.native_layer_norm(x, [f], w, b, 1e-5)
    return (
        lambda: aten.native_layer_norm_backward(dy, x, [f], mean, inverse, w, b, [True] * 3),
        3 * size(x) + size(mean, inverse, w, w, b),
    )


def softmax_backward(r: int, f: int) -> tuple[Call, int]:
    dy, y = randn(r, f), torch.softmax(randn(r, f), -1)
    return lambda: aten._softmax_backward_data(dy, y, -1, BF16), 3 * size(y)


def sums() -> Iterator[Case]:
    def over(dim: int) -> Callable[[Tensor], Tensor]:
        return lambda x: x.sum(dim)

    for r, f in (
        (65536, 256),
        (10240, 512),
        (327680, 512),
        (2048, 4096),
        (15200, 128),
        (10240, 256),
        (2048, 1),
        (65536, 3),
    ):
        yield rowwise("sum_rows", r, f, lambda r=r, f=f: call(over(0), randn(r, f)))
    for r, f in ((16384, 512), (327680, 128), (4096, 4096)):
        yield rowwise("sum_features", r, f, lambda r=r, f=f: call(over(1), randn(r, f)))
    for r, f in ((65536, 256), (327680, 512), (15200, 128)):
        yield rowwise("sum_rows compiled", r, f, lambda r=r, f=f: call(compiled(over(0)), randn(r, f)))
    for r, f in ((16384, 4096),):
        yield rowwise("mean_features f32", r, f, lambda r=r, f=f: call(over(1), randn(r, f, dtype=torch.float32)))


def gathers() -> Iterator[Case]:
    def indexed(nodes: int, edges: int, f: int, how: str) -> tuple[Call, int]:
        table, index = randn(nodes, f), torch.randint(nodes, (edges,), device="cuda")
        offsets = torch.arange(edges, device="cuda")
        function: Callable[[], Any] = {
            "index": lambda: table[index],
            "select": lambda: table.index_select(0, index),
            "embedding": lambda: F.embedding(index, table),
            "bag": lambda: F.embedding_bag(index, table, offsets, mode="sum"),
        }[how]
        return function, min(nodes, edges) * f * 2 + size(index) + edges * f * 2

    for how, nodes, edges, f in (
        ("index", 15200, 88000, 128),
        ("select", 15200, 88000, 128),
        ("select", 40962, 327660, 512),
        ("select", 2000, 65536, 64),
        ("index", 10242, 81900, 512),
        ("index", 40962, 327660, 512),
        ("index", 40962, 327660, 256),
        ("index", 2000, 65536, 64),
        ("index", 100000, 32768, 128),
        ("embedding", 100000, 2048, 128),
        ("embedding", 100000, 32768, 128),
        ("bag", 100000, 2048, 128),
        ("bag", 100000, 32768, 128),
    ):
        shape: dict[str, int | str] = {"nodes": nodes, "edges": edges, "features": f, "op": how}
        yield Case(
            f"gather {how} {edges}x{f} of {nodes}",
            "gather",
            shape,
            lambda n=nodes, e=edges, f=f, h=how: indexed(n, e, f, h),
        )


def scatters() -> Iterator[Case]:
    def added(nodes: int, edges: int, f: int, dtype: torch.dtype) -> tuple[Call, int]:
        values, index = randn(edges, f, dtype=dtype), torch.randint(nodes, (edges,), device="cuda")
        out = torch.zeros(nodes, f, device="cuda", dtype=dtype)
        return lambda: out.index_add_(0, index, values), size(values, index, out)

    for nodes, edges, f in ((15200, 88000, 128), (10242, 81900, 512), (40962, 327660, 256), (2000, 65536, 64)):
        for dtype, name in ((BF16, "bf16"), (torch.float32, "f32")):
            shape: dict[str, int | str] = {"nodes": nodes, "edges": edges, "features": f, "dtype": name}
            yield Case(
                f"scatter {name} {edges}x{f} to {nodes}",
                "scatter",
                shape,
                lambda n=nodes, e=edges, f=f, d=dtype: added(n, e, f, d),
            )
    for nodes, edges, f in ((100000, 2048, 128), (100000, 32768, 128)):
        yield from embedding_backward(nodes, edges, f)


def embedding_backward(nodes: int, edges: int, f: int) -> Iterator[Case]:
    """The dense gradient of a table of ``nodes`` rows of ``f``, of which ``edges`` were looked up."""

    def make() -> tuple[Call, int]:
        dy, index = randn(edges, f), torch.randint(nodes, (edges,), device="cuda")
        return lambda: aten.embedding_dense_backward(dy, index, nodes, -1, False), size(dy, index) + nodes * f * 2

    shape: dict[str, int | str] = {"nodes": nodes, "edges": edges, "features": f, "op": "embedding_backward"}
    yield Case(f"embedding backward {edges}x{f} to {nodes}", "scatter", shape, make)


def concatenations() -> Iterator[Case]:
    shapes: tuple[tuple[int, tuple[int, ...]], ...] = (
        (65536, (128, 128, 128)),
        (15200, (128, 128)),
        (88000, (128, 128, 128)),
        (327660, (512, 512, 512)),
        (65536, (256, 27)),
        (10240, (63, 256)),
        (2048, (128, 351)),
        (32768, (128, 351)),
        (2048, (128,) * 27),
        (40962, (256, 256)),
    )
    for rows, parts in shapes:
        joined = "+".join(map(str, parts)) if len(parts) < 4 else f"{len(parts)}*{max(parts)}"
        yield Case(
            f"cat {rows}x{joined}",
            "cat",
            {"rows": rows, "parts": ",".join(map(str, parts)), "a": sum(parts[:1]), "b": sum(parts[1:])},
            lambda r=rows, p=parts: call(lambda *x: torch.cat(x, -1), *(randn(r, w) for w in p)),
        )


def copies() -> Iterator[Case]:
    """Strided and converting copies, a fused chain of Inductor's, and a product by a column of numbers."""
    for rows, heads, width in ((1024, 32, 128), (4096, 32, 128)):
        yield Case(
            f"copy heads {rows}x{heads}x{width}",
            "copy",
            {"rows": rows, "features": heads * width, "op": "copy"},
            lambda r=rows, h=heads, w=width: call(lambda x: x.transpose(0, 1).contiguous(), randn(r, h, w)),
        )
    for n in (2**22, 2**26):
        yield Case(
            f"to f32 {n}",
            "copy",
            {"elements": n, "op": "to_f32"},
            lambda n=n: call(lambda x: x.float(), randn(n)),
        )
    for rows, f in ((65536, 256), (10240, 256), (1024, 14336)):
        yield Case(
            f"bias relu compiled {rows}x{f}",
            "compiled",
            {"rows": rows, "features": f, "op": "bias_relu"},
            lambda r=rows, f=f: call(compiled(lambda x, b: F.relu(x + b)), randn(r, f), randn(f)),
        )
    yield Case(
        "silu mul compiled 1024x14336",
        "compiled",
        {"rows": 1024, "features": 14336, "op": "silu_mul"},
        lambda: call(compiled(lambda x, y: F.silu(x) * y), randn(1024, 14336), randn(1024, 14336)),
    )


def backward() -> list[Case]:
    """Kernels of training alone: gradients of tables, of what an index read, and of LayerNorm."""
    return [*table_gradients(), *index_gradients(), *norm_gradients()]


def table_gradients() -> Iterator[Case]:
    for nodes, edges, f in (
        (10_000, 512, 128),
        (100_000, 1024, 128),
        (100_000, 3000, 128),
        (10_000, 2048, 256),
        (100_000, 4096, 128),
        (10_000, 16_384, 128),
        (100_000, 65_536, 128),
        (10_000, 65_536, 64),
    ):
        yield from embedding_backward(nodes, edges, f)


def index_gradients() -> Iterator[Case]:
    """Of ``x[:, rows, columns]``, as DLRM's interaction reads the lower half of its products."""

    def make(batch: int, width: int) -> tuple[Call, int]:
        rows, columns = torch.tril_indices(width, width, -1, device="cuda")
        dy = randn(batch, rows.numel())

        def run() -> Tensor:
            return torch.zeros(batch, width, width, device="cuda", dtype=BF16).index_put_(
                (torch.arange(batch, device="cuda")[:, None], rows, columns), dy, accumulate=True
            )

        return run, 2 * size(dy) + batch * width * width * 2

    for batch, width in ((1024, 27), (4096, 27), (16_384, 27), (4096, 16)):
        yield Case(
            f"index gradient {batch}x{width}x{width}",
            "scatter",
            {"nodes": batch, "edges": batch, "features": width * (width - 1) // 2, "op": "index_backward"},
            lambda b=batch, w=width: make(b, w),
        )


def norm_gradients() -> Iterator[Case]:
    for r, f in ((4096, 128), (32768, 128), (16384, 256), (131072, 256), (8192, 512), (32768, 512), (4096, 1024)):
        yield rowwise("layer_norm_backward", r, f, lambda r=r, f=f: norm_backward(r, f))


SETS = {"widths": widths, "others": others, "backward": backward}
