"""ATen operators by family, with the cost of those that are not tile ops.

An operator that becomes tile ops costs what those issue (``graph.costs.elements``): its entry has no number of its own,
and an elementwise one needs no entry.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch

from tilestream.graph.nodes import aten
from tilestream.graph.operators import ELEMENTWISE


class Kind(StrEnum):
    """Families of operators: what the rules of selection speak of."""

    LINEAR = "linear"  # rows times a weight; in the backward graph dX and dW as well
    BMM = "bmm"  # a batch of products of activations
    ATTENTION = "attention"  # fused attention (SDPA), forward or backward
    ELEMENTWISE = "elementwise"  # activations, residuals, their derivatives
    NORM = "norm"  # layer and RMS norm, forward and backward: a reduction over features inside a row
    SOFTMAX = "softmax"
    REDUCTION = "reduction"  # sums and means: ``reduced`` says over how much, ``over_rows`` over which
    CAT = "cat"  # concatenation and stacking
    GATHER = "gather"  # reads rows by an index: embeddings, node features of edges
    SCATTER = "scatter"  # writes or adds rows by an index
    FILL = "fill"  # makes a constant tensor
    COPY = "copy"  # moves data without computing
    OTHER = "other"  # scans, sorts, losses: what fits no pattern


class Eager(StrEnum):
    """PyTorch's own kernels of one operator, which what they issue bounds, not what they move."""

    LAYER_NORM = "layer_norm"  # a CTA a row, and so are the next two
    SOFTMAX = "softmax"
    SOFTMAX_GRADIENT = "softmax_backward"
    NORM_GRADIENT = "norm_gradient"  # that of the rows, then sums over them
    SUM = "sum"  # over features or over rows
    SCATTER_ADD = "scatter_add"  # an atomic an element
    SCATTER_ELEMENTS = "scatter_elements"  # likewise, an index an element
    SCATTER_REDUCE = "scatter_reduce"  # a compare and swap an element, behind a kernel that writes where it begins
    TABLE_GRADIENT = "table_gradient"  # zeros of the whole table, sorted indices, additions
    INDEX_GRADIENT = "index_gradient"  # of ``x[index]``: sorts, an element at a time
    CAT = "cat"  # a division an element where rows are no multiples of 16 bytes
    LOOKUP = "lookup"


@dataclass(frozen=True)
class Row:
    """A family, a name, and the cost of what is no tile op.

    Attributes:
        tile: the kind of tile op (``ir.tileops``) whose cost it has. Else ``lanes`` and ``special``: instructions an
            element that the fp32 lanes and the special function unit issue.
        eager: the kernels that PyTorch has of its own for it, where these do not stream (``simulator.library.rows``).
        per: an element of the ``output``, or of the largest operand (``input``). For lookups and their gradients it is
            one that is looked up.
    """

    kind: Kind
    label: str
    tile: str = ""
    lanes: float = 1.0
    special: float = 0.0
    per: str = "output"
    eager: Eager | None = None


CONVERSIONS = {aten._to_copy, aten.clone, aten.contiguous, aten.copy, aten.to}
"""Conversions of dtype and layout: free, since the operator that writes or reads the tensor does them on its way."""

UPDATES = {aten.slice_scatter, aten.select_scatter}
"""Writing into part of a tensor that exists, as a cache is updated: its new part is what was written."""

FILLS = {
    *(aten.full, aten.zeros, aten.ones, aten.new_zeros, aten.new_full, aten.new_ones, aten.zeros_like),
    *(aten.ones_like, aten.full_like, aten.empty, aten.new_empty, aten.empty_like, aten.new_empty_strided),
    *(aten.arange, aten.scalar_tensor),
}

_FUSED = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_FORWARD, _BACKWARD = (
    [getattr(aten, f"_scaled_dot_product_{name}{end}") for name in _FUSED] for end in ("", "_backward")
)

_GATHER = Row(Kind.GATHER, "gather", eager=Eager.LOOKUP)
_EMBEDDING = replace(_GATHER, label="embedding")
_TABLE_GRADIENT = Row(Kind.SCATTER, "embedding backward", eager=Eager.TABLE_GRADIENT)
_SCATTER_ADD = Row(Kind.SCATTER, "scatter add", per="input", eager=Eager.SCATTER_ADD)
_SUM = Row(Kind.REDUCTION, "sum", "sum", per="input", eager=Eager.SUM)
_SOFTMAX = Row(Kind.SOFTMAX, "softmax", "softmax", eager=Eager.SOFTMAX)

TABLE: dict[Any, Row] = {
    **dict.fromkeys((aten.mm, aten.addmm, aten.linear), Row(Kind.LINEAR, "linear")),
    **dict.fromkeys((aten.bmm, aten.baddbmm), Row(Kind.BMM, "bmm")),
    **dict.fromkeys(_FORWARD, Row(Kind.ATTENTION, "attention", lanes=4, special=1)),
    **dict.fromkeys(_BACKWARD, Row(Kind.ATTENTION, "attention backward", lanes=8, special=1)),
    aten.threshold_backward: Row(Kind.ELEMENTWISE, "relu backward"),
    aten._conj: Row(Kind.ELEMENTWISE, "conj"),
    aten.native_dropout: Row(Kind.ELEMENTWISE, "dropout", lanes=10),
    aten.native_dropout_backward: Row(Kind.ELEMENTWISE, "dropout backward", lanes=2),
    aten._softmax: _SOFTMAX,
    aten._safe_softmax: replace(_SOFTMAX, tile="", lanes=5, special=1),
    aten._log_softmax: replace(_SOFTMAX, label="log_softmax", eager=None),
    aten._softmax_backward_data: Row(Kind.SOFTMAX, "softmax backward", lanes=4, eager=Eager.SOFTMAX_GRADIENT),
    aten._log_softmax_backward_data: Row(Kind.SOFTMAX, "log_softmax backward", lanes=4, special=1),
    aten.native_layer_norm: Row(Kind.NORM, "layer_norm", "layer_norm", eager=Eager.LAYER_NORM),
    aten.native_layer_norm_backward: Row(
        Kind.NORM, "layer_norm backward", lanes=16, per="input", eager=Eager.NORM_GRADIENT
    ),
    aten._fused_rms_norm: Row(Kind.NORM, "rms_norm", "rms_norm"),
    aten._fused_rms_norm_backward: Row(Kind.NORM, "rms_norm backward", lanes=12, per="input"),
    aten.sum: _SUM,
    aten.mean: replace(_SUM, label="mean", tile="mean"),
    **{
        op: replace(_SUM, label=label, tile="max")
        for op, label in ((aten.amax, "max"), (aten.amin, "min"), (aten.argmax, "argmax"), (aten.argmin, "argmin"))
    },
    aten.cat: Row(Kind.CAT, "cat", eager=Eager.CAT),
    aten.stack: Row(Kind.CAT, "stack", eager=Eager.CAT),
    **dict.fromkeys((aten.embedding, aten._embedding_bag, aten._embedding_bag_forward_only), _EMBEDDING),
    **dict.fromkeys((aten._embedding_bag_backward, aten.embedding_dense_backward), _TABLE_GRADIENT),
    aten.index: replace(_GATHER, label="index"),
    **dict.fromkeys((aten.index_select, aten.gather), _GATHER),
    aten.index_put: Row(Kind.SCATTER, "index_put", eager=Eager.INDEX_GRADIENT),
    aten.index_add: _SCATTER_ADD,
    aten.scatter_add: replace(_SCATTER_ADD, eager=Eager.SCATTER_ELEMENTS),
    aten.scatter_reduce: replace(_SCATTER_ADD, label="scatter reduce", eager=Eager.SCATTER_REDUCE),
    aten.slice_backward: Row(Kind.COPY, "slice backward"),
    aten.select_backward: Row(Kind.COPY, "select backward"),
    aten.constant_pad_nd: Row(Kind.COPY, "pad"),
}

GEMMS = {op for op, entry in TABLE.items() if entry.kind in (Kind.LINEAR, Kind.BMM)}
"""Products of matrices."""


def row(packet: Any) -> Row:
    """The operator's family; under its own name where the table does not have it.

    It is elementwise if it has a rule as such, or PyTorch tags it pointwise.
    """
    if packet in FILLS:
        return Row(Kind.FILL, "fill")
    if packet in TABLE:
        return TABLE[packet]
    overloads = [getattr(packet, name) for name in packet.overloads()] if hasattr(packet, "overloads") else []
    pointwise = packet in ELEMENTWISE or any(torch.Tag.pointwise in overload.tags for overload in overloads)
    name = getattr(packet, "__name__", str(packet)).strip("_").replace("_backward", " backward")
    return Row(Kind.ELEMENTWISE if pointwise else Kind.OTHER, name)
