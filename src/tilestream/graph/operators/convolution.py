"""Convolutions of pixels: linears over their taps (implicit im2col)."""

from __future__ import annotations

from torch import fx

from tilestream.graph import convolutions
from tilestream.graph.convolutions import window_of
from tilestream.graph.lowering import Emitter, dtype_of
from tilestream.graph.nodes import Unsupported, value
from tilestream.graph.operators.rules import rule
from tilestream.ir.pipeline import Tile
from tilestream.kernels.parts.taps import why_not_in_bulk


@rule(convolutions.convolution)
def convolution(e: Emitter, node: fx.Node) -> Tile:
    """A linear over the channels of all taps, whose pixels come from memory.

    Raises:
        Unsupported: a size is not known.
    """
    x, weight, bias = node.args[:3]
    picture, kernel = (value(n) for n in (x, weight))
    if picture is None or kernel is None or not isinstance(x, fx.Node):
        raise Unsupported("an operand is not a tensor")
    outs, channels = kernel.shape[:2]
    if not isinstance(outs, int) or not isinstance(channels, int):
        raise Unsupported("the weight's size is dynamic")
    window = window_of(node, picture, kernel, 1)
    taken = window.taps()
    bulk = bool(node.args[6]) and not why_not_in_bulk(taken[0], taken, (window.height, window.width))
    taps = [e.tapped(x, tap, channels) for tap in window.taps(bulk)]
    tile = e.emit("cat", len(taps) * channels, dtype_of(x), tuple(taps)) if len(taps) > 1 else taps[0]
    params = [e.parameter(weight, (("taps",),), (outs, tile.features))]
    if bias is not None:
        params.append(e.parameter(bias, (("vector", outs),), (outs,)))
    return e.emit("linear", outs, dtype_of(node), (tile,), tuple(params))
