"""Convolutions of groups of channels, most often of one, of pictures whose channels lie last, with what follows each
pixel: an operator of ours.

A library's kernel for one is far from the memory's rate, and the norm, the activation and the mean over the picture
(squeeze and excite) behind it read and write its result again. ``site_of`` finds them; ``graph.rewrites.pixels`` puts
the operator there, where it was chosen (``run.replacements``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from tilestream.graph.convolutions import FIRST, LAST
from tilestream.graph.nodes import argument, aten, first_alone, packet, value
from tilestream.graph.own import activated, activation_of, operator
from tilestream.graph.sizes import hint
from tilestream.ir.dtypes import DTYPES
from tilestream.kernels.operators.depthwise import ACTIVATIONS, MOST_CHANNELS, MOST_KERNEL, Depthwise
from tilestream.kernels.operators.grouped import can

TAKEN = "tilestream.depthwise"
"""In the meta of convolutions that were chosen: their ``Site`` and ``Tile``, and whether gates behind them are ours."""


def depthwise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    stride: int,
    padding: Sequence[int],
    activation: str,
    tile: Sequence[int],
    pooled: bool,
) -> list[Tensor]:
    """The convolution ``[images, out height, out width, channels]`` of pictures whose channels lie last.

    Sums, scale, shift and activation are fp32 (fp64 of fp64), rounded once.

    Args:
        x: [images, height, width, channels], of bf16 or f16.
        weight: [channels, channels of a group, kernel y, kernel x]; bias: [channels], both of the dtype of ``x``.
        scale, shift: [channels] fp32, of what the sum with its bias is multiplied with and added to; both or neither.
        stride: of both sides. padding: (y, x).
        activation: one of ``ACTIVATIONS``.
        tile: rows and columns of output pixels that a lane of the kernel has, or a CTA where groups are wider.
        pooled: a second result, fp32 [images, tiles of a picture, channels]: sums of the first over each tile, which
            the kernel adds up before it rounds.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    given = (None if t is None else t.to(wide) for t in (weight, bias, scale, shift))
    weight, bias, scale, shift = given  # pyright: ignore
    taken = (bias, [stride, stride], list(padding), [1, 1], False, [0, 0], x.shape[3] // weight.shape[1])
    made = aten.convolution.default(x.permute(FIRST).to(wide), weight, *taken).permute(LAST)
    if scale is not None and shift is not None:
        made = made * scale + shift
    made = activated(activation, made).to(x.dtype).contiguous()
    if not pooled:
        return [made]
    images, height, width, channels = made.shape
    down, across = -(-height // tile[0]), -(-width // tile[1])
    whole = made.new_zeros(images, down * tile[0], across * tile[1], channels, dtype=wide)
    whole[:, :height, :width] = made
    sums = whole.view(images, down, tile[0], across, tile[1], channels).sum((2, 4)).transpose(1, 2)
    return [made, sums.reshape(images, down * across, channels)]


DEPTHWISE = operator(depthwise, depthwise, "depthwise:convolved")


@dataclass(frozen=True)
class Site:
    """A convolution that may be the operator, with what it takes in.

    Attributes:
        conv: what its kernel is compiled for. images: about how many there are.
        norm: a batch norm with running statistics behind it. last: the node whose value the operator makes.
        means: of that over the picture.
    """

    node: fx.Node
    conv: Depthwise
    images: int
    norm: fx.Node | None
    last: fx.Node
    means: tuple[fx.Node, ...]


def site_of(node: fx.Node) -> Site | None:
    """What ``node`` is, if it is a convolution of groups that our kernel computes."""
    if packet(node) is not aten.convolution or _why_not(node):
        return None
    x, weight = (node.args[k].meta["val"] for k in range(2))  # pyright: ignore
    images, channels, height, width = x.shape
    padding = [int(n) for n in _pair(argument(node, 4, "padding"))]
    stride = int(_pair(argument(node, 3, "stride"))[0])
    norm, last = _norm_behind(node)
    activation = "none"
    if (user := _only_user(last)) is not None and (found := activation_of(user)) in ACTIVATIONS:
        activation, last = found, user
    means = tuple(n for n in last.users if _is_mean(n))
    conv = Depthwise(
        height, width, channels, (int(weight.shape[2]), int(weight.shape[3])), stride, (padding[0], padding[1]),
        DTYPES[x.dtype], norm is not None, activation, bool(means), int(weight.shape[1]),
    )  # fmt: skip
    return Site(node, conv, hint(images), norm, last, means)


def _pair(numbers: object) -> tuple[int, int]:
    assert isinstance(numbers, list | tuple)
    return numbers[0], numbers[-1]


def _why_not(node: fx.Node) -> bool:
    """Whether it is another convolution than our kernel's."""
    x, weight, made = value(node.args[0]), value(node.args[1]), value(node)
    if x is None or weight is None or made is None or x.dim() != 4 or argument(node, 6, "transposed", False):
        return True
    known = (*x.shape[1:], *weight.shape)
    if not all(isinstance(n, int) for n in known) or x.dtype not in (torch.bfloat16, torch.float16):
        return True
    channels, kernel = x.shape[1], weight.shape[2:]
    groups: Any = argument(node, 8, "groups", 1)
    if groups == 1 or weight.shape[0] != channels or weight.dtype != x.dtype:
        return True
    stride, padding, dilation = (_pair(argument(node, 3 + k, "")) for k in range(3))
    fits = (
        can(channels // groups, channels, kernel[0] * kernel[1])
        and channels % 2 == 0
        and 2 <= channels <= MOST_CHANNELS
        and max(kernel) <= MOST_KERNEL
    )
    slides = stride in ((1, 1), (2, 2)) and dilation == (1, 1) and padding[0] < kernel[0] and padding[1] < kernel[1]
    last = all(t.is_contiguous(memory_format=torch.channels_last) for t in (x, made))
    return not (fits and slides and last)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _norm_behind(node: fx.Node) -> tuple[fx.Node | None, fx.Node]:
    """The batch norm that alone reads ``node``, and the value of either. Its vectors are given, as ``to_pixels`` folds
    them."""
    norm = _only_user(node)
    if norm is None or packet(norm) is not aten._native_batch_norm_legit_no_training or not first_alone(norm):
        return None, node
    given = all(isinstance(v, fx.Node) and v.op in ("placeholder", "get_attr") for v in norm.args[1:5])
    part = _only_user(norm)
    return (norm, part) if given and part is not None else (None, node)


def _is_mean(node: fx.Node) -> bool:
    """Whether a node is a mean over height and width."""
    dims, fake = argument(node, 1, "dim"), value(node)
    over = isinstance(dims, list | tuple) and sorted(int(d) % 4 for d in dims) == [2, 3]
    return packet(node) is aten.mean and over and fake is not None and argument(node, 3, "dtype") is None
