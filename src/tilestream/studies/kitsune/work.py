"""How much one counted operator computes, the sum of its nodes (``graph.costs``), and how it splits into tiles."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import fx

from tilestream.errors import CaptureError
from tilestream.graph.costs import work as costs
from tilestream.graph.costs.table import GEMMS, Kind, row
from tilestream.graph.costs.work import elements, gemm, operands, query_key
from tilestream.graph.nodes import name, packet
from tilestream.graph.provenance import source
from tilestream.studies.kitsune.grouping import Group

TILE = 128  # rows and columns of a product's tile
TILE_ELEMENTS = TILE * TILE
UNKNOWN = ("conv", "rnn", "lstm", "gru", "linalg", "fft", "scaled_mm", "grouped_mm", "int_mm")
"""Parts of names of operators whose work is neither products of matrices nor a cost for each element."""


@dataclass(frozen=True)
class Work:
    """``gemm`` is (batch, m, n, k); ``reduced`` elements go into one result."""

    flops: float
    simt_ops: float
    sfu_ops: float
    gemm: tuple[int, int, int, int] | None
    reduced: int
    over_rows: bool
    tiles: int


def work(group: Group) -> Work:
    """The work of all nodes of a group; sizes and tiles are of its main node.

    Raises:
        CaptureError: the work of one of the nodes is not known.
    """
    flops = simt = sfu = 0.0
    for node in group.nodes:
        if any(part in name(node) for part in UNKNOWN):
            raise CaptureError(
                f"{name(node)} in {source(node) or 'the model'} is not among the operators whose work is known",
                "write it with linear layers, products of matrices and elementwise operators",
            )
        done = costs.work(node)
        flops, simt, sfu = flops + done.flops, simt + done.lanes, sfu + done.special
    main = group.main
    entry = row(packet(main))
    sizes = gemm(main) if packet(main) in GEMMS else None
    reduced, over_rows = _reduction(main, entry.kind, sizes)
    return Work(flops, simt, sfu, sizes, reduced, over_rows, _tiles(main, entry.kind, sizes, over_rows))


def _reduction(node: fx.Node, kind: Kind, sizes: tuple[int, int, int, int] | None) -> tuple[int, bool]:
    if sizes is not None:
        return sizes[3], False
    inputs = operands(node)
    if kind in (Kind.NORM, Kind.SOFTMAX) and inputs:
        backward = "backward" in str(node.target)
        return int(inputs[0].shape[-1]) if inputs[0].dim() else 1, backward and kind is Kind.NORM
    return costs.reduced(node)


def _tiles(node: fx.Node, kind: Kind, sizes: tuple[int, int, int, int] | None, over_rows: bool) -> int:
    if sizes is not None:
        batch, m, n, _ = sizes
        return max(1, batch * ceil(m / TILE) * ceil(n / TILE))
    if kind is Kind.ATTENTION:
        both = query_key(node)
        assert both is not None, node
        query, _ = both
        return max(1, prod(query.shape[:-2]) * ceil(query.shape[-2] / TILE))
    if kind is Kind.REDUCTION and over_rows:
        return max(1, ceil(elements(node) / TILE))
    return max(1, ceil(elements(node) / TILE_ELEMENTS))


def outputs(node: fx.Node) -> dict[str, torch.Tensor]:
    """The results of a node by name; ``name.0`` and so on where there are several."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return {node.name: value}
    parts = value if isinstance(value, tuple | list) else ()
    return {f"{node.name}.{i}": part for i, part in enumerate(parts) if isinstance(part, torch.Tensor)}
