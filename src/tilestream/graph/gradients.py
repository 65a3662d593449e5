"""Weight and bias gradients in a backward graph: ``mm(t(dY), X)``, and ``sum(dY, 0)`` beside it.

They sum over the rows that everything else streams, so they are in no row region; ``plan.gradients`` makes stationary
sums of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from tilestream.graph.nodes import aten, behind, is_view, keeps_features, packet, permutation, sums_rows, value
from tilestream.graph.provenance import source
from tilestream.graph.sizes import expression, hint, settled
from tilestream.ir.dtypes import TORCH_DTYPES

_DTYPES = {TORCH_DTYPES[name]: name for name in ("bf16", "f16")}


@dataclass(frozen=True)
class GradientSite:
    """``product = gradient.T @ input``, and ``total = sum of gradient over rows`` if the graph has one.

    Attributes:
        rows: how many, as far as is known when the graph is compiled. dtype: of gradient, input and both results.
        weight_dtype, bias_dtype: what the results need not be rounded further than: fp32 under autocast, which casts
            a gradient to its parameter's dtype.
    """

    product: fx.Node
    total: fx.Node | None
    gradient: fx.Node
    input: fx.Node
    rows: int
    out: int
    k: int
    dtype: str
    weight_dtype: str
    bias_dtype: str
    source: str

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The operators that it stands for."""
        return (self.product,) if self.total is None else (self.product, self.total)

    @property
    def current(self) -> GradientSite:
        """The same site with the operands that its product has by now: another site's product may have been one."""
        gradient, given = transposed(self.product.args[0]), self.product.args[1]
        assert gradient is not None and isinstance(given, fx.Node)
        return replace(self, gradient=gradient, input=given)


def find_gradients(graph: fx.Graph) -> list[GradientSite]:
    """Every weight gradient of 16-bit operands, in the order of the graph; a bias's is found once."""
    found: list[GradientSite] = []
    totals: set[fx.Node] = set()
    for node in graph.nodes:
        site = _site(node, totals) if packet(node) is aten.mm else None
        if site is not None:
            found.append(site)
            totals |= {site.total} if site.total is not None else set()
    return found


def together(
    sites: Sequence[GradientSite], made_by: Callable[[fx.Node], Hashable] = lambda node: node
) -> list[list[GradientSite]]:
    """Sites that may share a launch: their gradients are there at one time, as results of one region are.

    Gradients that come one after another would all have to be kept until the last is there.

    Args:
        made_by: what makes a node; equal for nodes that are made at once.
    """
    groups: dict[Hashable, list[GradientSite]] = {}
    for site in sites:
        rows = expression(site.gradient.meta["val"].shape[0])
        groups.setdefault((made_by(site.gradient), rows, site.dtype), []).append(site)
    return list(groups.values())


def _site(node: fx.Node, taken: set[fx.Node]) -> GradientSite | None:
    gradient, given = transposed(node.args[0]), node.args[1]
    if gradient is None or not isinstance(given, fx.Node):
        return None
    dy, x, made = value(gradient), value(given), value(node)
    if dy is None or x is None or made is None or dy.dtype not in _DTYPES or not dy.dtype == x.dtype == made.dtype:
        return None
    out, k = settled(dy.shape[1]), settled(x.shape[1])
    if not (isinstance(out, int) and isinstance(k, int) and out and k):
        return None
    same = _twins(behind(gradient, _keeps_columns))
    sums = (
        u
        for twin in same
        for n in aliases(twin, _keeps_columns)
        for u in n.users
        if sums_rows(u) and u.meta["val"].dtype == dy.dtype
    )
    total = next((u for u in sums if u not in taken), None)
    dtype = _DTYPES[dy.dtype]
    weight_dtype, bias_dtype = _wanted(node, dtype), dtype if total is None else _wanted(total, dtype)
    rows = hint(dy.shape[0])
    return GradientSite(node, total, gradient, given, rows, out, k, dtype, weight_dtype, bias_dtype, source(node))


def _twins(node: fx.Node) -> list[fx.Node]:
    """A node, and if it is a view all that show the same: every use of a view has one of its own (``copy_views``)."""
    before = node.args[0] if is_view(node) else None
    users = before.users if isinstance(before, fx.Node) else ()
    return [u for u in users if (u.target, u.args, u.kwargs) == (node.target, node.args, node.kwargs)] or [node]


def _wanted(node: fx.Node, dtype: str) -> str:
    """``f32`` where the only use of a value, through views, casts it to that; else its own ``dtype``."""
    while len(node.users) == 1:
        (node,) = node.users
        made = value(node)
        if packet(node) in (aten._to_copy, torch.ops.prims.convert_element_type):
            return "f32" if made is not None and made.dtype == torch.float32 else dtype
        if not is_view(node):
            break
    return dtype


def transposed(node: object) -> fx.Node | None:
    """What a node is the transpose of, where it is that of a matrix."""
    return node.all_input_nodes[0] if isinstance(node, fx.Node) and permutation(node) == [1, 0] else None


def aliases(node: fx.Node, views: Callable[[fx.Node], bool] = is_view) -> list[fx.Node]:
    """A node, what it is a view of, and every other view of that; ``views``: which views count."""
    found = [behind(node, views)]
    for each in found:
        found += [u for u in each.users if views(u)]
    return found


def _keeps_columns(node: fx.Node) -> bool:
    """Whether a node has the rows of what it views, under other leading dimensions."""
    return packet(node) in (aten.view, aten.reshape, aten._unsafe_view) and keeps_features(node)
