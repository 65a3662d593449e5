"""Convolutions whose windows touch and do not overlap, as a network's patch embedding: a layer over patches as rows.

A patch is a row of a copy that is as large as the picture, which Inductor makes in one kernel; the layer's result has
its channels last, so that what flattens pixels to tokens behind it is a view. ``sites`` finds such convolutions,
``place`` rewrites those that were chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from tilestream.graph.convolutions import FIRST, LAST, of_known_channels
from tilestream.graph.lying import elsewhere
from tilestream.graph.nodes import aten, value
from tilestream.graph.rewrites.insert import call
from tilestream.graph.settled import settle
from tilestream.graph.sizes import hint
from tilestream.ir.dtypes import DTYPES


@dataclass(frozen=True)
class Patches:
    """Pictures of so many channels, and the layer.

    Args:
        grid: patches of a picture; kernel: pixels of a patch; both (y, x).
        last: whether channels lie last, in pictures and in the weight.
    """

    channels: int
    grid: tuple[int, int]
    kernel: tuple[int, int]
    out: int
    dtype: str
    biased: bool
    last: tuple[bool, bool]

    @property
    def features(self) -> int:
        """Of a row."""
        return self.channels * self.kernel[0] * self.kernel[1]

    def rows(self, x: Tensor) -> Tensor:
        """The patches ``[images, y, x, features]`` of pictures, copied; as ``matrix`` has the features."""
        (down, across), (ky, kx) = self.grid, self.kernel
        cut = x.reshape(-1, self.channels, down, ky, across, kx)
        return cut.permute(self.order).reshape(-1, down, across, self.features)

    def matrix(self, weight: Tensor) -> Tensor:
        """The weight ``[out, features]``."""
        return (weight.permute(LAST) if self.last[1] else weight).reshape(self.out, self.features)

    @property
    def kernel_shape(self) -> list[int]:
        """Of the weight in memory, as which ``matrix`` is seen."""
        sizes = [self.channels, *self.kernel]
        return [self.out, *(sizes[1:] + sizes[:1] if self.last[1] else sizes)]

    @property
    def order(self) -> list[int]:
        """Of the dimensions of what ``rows`` cuts."""
        return [0, 2, 4, 3, 5, 1] if self.last[1] else [0, 2, 4, 1, 3, 5]


@dataclass(frozen=True)
class Site:
    """``node`` is the convolution, of about so many images."""

    node: fx.Node
    patches: Patches
    images: int


def sites(graph: fx.Graph) -> list[Site]:
    return [site for node in graph.nodes if (site := site_of(node)) is not None]


def site_of(node: fx.Node) -> Site | None:
    """What ``node`` is, if it is a convolution of patches."""
    found = of_known_channels(node)
    if found is None:
        return None
    x, weight, window = found
    given = [value(n) for n in node.args[:3] if n is not None]
    if any(t is None or t.dtype != x.dtype for t in given):
        return None
    touch = window.stride == window.kernel and window.padding == (0, 0) and window.dilation == (1, 1)
    if not touch or window.kernel == (1, 1) or window.height % window.kernel[0] or window.width % window.kernel[1]:
        return None
    last = tuple(t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous() for t in (x, weight))
    biased, shape = node.args[2] is not None, (x.shape[1], window.out, window.kernel)
    return Site(node, Patches(*shape, weight.shape[0], DTYPES[x.dtype], biased, last), hint(x.shape[0]))  # pyright: ignore


def place(owner: fx.GraphModule, site: Site) -> bool:
    """Rewrite a site; whether it was. Where readers want channels first, as views of all tokens of a channel do, the
    result is copied so; one that is returned as channels last stays a convolution."""

    def layer(rows: fx.Node) -> fx.Node:
        return call(site.node, aten.linear.default, rows, matrix_of(site), site.node.args[2])

    placed = put_in_place(owner.graph, site, layer) is not None
    if placed:
        settle(owner)
    return placed


def matrix_of(site: Site) -> fx.Node:
    """The weight as ``Patches.matrix`` has it."""
    node, patches, weight = site.node, site.patches, site.node.args[1]
    lying = call(node, aten.permute.default, weight, LAST) if patches.last[1] else weight
    return call(node, aten.reshape.default, lying, [patches.out, patches.features])


def put_in_place(graph: fx.Graph, site: Site, layer: Callable[[fx.Node], fx.Node]) -> fx.Node | None:
    """Put a layer in the place of a convolution; its rows, None where it stays.

    Args:
        layer: makes of rows [images, y, x, features] the layer's, of ``out`` features.
    """
    node, patches = site.node, site.patches
    fake = node.meta["val"]
    changed = elsewhere(graph, node, fake.contiguous(memory_format=torch.channels_last))
    if changed is None and not fake.is_contiguous():
        return None
    (down, across), (ky, kx) = patches.grid, patches.kernel
    with graph.inserting_before(node):
        cut = call(node, aten.reshape.default, node.args[0], [-1, patches.channels, down, ky, across, kx])
        turned = call(node, aten.permute.default, cut, patches.order)
        copied = call(node, aten.clone.default, turned, memory_format=torch.contiguous_format)
        rows = call(node, aten.view.default, copied, [-1, down, across, patches.features])
        shown = call(node, aten.permute.default, layer(rows), FIRST)
        if changed is None:
            shown = call(node, aten.clone.default, shown, memory_format=torch.contiguous_format)
    node.replace_all_uses_with(shown)
    for reader, val in (changed or {}).items():
        reader.meta["val"] = val
    return rows
