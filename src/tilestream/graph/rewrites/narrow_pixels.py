"""Convolutions of few channels, as a network's first: pixels of other than a multiple of 16 bytes.

Nothing copies such pixels. Those that a window's row takes become one pixel, of ``kernel_x channels`` rounded up, and
the convolution one of a window of one column. The copy is as large as the picture times ``kernel_x / stride_x``: for
7 x 7 at stride 2 over three channels four times, where im2col in whole would be 25 times. Inductor makes one kernel of
it, padding included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from tilestream.graph.convolutions import LAST, of_known_channels, reads_padding_alone
from tilestream.graph.nodes import arguments, aten, value
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.settings import APART
from tilestream.ir.taps import Window

WIDEST = 64
"""Elements of a pixel that is made so: one chunk of a kernel's input ring."""
EIGHTS = 8  # elements of 16 bytes
COPIED = "of the pixels that a window's row takes, side by side: a copy in front of a convolution"


@dataclass(frozen=True)
class Narrow:
    """A convolution of few channels, and what slides over its pictures; pairs are (y, x)."""

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    given: Window

    @property
    def channels(self) -> int:
        return int(self.x.meta["val"].shape[1])

    @property
    def made(self) -> int:
        """Channels of the pixels that are made."""
        return -(-self.given.kernel[1] * self.channels // EIGHTS) * EIGHTS

    @property
    def window(self) -> Window:
        """What slides over them."""
        g = self.given
        down = (g.kernel[0], 1), (g.stride[0], 1), (g.padding[0], 0), (g.dilation[0], 1)
        return Window(g.height, g.out[1], *down)


def narrow(node: fx.Node) -> Narrow | None:
    """What ``node`` is, if it is a convolution of few channels whose result has its channels last."""
    known = of_known_channels(node)
    if known is None:
        return None
    pictures, weight, bias = arguments(node)[:3]
    made, window = value(node), known[2]
    if made is None or not made.is_contiguous(memory_format=torch.channels_last):
        return None
    found = Narrow(pictures, weight, bias, window)
    fits = found.channels % EIGHTS != 0 and found.made <= WIDEST and not reads_padding_alone(found.window)
    return found if fits else None


def side_by_side(n: Narrow, like: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The pictures and the weight of the convolution that stands for ``n``.

    Pictures ``[images, height, out width, made]``; the weight ``[out, made, kernel y, 1]``, which lies as kernels read.
    """

    def made(target: object, *args: object, **words: object) -> fx.Node:
        node = call(like, target, *args, **words)
        node.meta[APART] = COPIED
        return node

    span, more = n.given.dilation[1] * (n.given.kernel[1] - 1) + 1, n.made - n.given.kernel[1] * n.channels
    rows = made(aten.permute.default, n.x, LAST)
    height, across = rows.meta["val"].shape[1:3]
    width, side = n.window.width, n.given.padding[1] * n.channels
    if n.given.dilation[1] == 1:  # a window's row is one piece of a picture's
        flat = made(aten.reshape.default, rows, [-1, height, across * n.channels])
        flat = made(aten.constant_pad_nd.default, flat, [side, side])
        taken = made(aten.unfold.default, flat, 2, span * n.channels, n.given.stride[1] * n.channels)
    else:
        rows = made(aten.constant_pad_nd.default, rows, [0, 0, n.given.padding[1], n.given.padding[1]])
        taken = made(aten.unfold.default, rows, 2, span, n.given.stride[1])  # [images, height, width, channels, span]
        taken = made(aten.slice.Tensor, taken, 4, 0, span, n.given.dilation[1])
        taken = made(aten.clone.default, made(aten.permute.default, taken, [0, 1, 2, 4, 3]))
        taken = made(aten.reshape.default, taken, [-1, height, width, n.given.kernel[1] * n.channels])
    kernel = made(aten.permute.default, n.weight, LAST)  # [out, kernel y, kernel x, channels]
    out = int(kernel.meta["val"].shape[0])
    kernel = made(aten.reshape.default, kernel, [out, n.given.kernel[0], 1, n.given.kernel[1] * n.channels])
    if more:
        taken, kernel = (made(aten.constant_pad_nd.default, t, [0, more]) for t in (taken, kernel))
    else:
        taken = made(aten.clone.default, taken, memory_format=torch.contiguous_format)
    return taken, made(aten.permute.default, kernel, [0, 3, 1, 2])
