"""What each ATen operator is in tile ops: one rule an operator, and the reason where there is none."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from tilestream.graph import convolutions
from tilestream.graph.lowering import Emitter, Value, dtype_of
from tilestream.graph.nodes import GATHERS, MATMULS, Unsupported, is_slice, keeps_features, packet
from tilestream.graph.operators.backward import (
    elu_backward,
    gelu_backward,
    glu_backward,
    hardsigmoid_backward,
    hardswish_backward,
    hardtanh_backward,
    leaky_relu_backward,
    log_sigmoid_backward,
    log_softmax_backward,
    mish_backward,
    sigmoid_backward,
    silu_backward,
    softmax_backward,
    softplus_backward,
    tanh_backward,
    threshold_backward,
)
from tilestream.graph.operators.convolution import convolution
from tilestream.graph.operators.elementwise import (
    UNARY,
    add,
    addcmul,
    batch_norm,
    binary,
    cast,
    clamp,
    divide,
    elu,
    gelu,
    hard,
    identity,
    leaky_relu,
    mish,
    permute,
    power,
    sign,
    softplus,
    unary,
)
from tilestream.graph.operators.features import (
    cat,
    getitem,
    glu,
    layer_norm,
    log_sigmoid,
    reduction,
    rms_norm,
    select,
    slice_,
    softmax,
    variance,
)
from tilestream.graph.operators.gathers import gather
from tilestream.graph.operators.linear import linear, put_off
from tilestream.graph.operators.reasons import reason
from tilestream.graph.operators.writes import Writes
from tilestream.ir.pipeline import Tile

aten = torch.ops.aten

Rule = Callable[[Emitter, fx.Node], Tile]
"""Appends what a node computes; returns the tile that holds its elements in row-major order."""

Elementwise = Callable[[Writes, fx.Node], Tile]
"""Such a rule that says nothing of dimensions."""


def emit(e: Emitter, node: fx.Node) -> Value:
    """Append the tile ops of ``node``, and record its value.

    A linear of which only slices are used is put off: each slice becomes a linear over its part
    of the weight.

    Raises:
        Unsupported: with the reason.
    """
    rule = RULES.get(packet(node))
    if rule is None:
        raise Unsupported(reason(node))
    e.start(node)
    if node.target is not operator.getitem and packet(node) not in _TUPLES:
        dtype_of(node)
    sliced = packet(node) in MATMULS and only_sliced(node, e.members)
    found = Value.of(put_off(e, node) if sliced else rule(e, node), _shape(node))
    e.values[node] = found
    return found


def _shape(node: fx.Node) -> Sequence[int | torch.SymInt]:
    """The shape of a node, of its first result where it has several."""
    fake = node.meta["val"]
    return (fake[0] if isinstance(fake, list | tuple) else fake).shape


def only_sliced(node: fx.Node, members: frozenset[fx.Node] | None) -> bool:
    """Whether every use of ``node`` (directly, or through views that keep the features) takes a slice of it."""
    return bool(node.users) and all(
        (members is None or user in members) and _slices(user, members) for user in node.users
    )


def _slices(user: fx.Node, members: frozenset[fx.Node] | None) -> bool:
    if packet(user) in (aten.view, aten._unsafe_view):
        return keeps_features(user) and only_sliced(user, members)
    return is_slice(user)


_TUPLES = {
    aten._native_batch_norm_legit_no_training,
    aten.native_layer_norm,
    aten._fused_rms_norm,
    aten.log_sigmoid_forward,
}


def _named(kind: str, rule: Callable[..., Tile]) -> Callable[[Any, fx.Node], Tile]:
    return lambda e, node: rule(e, node, kind)


def _pair(kind: str) -> Elementwise:
    return lambda e, node: binary(e, node, kind, node.args[0], node.args[1])


ELEMENTWISE: dict[object, Elementwise] = {
    **{op: _named(kind, unary) for op, kind in UNARY.items()},
    aten.gelu: gelu,
    aten.softplus: softplus,
    aten.add: add,
    aten.sub: _named("sub", add),
    aten.rsub: lambda e, node: add(e, node, "sub", swapped=True),
    aten.mul: _pair("mul"),
    aten.div: divide,
    aten.maximum: _pair("maximum"),
    aten.minimum: _pair("minimum"),
    aten.pow: power,
    aten.clamp: clamp,
    aten.clamp_min: clamp,
    aten.clamp_max: clamp,
    aten.hardtanh: clamp,
    aten.leaky_relu: leaky_relu,
    aten.hardsigmoid: hard,
    aten.hardswish: hard,
    aten.mish: mish,
    aten.addcmul: addcmul,
    aten.sgn: sign,
    aten.sign: sign,
    aten.elu: elu,
    aten.celu: elu,
    aten.threshold_backward: threshold_backward,
    aten.hardtanh_backward: hardtanh_backward,
    aten.sigmoid_backward: sigmoid_backward,
    aten.tanh_backward: tanh_backward,
    aten.silu_backward: silu_backward,
    aten.gelu_backward: gelu_backward,
    aten.elu_backward: elu_backward,
    aten.leaky_relu_backward: leaky_relu_backward,
    aten.softplus_backward: softplus_backward,
    aten.hardsigmoid_backward: hardsigmoid_backward,
    aten.hardswish_backward: hardswish_backward,
    aten.mish_backward: mish_backward,
    aten.log_sigmoid_backward: log_sigmoid_backward,
}
"""Operators that know nothing of dimensions: lowering to other axes than rows can share them."""

RULES: dict[object, Rule] = {
    **ELEMENTWISE,
    aten._to_copy: cast,
    torch.ops.prims.convert_element_type: cast,
    **dict.fromkeys(
        (
            aten.view,
            aten._unsafe_view,
            aten.reshape,
            aten.unsqueeze,
            aten.squeeze,
            aten.clone,
            aten.contiguous,
            aten.detach,
            aten.alias,
            aten.expand,
        ),
        identity,
    ),
    aten.mm: linear,
    aten.addmm: linear,
    aten.linear: linear,
    aten.bmm: linear,
    **dict.fromkeys((aten.permute, aten.transpose, aten.t), permute),
    aten._native_batch_norm_legit_no_training: batch_norm,
    aten.sum: _named("sum", reduction),
    aten.mean: _named("mean", reduction),
    aten.amax: _named("max", reduction),
    aten.amin: _named("min", reduction),
    aten.var: variance,
    aten._softmax: softmax,
    aten._log_softmax: softmax,
    aten._softmax_backward_data: softmax_backward,
    aten._log_softmax_backward_data: log_softmax_backward,
    aten.glu_backward: glu_backward,
    aten.cat: cat,
    aten.slice: slice_,
    aten.select: select,
    operator.getitem: getitem,
    aten.native_layer_norm: layer_norm,
    aten._fused_rms_norm: rms_norm,
    aten.rms_norm: rms_norm,
    aten.log_sigmoid_forward: log_sigmoid,
    aten.glu: glu,
    **dict.fromkeys(GATHERS, gather),
    convolutions.convolution: convolution,
}
