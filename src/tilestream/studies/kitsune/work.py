"""How much one operator computes, and how it splits: FLOPs, lane operations, sizes of products, tiles."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import fx

from tilestream.errors import CaptureError
from tilestream.graph.nodes import argument, name, packet
from tilestream.graph.nodes import value as tensor
from tilestream.graph.provenance import source
from tilestream.plan.spatial.operators import Kind
from tilestream.studies.kitsune.aten_table import row
from tilestream.studies.kitsune.grouping import Group

aten = torch.ops.aten

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
        entry, count = row(packet(node)), _elements(node)
        if entry.kind in (Kind.LINEAR, Kind.BMM):
            sizes = gemm(node)
            flops += 2.0 * prod(sizes)
            simt += count if _has_bias(node) else 0.0
        elif entry.kind is Kind.ATTENTION:
            scores = _scores(node)
            flops += scores * _features(node) * (4.0 if "backward" not in entry.label else 10.0)
            simt, sfu = simt + entry.simt * scores, sfu + entry.sfu * scores
        else:
            most = (
                max([count] + [_size(n) for n in _tensors(node)]) if entry.per == "input" else looked_up(node) or count
            )
            factor = 6.0 if _complex(node) and entry.label == "mul" else entry.simt
            simt, sfu = simt + factor * most, sfu + entry.sfu * most
    main = group.main
    entry = row(packet(main))
    sizes = gemm(main) if entry.kind in (Kind.LINEAR, Kind.BMM) else None
    reduced, over_rows = _reduction(main, entry.kind, sizes)
    return Work(flops, simt, sfu, sizes, reduced, over_rows, _tiles(main, entry.kind, sizes, over_rows))


def gemm(node: fx.Node) -> tuple[int, int, int, int]:
    """(batch, m, n, k) of ``mm``, ``addmm``, ``linear``, ``bmm`` and ``baddbmm``."""
    kind = packet(node)
    first, second = node.args[1:3] if kind in (aten.addmm, aten.baddbmm) else node.args[:2]
    assert isinstance(first, fx.Node) and isinstance(second, fx.Node)
    a, b, out = (tensor(n) for n in (first, second, node))
    assert a is not None and b is not None and out is not None
    if kind in (aten.bmm, aten.baddbmm):
        return int(a.shape[0]), int(a.shape[1]), int(b.shape[2]), int(a.shape[2])
    return 1, prod(a.shape[:-1]), int(out.shape[-1]), int(a.shape[-1])


def looked_up(node: fx.Node) -> float:
    """Elements of a table that a lookup reads, or whose gradient its backward pass makes; 0 for other operators."""
    kind, tensors = packet(node), _tensors(node)
    if kind in (aten._embedding_bag, aten._embedding_bag_forward_only, aten._embedding_bag_backward):
        return _size(tensors[1]) * tensors[0].shape[-1]
    if kind is aten.embedding_dense_backward:
        return _size(tensors[0])
    return _elements(node) if row(kind).kind is Kind.GATHER else 0.0


def _has_bias(node: fx.Node) -> bool:
    return packet(node) in (aten.addmm, aten.baddbmm) or (packet(node) is aten.linear and len(node.args) > 2)


def _reduction(node: fx.Node, kind: Kind, sizes: tuple[int, int, int, int] | None) -> tuple[int, bool]:
    if sizes is not None:
        return sizes[3], False
    inputs = _tensors(node)
    if kind in (Kind.NORM, Kind.SOFTMAX) and inputs:
        backward = "backward" in str(node.target)
        return int(inputs[0].shape[-1]) if inputs[0].dim() else 1, backward and kind is Kind.NORM
    if kind is Kind.REDUCTION and inputs:
        dims = argument(node, 1, "dim", None)
        over = {d % max(1, inputs[0].dim()) for d in dims} if isinstance(dims, list | tuple) and dims else {0}
        return max(1, round(_size(inputs[0]) / max(1.0, _elements(node)))), 0 in over
    return 1, False


def _tiles(node: fx.Node, kind: Kind, sizes: tuple[int, int, int, int] | None, over_rows: bool) -> int:
    if sizes is not None:
        batch, m, n, _ = sizes
        return max(1, batch * ceil(m / TILE) * ceil(n / TILE))
    if kind is Kind.ATTENTION:
        query, _ = _query_key(node)
        return max(1, prod(query.shape[:-2]) * ceil(query.shape[-2] / TILE))
    if kind is Kind.REDUCTION and over_rows:
        return max(1, ceil(_elements(node) / TILE))
    return max(1, ceil(_elements(node) / TILE_ELEMENTS))


def _scores(node: fx.Node) -> float:
    """Elements of the matrix of scores of fused attention; operands are query, key ... or gradient, query, key ..."""
    query, key = _query_key(node)
    return prod(query.shape[:-1]) * float(key.shape[-2])


def _features(node: fx.Node) -> float:
    return float(_query_key(node)[0].shape[-1])


def _query_key(node: fx.Node) -> tuple[torch.Tensor, torch.Tensor]:
    at = 1 if "backward" in str(node.target) else 0
    nodes = [n for n in node.args[at : at + 2] if isinstance(n, fx.Node)]
    query, key = (tensor(n) for n in nodes)
    assert query is not None and key is not None
    return query, key


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [t for n in node.all_input_nodes if (t := tensor(n)) is not None]


def _size(value: torch.Tensor) -> float:
    return float(prod(value.shape))


def _complex(node: fx.Node) -> bool:
    value = tensor(node)
    return value is not None and value.dtype.is_complex


def outputs(node: fx.Node) -> dict[str, torch.Tensor]:
    """The results of a node by name; ``name.0`` and so on where there are several."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return {node.name: value}
    parts = value if isinstance(value, tuple | list) else ()
    return {f"{node.name}.{i}": part for i, part in enumerate(parts) if isinstance(part, torch.Tensor)}


def _elements(node: fx.Node) -> float:
    """Elements of the largest result."""
    return max((_size(v) for v in outputs(node).values()), default=0.0)
