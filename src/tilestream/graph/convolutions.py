"""Convolutions of tensors whose channels lie last: what they are to a region, and why one is not taken."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from tilestream.graph.nodes import Unsupported, argument, aten, packet, value
from tilestream.ir.dtypes import DTYPES
from tilestream.ir.pipeline import DTYPE_BYTES
from tilestream.ir.taps import Window
from tilestream.ir.tileops import OPS

LAST, FIRST = [0, 2, 3, 1], [0, 3, 1, 2]


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    bulk: bool,
) -> torch.Tensor:
    """``aten.convolution`` of ``x [images, height, width, channels]``, with its result in that order.

    ``bulk`` is for the kernel of a region: how it copies pixels.
    """
    taken = (list(stride), list(padding), list(dilation), False, [0, 0], 1)
    return torch.ops.aten.convolution.default(x.permute(FIRST), weight, bias, *taken).permute(LAST).contiguous()


def is_convolution(node: fx.Node) -> bool:
    """Whether ``node`` is a convolution of pixels."""
    return node.target is convolution


def window_of(node: fx.Node, x: torch.Tensor, weight: torch.Tensor, first: int) -> Window:
    """The window of a convolution of ``x``, whose sizes are ``[..., height, width, ...]`` from dimension ``first`` on.

    Raises:
        Unsupported: a size of the picture is not known.
    """
    sizes = tuple(x.shape[first : first + 2])
    kernel = tuple(weight.shape[2:])
    numbers = [argument(node, 3 + k, word) for k, word in enumerate(("stride", "padding", "dilation"))]
    stride, padding, dilation = map(pair, numbers)
    if not all(isinstance(n, int) for n in (*sizes, *kernel)):
        raise Unsupported("a convolution of pictures whose height or width is dynamic")
    return Window(int(sizes[0]), int(sizes[1]), (int(kernel[0]), int(kernel[1])), stride, padding, dilation)


def pair(found: object) -> tuple[int, int]:
    """A list of one or two numbers as (y, x).

    Raises:
        Unsupported: it is something else.
    """
    if not isinstance(found, list | tuple) or not all(isinstance(n, int) for n in found) or len(found) not in (1, 2):
        raise Unsupported("a convolution over other than two dimensions")
    return int(found[0]), int(found[-1])


def of_pictures(node: fx.Node) -> tuple[torch.Tensor, Window]:
    """What an ``aten.convolution`` reads, and its window, where kernels compute such.

    Raises:
        Unsupported: they do not.
    """
    x, weight = (value(a) for a in node.args[:2])
    if x is None or weight is None or x.dim() != 4:
        raise Unsupported("a convolution over other than two dimensions")
    if argument(node, 6, "transposed", False) or argument(node, 8, "groups", 1) != 1:
        raise Unsupported("a transposed convolution, or one of groups: channels do not share one weight")
    if x.dtype not in DTYPES or x.dtype == torch.float32:
        raise Unsupported(f"a convolution of {str(x.dtype).removeprefix('torch.')}: bfloat16 and float16 stream")
    return x, window_of(node, x, weight, 2)


def of_known_channels(node: fx.Node) -> tuple[torch.Tensor, torch.Tensor, Window] | None:
    """Pictures, weight and window of ``node``, if it is a convolution ``of_pictures`` whose weight has known sizes."""
    if packet(node) is not aten.convolution:
        return None
    try:
        x, window = of_pictures(node)
    except Unsupported:
        return None
    weight = value(node.args[1])
    if weight is None or not all(isinstance(n, int) for n in (x.shape[1], *weight.shape)):
        return None
    return x, weight, window


def why_not(node: fx.Node) -> str:
    """Why an ``aten.convolution`` is not taken as one of pixels; empty if it can be."""
    try:
        x, window = of_pictures(node)
    except Unsupported as reason:
        return reason.reason
    if not x.is_contiguous(memory_format=torch.channels_last):
        return (
            "a convolution whose channels do not lie last: x.to(memory_format=torch.channels_last), and the model too"
        )
    channels = x.shape[1]
    if not isinstance(channels, int) or channels * DTYPE_BYTES[DTYPES[x.dtype]] % 16:
        return f"a convolution of {channels} channels: pixels of other than a multiple of 16 bytes are not copied"
    most = OPS["cat"].ins[1]
    if len(window.taps()) > most:
        return f"a convolution of {len(window.taps())} taps, more than {most}"
    return "a convolution of which a tap reads nothing but padding" if reads_padding_alone(window) else ""


def reads_padding_alone(window: Window) -> bool:
    """Whether some tap of a window does."""
    return any(
        first >= size or first + stride * (count - 1) < 0
        for tap in window.taps()
        for first, stride, count, size in (
            (tap.y, tap.stride_y, tap.height, window.height),
            (tap.x, tap.stride_x, tap.width, window.width),
        )
    )
