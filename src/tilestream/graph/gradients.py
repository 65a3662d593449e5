"""Weight and bias gradients in a backward graph: ``mm(t(dY), X)``, and ``sum(dY, 0)`` beside it.

They sum over the rows that everything else streams, so they are in no row region; ``plan.gradients`` makes stationary
sums of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from tilestream.graph.nodes import argument, aten, packet, value
from tilestream.graph.provenance import source
from tilestream.graph.sizes import hint, same_size
from tilestream.ir.dtypes import TORCH_DTYPES

_DTYPES = {TORCH_DTYPES[name]: name for name in ("bf16", "f16")}


@dataclass(frozen=True)
class GradientSite:
    """``product = gradient.T @ input``, and ``total = sum of gradient over rows`` if the graph has one.

    Attributes:
        rows: how many, as far as is known when the graph is compiled. dtype: of gradient, input and both results.
    """

    product: fx.Node
    total: fx.Node | None
    gradient: fx.Node
    input: fx.Node
    rows: int
    out: int
    k: int
    dtype: str
    source: str


def find_gradients(graph: fx.Graph) -> list[GradientSite]:
    """Every weight gradient of 16-bit operands with rows that kernels can address, in the order of the graph."""
    return [site for node in graph.nodes if packet(node) is aten.mm and (site := _site(node)) is not None]


def _site(node: fx.Node) -> GradientSite | None:
    gradient, given = _transposed(node.args[0]), node.args[1]
    if gradient is None or not isinstance(given, fx.Node):
        return None
    dy, x, made = value(gradient), value(given), value(node)
    if dy is None or x is None or made is None or dy.dtype not in _DTYPES or not dy.dtype == x.dtype == made.dtype:
        return None
    out, k = dy.shape[1], x.shape[1]
    if not (isinstance(out, int) and isinstance(k, int) and _by_rows(dy) and _by_rows(x)):
        return None
    total = next((u for u in gradient.users if _sums_rows(u, dy)), None)
    return GradientSite(node, total, gradient, given, hint(dy.shape[0]), out, k, _DTYPES[dy.dtype], source(node))


def _transposed(node: object) -> fx.Node | None:
    """What a node is the transpose of, where it is that of a matrix."""
    if not isinstance(node, fx.Node) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    before = value(node.args[0])
    if before is None or before.dim() != 2:
        return None
    dims = node.args[1:]
    swaps = (packet(node) is aten.transpose and {d % 2 for d in dims if isinstance(d, int)} == {0, 1}) or (
        packet(node) is aten.permute and list(dims[0]) in ([1, 0], [-1, -2], [-1, 0], [1, -2])  # pyright: ignore
    )
    return node.args[0] if packet(node) is aten.t or swaps else None


def _by_rows(t: torch.Tensor) -> bool:
    """Whether rows lie one behind another: not transposed, not expanded."""
    return same_size(t.stride(1), 1) and same_size(t.stride(0), t.shape[1])


def _sums_rows(node: fx.Node, dy: torch.Tensor) -> bool:
    if packet(node) is not aten.sum:
        return False
    made, dims = value(node), argument(node, 1, "dim")
    return made is not None and made.dtype == dy.dtype and isinstance(dims, list | tuple) and list(dims) in ([0], [-2])
