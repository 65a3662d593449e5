"""Norms of rows and of heads."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tilestream.graph.decode.reading import Weighted, cast, dtype_of, either, only, peeled, shape_of
from tilestream.graph.nodes import Unsupported, aten, packet


@dataclass(frozen=True)
class Norm(Weighted):
    """Of ``x``. ``kind``: of ``form.NORMS``."""

    x: fx.Node
    kind: str
    weight: fx.Node
    bias: fx.Node | None
    eps: float


def norm_of(node: Any) -> Norm:
    """The norm that a node is.

    Raises:
        Unsupported: it is none, and what differs.
    """
    made = peeled(node)
    return _layer_norm(made) if packet(made) is operator.getitem else _rms_norm(made)


def _layer_norm(node: fx.Node) -> Norm:
    made = only(node)
    if packet(made) is not aten.native_layer_norm or None in made.args[2:4] or len(made.args[1]) != 1:  # pyright: ignore
        raise Unsupported("no LayerNorm with weight and bias where one is wanted", made)
    x, _, weight, bias, eps = made.args
    return Norm(peeled(x), "layer", _placeholder(weight), _placeholder(bias), eps)  # pyright: ignore[reportArgumentType]


def _rms_norm(node: fx.Node) -> Norm:
    """``w * (x * rsqrt(mean(x ** 2) + eps))``, x in float32, the product in that or not; or by ``1 + w``."""
    x, weight = either(cast(node), lambda n: packet(cast(n)) is aten.mul)
    kind, weight = "rms", cast(weight)
    if packet(weight) is aten.add and weight.args[1:] == (1.0,):
        kind, weight = "rms_plus_one", cast(weight.args[0])
    wide, rstd = either(cast(x), lambda n: packet(peeled(n)) is not aten.rsqrt)
    if packet(rstd) is not aten.rsqrt:
        raise Unsupported("no reciprocal root where a norm is wanted", x)
    sum_ = only(rstd)
    if packet(sum_) is not aten.add or not isinstance(sum_.args[1], float):
        raise Unsupported("no epsilon where a norm is wanted", rstd)
    mean = only(sum_)
    if packet(mean) is not aten.mean or list(mean.args[1]) not in ([-1], [len(shape_of(mean)) - 1]):  # pyright: ignore
        raise Unsupported("no mean over features where a norm is wanted", mean)
    square = only(mean)
    is_square = (packet(square) is aten.pow and square.args[1] == 2) or (
        packet(square) is aten.mul and square.args[0] is square.args[1]
    )
    if not is_square or square.all_input_nodes[0] is not wide or dtype_of(wide) != torch.float32:
        raise Unsupported("no squares in float32 where a norm is wanted", square)
    return Norm(peeled(cast(wide)), kind, _placeholder(weight), None, sum_.args[1])


def _placeholder(node: Any) -> fx.Node:
    if node.op != "placeholder":
        raise Unsupported("the weight of a norm is not an argument of the graph", node)
    return node
