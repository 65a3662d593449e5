"""Squeeze and excite behind a depthwise convolution of ours: what two small layers and a sigmoid make of the means of a
picture's channels, as an operator of ours on the sums of its tiles, which the convolution leaves."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, fx
from torch.nn import functional

from tilestream.graph.nodes import argument, aten, packet, value
from tilestream.graph.own import activated, activation_of, operator
from tilestream.graph.rewrites.insert import call
from tilestream.ir.dtypes import DTYPES
from tilestream.kernels.operators import squeeze as kernels


def squeeze(
    sums: Tensor, share: float, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str, gate: str
) -> Tensor:
    """Gates ``[pictures, channels]``, of the dtype of the weights; all is fp32 (fp64 of fp64) and rounded once.

    Args:
        sums: fp32 [pictures, tiles of a picture, channels].
        share: what their sum is multiplied with for the mean.
        w1: [hidden, channels, 1, 1]; b1: [hidden]. w2: [channels, hidden, 1, 1]; b2: [channels].
        activation: one of ``ACTIVATIONS``, between the layers. gate: one of ``GATES``, behind them.
    """
    first, b1, second, b2 = (None if t is None else t.to(sums.dtype) for t in (w1, b1, w2, b2))
    assert first is not None and second is not None
    hidden = activated(activation, functional.linear(sums.sum(1) * share, first.flatten(1), b1))
    return activated(gate, functional.linear(hidden, second.flatten(1), b2)).to(w1.dtype)


SQUEEZE = operator(squeeze, lambda sums, _share, w1, *_: w1.new_empty(sums.shape[0], sums.shape[2]), "squeeze:gated")


@dataclass(frozen=True)
class Site:
    """What is made of a mean ``[pictures, channels, 1, 1]`` alone, up to the gate.

    Attributes:
        shape: what its kernel is compiled for. inside: the layers and what is between and behind them, in order.
    """

    shape: kernels.Squeeze
    inside: tuple[fx.Node, fx.Node, fx.Node, fx.Node]

    def gate(self, sums: fx.Node, pixels: int) -> fx.Node:
        """The operator on the sums of a picture of so many pixels, where the graph inserts; it is ``inside``'s last."""
        first, _, second, last = self.inside
        layers = (*first.args[1:3], *second.args[1:3])
        made = call(last, SQUEEZE, sums, 1 / pixels, *layers, self.shape.activation, self.shape.gate)
        return call(last, aten.reshape.default, made, [*made.meta["val"].shape, 1, 1])


def site_of(mean: fx.Node) -> Site | None:
    """What follows a mean over pictures, if our kernel computes it."""
    inside: list[fx.Node] = []
    node = mean
    for _ in range(4):
        if len(node.users) != 1:
            return None
        node = next(iter(node.users))
        inside.append(node)
    first, act, second, last = inside
    if not (_is_layer(first, mean) and _is_layer(second, act)):
        return None
    channels, hidden = (first.args[1].meta["val"].shape[k] for k in (1, 0))  # pyright: ignore
    kinds = map(activation_of, (act, last))
    shape = kernels.Squeeze(channels, hidden, DTYPES[mean.meta["val"].dtype], *kinds)
    back = second.args[1].meta["val"].shape[0] == channels  # pyright: ignore
    return Site(shape, (first, act, second, last)) if back and shape.taken else None


def _is_layer(node: fx.Node, x: fx.Node) -> bool:
    """Whether a node is a 1 x 1 convolution of ``x``, pictures of one pixel, whose tensors have one dtype."""
    if packet(node) is not aten.convolution or node.args[0] is not x or argument(node, 8, "groups", 1) != 1:
        return False
    weight, made = value(node.args[1]), value(node)
    given = [value(n) for n in node.args[:3] if n is not None]
    known = weight is not None and made is not None and all(isinstance(n, int) for n in weight.shape)
    if weight is None or made is None or not known or any(t is None or t.dtype != made.dtype for t in given):
        return False
    return tuple(weight.shape[2:]) == tuple(made.shape[2:]) == (1, 1) and not argument(node, 6, "transposed", False)
