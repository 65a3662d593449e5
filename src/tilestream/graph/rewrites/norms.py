"""Derivatives of norms in a joint graph, written out: row by row they are products, sums and broadcasts.

    x^ = (x - mean(x)) rstd        dx = rstd (g w - mean(g w) - x^ mean(g w x^))        dw = sum of g x^, db = sum of g

Torch has one operator for all of it, which sums over rows too, and reads the statistics that the norm leaves beside its
result. Written out, ``dx`` is part of the row chain that it stands in; the statistics are made again from ``x``, which
is saved anyway, so that the norm has one result and is part of its own chain (Ba et al. 2016; Zhang and Sennrich 2019,
without the means).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from tilestream.graph.lowering import MAX_FEATURES
from tilestream.graph.nodes import argument, arguments, aten, is_view, packet, tensor_of, value
from tilestream.graph.rewrites.each import each
from tilestream.graph.rewrites.insert import call, cast
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.sizes import settled
from tilestream.ir.dtypes import DTYPES

Found = tuple[fx.Node | None, ...]


@dataclass(frozen=True)
class Writer:
    """Writes nodes in front of ``like``, with its origin; arithmetic is in fp32; ``eps`` is the norm's."""

    like: fx.Node
    eps: float

    def make(self, overload: torch._ops.OpOverload, *args: object, **kwargs: object) -> fx.Node:
        return call(self.like, overload, *args, **kwargs)

    def mul(self, a: fx.Node, b: fx.Node) -> fx.Node:
        return self.make(aten.mul.Tensor, a, b)

    def sub(self, a: fx.Node, b: fx.Node) -> fx.Node:
        return self.make(aten.sub.Tensor, a, b)

    def mean(self, x: fx.Node) -> fx.Node:
        """Of each row, a column."""
        return self.make(aten.mean.dim, x, [-1], True, dtype=torch.float32)

    def inverse(self, x: fx.Node) -> fx.Node:
        """One over the root of each row's mean square."""
        return self.make(aten.rsqrt.default, self.make(aten.add.Scalar, self.mean(self.mul(x, x)), self.eps))

    def total(self, x: fx.Node) -> fx.Node:
        """Over all rows, a vector."""
        return self.make(aten.sum.dim_IntList, x, list(range(tensor_of(x).dim() - 1)), False)

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return cast(self.like, x, dtype)


@each(aten.native_layer_norm_backward, aten._fused_rms_norm_backward)
def open_norms(node: fx.Node, _: Settings) -> Found | None:
    """Write out the derivatives of norms over at most ``MAX_FEATURES`` features.

    Wider ones stay whole: no row of theirs is in a region.
    """
    eps = eps_of(node) if _rows(node) and all(u.target is operator.getitem for u in node.users) else None
    return None if eps is None else RULES[packet(node)](Writer(node, eps), node)


def _rows(node: fx.Node) -> bool:
    """Whether a norm's derivative is of rows that a region could hold."""
    gradient, x, shape = node.args[:3]
    fakes = [value(n) for n in (gradient, x)]
    if any(f is None or f.dtype not in DTYPES or f.dim() < 2 for f in fakes) or not isinstance(shape, list | tuple):
        return False
    features = settled(fakes[1].shape[-1])  # pyright: ignore[reportOptionalMemberAccess]
    return isinstance(features, int) and list(shape) == [features] and features <= MAX_FEATURES


def _layer_norm(w: Writer, node: fx.Node) -> Found:
    gradient, x, _, _, _, weight, bias, mask = arguments(node)
    along, scale = gradients(w, gradient, x, weight, mask, centre=True)
    return along, scale, w.cast(w.total(gradient), _dtype(bias, gradient)) if mask[2] else None


def _rms_norm(w: Writer, node: fx.Node) -> Found:
    gradient, x, _, _, weight, mask = arguments(node)
    return gradients(w, gradient, x, weight, mask, centre=False)


def gradients(
    w: Writer, gradient: fx.Node, x: fx.Node, weight: object, mask: Sequence[object], centre: bool
) -> tuple[fx.Node | None, fx.Node | None]:
    """``dx`` and ``dw`` where ``mask`` wants them; with ``centre`` of a norm that subtracts its means."""
    rows = w.sub(x, w.mean(x)) if centre else w.cast(x, torch.float32)
    scale = w.inverse(rows)
    normal = w.mul(rows, scale)
    along = _row_gradient(w, gradient, weight, normal, scale, centre) if mask[0] else None
    return along, w.cast(w.total(w.mul(normal, gradient)), _dtype(weight, gradient)) if mask[1] else None


def _row_gradient(
    w: Writer, gradient: fx.Node, weight: object, normal: fx.Node, scale: fx.Node, centre: bool
) -> fx.Node:
    """``dx``, in the dtype of what came in."""
    scaled = w.cast(gradient, torch.float32)
    if isinstance(weight, fx.Node):
        scaled = w.mul(scaled, weight)
    along = w.mul(normal, w.mean(w.mul(scaled, normal)))
    rest = w.sub(w.sub(scaled, w.mean(scaled)) if centre else scaled, along)
    return w.cast(w.mul(rest, scale), tensor_of(gradient).dtype)


def _dtype(parameter: object, gradient: fx.Node) -> torch.dtype:
    return tensor_of(parameter if isinstance(parameter, fx.Node) else gradient).dtype


def eps_of(node: fx.Node) -> float | None:
    """What the norm adds to the mean square, from the norm itself: its derivative is not told. None without it."""
    statistic = node.args[4 if packet(node) is aten.native_layer_norm_backward else 3]
    while isinstance(statistic, fx.Node) and packet(statistic) not in _EPS:
        statistic = statistic.args[0] if is_view(statistic) or statistic.target is operator.getitem else None
    if not isinstance(statistic, fx.Node):
        return None
    given = argument(statistic, _EPS[packet(statistic)], "eps")
    return float(given) if isinstance(given, int | float) else torch.finfo(torch.float32).eps


_EPS = {aten.native_layer_norm: 4, aten._fused_rms_norm: 3}
RULES = {aten.native_layer_norm_backward: _layer_norm, aten._fused_rms_norm_backward: _rms_norm}
