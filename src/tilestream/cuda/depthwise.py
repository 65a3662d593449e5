"""Depthwise convolutions, launched (``kernels/operators/depthwise``)."""

from __future__ import annotations

import torch
from torch import Tensor

from tilestream.cuda.beside import Address, LaneCall, launch, readable
from tilestream.ir.dtypes import DTYPES
from tilestream.kernels.operators.depthwise import Depthwise, Tile, ctas, kernel


def convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    stride: int,
    padding: tuple[int, int],
    activation: str,
    pooled: bool,
    tile: Tile,
) -> list[Tensor]:
    """``graph.depthwise.depthwise`` by its kernel."""
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    given = (x, weight, bias, scale, shift, stride, padding, activation, pooled, tile, sms)
    return list(launch(call(*given), x.device))


def call(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    stride: int,
    padding: tuple[int, int],
    activation: str,
    pooled: bool,
    tile: Tile,
    sms: int,
    address: Address = Tensor.data_ptr,
) -> LaneCall:
    """The launch of ``convolved`` on a device of so many SMs."""
    images, height, width, channels = x.shape
    kernel_y, kernel_x = weight.shape[2:]
    conv = Depthwise(
        height, width, channels, (kernel_y, kernel_x), stride, padding, DTYPES[x.dtype], scale is not None, activation,
        pooled,
    )  # fmt: skip
    made = [x.new_empty(images, *conv.out, channels)]
    if pooled:
        made.append(x.new_empty(images, tile.tiles(conv), channels, dtype=torch.float32))
    held = {
        "x": x.contiguous(), "weight": readable(weight.reshape(channels, -1).contiguous().view(-1)), "bias": None if bias is None else bias.contiguous(),
        "scale": None if scale is None else scale.contiguous(), "shift": None if shift is None else shift.contiguous(),
    }  # fmt: skip
    values = {name: 0 if t is None else address(t) for name, t in held.items()}
    values |= {"out": address(made[0]), "pooled": address(made[1]) if pooled else 0, "images": images}
    return LaneCall(kernel(conv, tile), ctas(conv, tile, images, sms), values, made, list(held.values()))
