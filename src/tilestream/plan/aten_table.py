"""ATen operators by family, and what one element of each costs on the SIMT pipes.

An operator that is not listed costs one lane operation an element; it is elementwise if PyTorch tags it pointwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

aten = torch.ops.aten


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


@dataclass(frozen=True)
class Row:
    """A family and its cost: fp32 lane operations and special-function operations an element.

    The element is one of the output, or of the largest operand where ``per`` is ``input``; for lookups and their
    gradients, one that is looked up.
    """

    kind: Kind
    label: str
    simt: float = 1.0
    sfu: float = 0.0
    per: str = "output"


VIEWS = {
    *(aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.t, aten.permute, aten.transpose),
    *(aten.expand, aten.detach, aten.alias, aten.slice, aten.select, aten.split, aten.split_with_sizes, aten.unbind),
    *(aten.as_strided, aten.view_as_complex, aten.view_as_real, aten.diagonal, aten.lift_fresh_copy, aten.unfold),
    *(aten.chunk, aten.narrow, aten.flatten, aten.unflatten, aten.squeeze_, aten.real, aten.imag),
}
"""Operators that only look at a tensor in another way."""

CONVERSIONS = {aten._to_copy, aten.clone, aten.contiguous, aten.copy, aten.to}
"""Conversions of dtype and layout: free, since the operator that writes or reads the tensor does them on its way."""

UPDATES = {aten.slice_scatter, aten.select_scatter}
"""Writing into part of a tensor that exists, as a cache is updated: its new part is what was written."""

FILLS = {
    *(aten.full, aten.zeros, aten.ones, aten.new_zeros, aten.new_full, aten.new_ones, aten.zeros_like),
    *(aten.ones_like, aten.full_like, aten.empty, aten.new_empty, aten.empty_like, aten.new_empty_strided),
    *(aten.arange, aten.scalar_tensor),
}

CHECKS = {
    *(aten._assert_scalar, aten._assert_async, aten._assert_tensor_metadata),
    *(aten.sym_constrain_range, aten.sym_constrain_range_for_size),
}

GEMMS = {aten.mm, aten.addmm, aten.linear, aten.bmm, aten.baddbmm}

_E = Kind.ELEMENTWISE

TABLE: dict[Any, Row] = {
    **{op: Row(Kind.LINEAR, "linear") for op in (aten.mm, aten.addmm, aten.linear)},
    **{op: Row(Kind.BMM, "bmm") for op in (aten.bmm, aten.baddbmm)},
    **{
        op: Row(Kind.ATTENTION, "attention", 4, 1)
        for op in (
            aten._scaled_dot_product_flash_attention_for_cpu,
            aten._scaled_dot_product_flash_attention,
            aten._scaled_dot_product_efficient_attention,
            aten._scaled_dot_product_cudnn_attention,
        )
    },
    **{
        op: Row(Kind.ATTENTION, "attention backward", 8, 1)
        for op in (
            aten._scaled_dot_product_flash_attention_for_cpu_backward,
            aten._scaled_dot_product_flash_attention_backward,
            aten._scaled_dot_product_efficient_attention_backward,
            aten._scaled_dot_product_cudnn_attention_backward,
        )
    },
    aten.relu: Row(_E, "relu"),
    aten.threshold_backward: Row(_E, "relu backward", 2),
    aten.sigmoid: Row(_E, "sigmoid", 2, 2),
    aten.sigmoid_backward: Row(_E, "sigmoid backward", 3),
    aten.silu: Row(_E, "silu", 3, 2),
    aten.silu_backward: Row(_E, "silu backward", 7, 2),
    aten.tanh: Row(_E, "tanh", 1, 1),
    aten.tanh_backward: Row(_E, "tanh backward", 3),
    aten.gelu: Row(_E, "gelu", 8, 1),
    aten.gelu_backward: Row(_E, "gelu backward", 16, 2),
    aten.exp: Row(_E, "exp", 1, 1),
    aten.log: Row(_E, "log", 1, 1),
    aten.sin: Row(_E, "sin", 1, 1),
    aten.cos: Row(_E, "cos", 1, 1),
    aten.sqrt: Row(_E, "sqrt", 1, 1),
    aten.rsqrt: Row(_E, "rsqrt", 1, 1),
    aten.div: Row(_E, "div", 1, 1),
    aten.pow: Row(_E, "pow", 1),
    aten.mul: Row(_E, "mul"),
    aten.add: Row(_E, "add"),
    aten.sub: Row(_E, "sub"),
    aten.neg: Row(_E, "neg"),
    aten._conj: Row(_E, "conj"),
    aten.native_dropout: Row(_E, "dropout", 10),
    aten.native_dropout_backward: Row(_E, "dropout backward", 2),
    aten._softmax: Row(Kind.SOFTMAX, "softmax", 4, 1),
    aten._safe_softmax: Row(Kind.SOFTMAX, "softmax", 5, 1),
    aten._log_softmax: Row(Kind.SOFTMAX, "log_softmax", 4, 1),
    aten._softmax_backward_data: Row(Kind.SOFTMAX, "softmax backward", 4),
    aten._log_softmax_backward_data: Row(Kind.SOFTMAX, "log_softmax backward", 4, 1),
    aten.native_layer_norm: Row(Kind.NORM, "layer_norm", 8),
    aten.native_layer_norm_backward: Row(Kind.NORM, "layer_norm backward", 16, 0, "input"),
    aten._fused_rms_norm: Row(Kind.NORM, "rms_norm", 5),
    aten._fused_rms_norm_backward: Row(Kind.NORM, "rms_norm backward", 12, 0, "input"),
    aten.sum: Row(Kind.REDUCTION, "sum", 1, 0, "input"),
    aten.mean: Row(Kind.REDUCTION, "mean", 1, 0, "input"),
    aten.amax: Row(Kind.REDUCTION, "max", 1, 0, "input"),
    aten.amin: Row(Kind.REDUCTION, "min", 1, 0, "input"),
    aten.argmax: Row(Kind.REDUCTION, "argmax", 1, 0, "input"),
    aten.argmin: Row(Kind.REDUCTION, "argmin", 1, 0, "input"),
    aten.cat: Row(Kind.CAT, "cat"),
    aten.stack: Row(Kind.CAT, "stack"),
    aten.embedding: Row(Kind.GATHER, "embedding"),
    aten._embedding_bag: Row(Kind.GATHER, "embedding"),
    aten._embedding_bag_forward_only: Row(Kind.GATHER, "embedding"),
    aten._embedding_bag_backward: Row(Kind.SCATTER, "embedding backward"),
    aten.index: Row(Kind.GATHER, "index"),
    aten.index_select: Row(Kind.GATHER, "gather"),
    aten.gather: Row(Kind.GATHER, "gather"),
    aten.index_put: Row(Kind.SCATTER, "index_put"),
    aten.index_add: Row(Kind.SCATTER, "scatter add", 1, 0, "input"),
    aten.scatter_add: Row(Kind.SCATTER, "scatter add", 1, 0, "input"),
    aten.embedding_dense_backward: Row(Kind.SCATTER, "embedding backward"),
    aten.slice_backward: Row(Kind.COPY, "slice backward"),
    aten.select_backward: Row(Kind.COPY, "select backward"),
    aten.constant_pad_nd: Row(Kind.COPY, "pad"),
}


def row(packet: Any) -> Row:
    """The operator's family and cost; under its own name where the table does not know it."""
    if packet in FILLS:
        return Row(Kind.FILL, "fill")
    if packet in TABLE:
        return TABLE[packet]
    overloads = [getattr(packet, name) for name in packet.overloads()] if hasattr(packet, "overloads") else []
    pointwise = any(torch.Tag.pointwise in overload.tags for overload in overloads)
    name = getattr(packet, "__name__", str(packet)).strip("_")
    return Row(_E if pointwise else Kind.OTHER, name)
