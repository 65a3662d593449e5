"""Rows by an index for ``silicon.py``: gathers and sums as Inductor compiles them, and sums that stay PyTorch's.

``message`` is what a layer of PyTorch Geometric becomes: rows of nodes are read by sender, and added to the receivers'
by atomics, in one kernel behind another that writes zeros; ``weighted`` multiplies each by a number of its edge.
``scatter_add``, ``index_put`` (the gradient of ``x[index]``), ``index_add`` and ``embedding_backward`` add rows that
are there. Receivers are uniform, ``sorted``, or drawn with a density that falls as ``1 / sqrt(node)`` (``power``) or
``node ** -0.75`` (``steep``); ``most`` counts the edges of the busiest node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.lib.silicon_cases import Call, Case, call, randn, size
from benchmarks.lib.silicon_more import compiled

aten = torch.ops.aten
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
POWERS = {"uniform": 1, "sorted": 1, "power": 2, "steep": 4}
"""``floor(nodes * u ** power)`` of a uniform ``u``."""

Sizes = tuple[int, int, int]
"""Nodes, edges, features."""
UNIFORM: tuple[Sizes, ...] = (
    (100_000, 1_000_000, 64),
    (100_000, 1_000_000, 128),
    (100_000, 1_000_000, 16),
    (10_000, 200_000, 128),
    (10_000, 200_000, 256),
    (1_000, 200_000, 64),
    (1_000_000, 3_000_000, 32),
    (50_000, 400_000, 100),
    (20_000, 100_000, 8),
    (200_000, 500_000, 256),
    (30_000, 1_000_000, 33),
    (64, 300_000, 64),
)
UNEVEN: tuple[Sizes, ...] = (
    (100_000, 1_000_000, 64),
    (10_000, 200_000, 128),
    (50_000, 400_000, 100),
    (1_000_000, 3_000_000, 32),
)
ADDED: tuple[Sizes, ...] = (
    (100_000, 1_000_000, 64),
    (15_200, 88_000, 128),
    (300_000, 600_000, 96),
    (2_000, 65_536, 512),
)
TABLES: tuple[Sizes, ...] = ((100_000, 32_768, 128), (10_000, 65_536, 64), (300, 65_536, 128), (1_000_000, 131_072, 32))
READ: tuple[Sizes, ...] = (
    (100_000, 1_000_000, 64),
    (1_000_000, 1_000_000, 64),
    (1_000_000, 1_000_000, 16),
    (4_000_000, 2_000_000, 8),
    (10_000, 500_000, 128),
    (500_000, 400_000, 100),
    (200_000, 300_000, 512),
)
OWN: tuple[Sizes, ...] = ((100_000, 1_000_000, 64), (10_000, 200_000, 128), (50_000, 400_000, 100))


def message(x: Tensor, senders: Tensor, receivers: Tensor) -> Tensor:
    return scatter_add(x, x[senders], receivers)


def weighted(x: Tensor, senders: Tensor, receivers: Tensor, weight: Tensor) -> Tensor:
    return scatter_add(x, x[senders] * weight[:, None], receivers)


def scatter_add(like: Tensor, rows: Tensor, receivers: Tensor) -> Tensor:
    return torch.zeros_like(like).scatter_add_(0, receivers[:, None].expand_as(rows), rows)


def index_put(like: Tensor, rows: Tensor, receivers: Tensor) -> Tensor:
    return torch.zeros_like(like).index_put_((receivers,), rows, accumulate=True)


def index_add(like: Tensor, rows: Tensor, receivers: Tensor) -> Tensor:
    return torch.zeros_like(like).index_add_(0, receivers, rows)


def amax(like: Tensor, rows: Tensor, receivers: Tensor) -> Tensor:
    index = receivers[:, None].expand_as(rows)
    return torch.zeros_like(like).scatter_reduce_(0, index, rows, "amax", include_self=False)


def both_ends(x: Tensor, senders: Tensor, receivers: Tensor) -> Tensor:
    return F.relu(x[senders] + x[receivers])


def ends(nodes: int, edges: int, how: str) -> Tensor:
    found = (nodes * torch.rand(edges, device="cuda", dtype=torch.float64) ** POWERS[how]).long().clamp_(max=nodes - 1)
    return found.sort().values if how == "sorted" else found


def case(op: str, sizes: Sizes, dtype: str, how: str, make: Callable[[Tensor], tuple[Call, int]]) -> Case:
    """``make`` is given the receivers."""
    nodes, edges, features = sizes
    shape: dict[str, int | str] = {"op": op, "nodes": nodes, "edges": edges, "features": features, "dtype": dtype}
    shape["receivers"] = how

    def made() -> tuple[Call, int]:
        torch.compiler.reset()  # one function has more sizes than Dynamo compiles
        receivers = ends(nodes, edges, how)
        shape["most"] = int(receivers.bincount().max())
        return make(receivers)

    return Case(f"{op} {dtype} {edges}x{features} to {nodes} {how}", "indexed", shape, made)


def fused(sizes: Sizes, dtype: str, how: str) -> Iterator[Case]:
    """A layer's messages; the first case of all also with a weight."""
    nodes, edges, features = sizes

    def make(receivers: Tensor, function: Callable[..., Tensor] = message) -> tuple[Call, int]:
        x, senders = randn(nodes, features, dtype=DTYPES[dtype]), ends(nodes, edges, "uniform")
        more = (randn(edges, dtype=x.dtype),) if function is weighted else ()
        return call(compiled(function), x, senders, receivers, *more)

    yield case("message", sizes, dtype, how, make)
    if sizes in (UNEVEN[0], UNEVEN[2]) and how == "uniform":
        yield case("weighted", sizes, dtype, how, lambda to: make(to, weighted))


def adding(op: str, function: Callable[..., Tensor], all_sizes: Sequence[Sizes], dtype: str) -> Iterator[Case]:
    for nodes, edges, features in all_sizes:

        def make(receivers: Tensor, n: int = nodes, e: int = edges, f: int = features) -> tuple[Call, int]:
            like, rows = randn(n, f, dtype=DTYPES[dtype]), randn(e, f, dtype=DTYPES[dtype])
            run, moved = call(function, like, rows, receivers)
            return run, moved - size(like)

        yield case(op, (nodes, edges, features), dtype, "uniform", make)


def tables(sizes: Sizes, how: str) -> Case:
    nodes, edges, features = sizes

    def gradient(dy: Tensor, index: Tensor) -> Tensor:
        return aten.embedding_dense_backward(dy, index, nodes, -1, False)

    return case(
        "embedding_backward",
        sizes,
        "bf16",
        how,
        lambda to: call(compiled(gradient), randn(edges, features), to),
    )


def reading(op: str, function: Callable[..., Tensor], sizes: Sizes, dtype: str) -> Case:
    nodes, edges, features = sizes

    def make(receivers: Tensor) -> tuple[Call, int]:
        x = randn(nodes, features, dtype=DTYPES[dtype])
        others = (ends(nodes, edges, "uniform"),) if function is both_ends else ()
        return call(compiled(function), x, receivers, *others)

    return case(op, sizes, dtype, "uniform", make)


def indexed() -> list[Case]:
    made: list[Case] = []
    for dtype in ("bf16", "f32"):
        for sizes in UNIFORM:
            made += fused(sizes, dtype, "uniform")
        for how in ("sorted", "power", "steep"):
            for sizes in UNEVEN:
                made += fused(sizes, dtype, how)
        made += adding("scatter_add", compiled(scatter_add), ADDED, dtype)
        made += adding("index_put", compiled(index_put), ADDED, dtype)
        made += adding("scatter_add eager", scatter_add, OWN, dtype)
        made += adding("amax eager", amax, OWN, dtype)
        made += [reading("gather", lambda x, i: x[i] * 2, sizes, dtype) for sizes in READ]
        made += [reading("both ends", both_ends, sizes, dtype) for sizes in READ[::3]]
    made += adding("index_add", compiled(index_add), ADDED, "f32")
    made += fused(UNEVEN[0], "f16", "uniform")
    made += fused(UNEVEN[1], "f16", "uniform")
    made += [tables(sizes, how) for sizes in TABLES for how in ("uniform", "power")]
    return made
