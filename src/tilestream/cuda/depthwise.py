"""Convolutions of groups of channels, launched (``kernels/operators/grouped``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilestream.cuda.beside import Address, LaneCall, launch, read_by
from tilestream.ir.dtypes import DTYPES
from tilestream.kernels.operators.depthwise import Depthwise, Tile
from tilestream.kernels.operators.grouped import ctas, kernel


def convolved(x: Tensor, *given: Any) -> list[Tensor]:
    """``graph.depthwise.depthwise`` by its kernel."""
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    return list(launch(call(x, *given, sms=sms), x.device))


def call(
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
    sms: int,
    address: Address = Tensor.data_ptr,
) -> LaneCall:
    """The launch of ``convolved`` on a device of so many SMs."""
    images, height, width, channels = x.shape
    window, by = (weight.shape[2], weight.shape[3]), Tile(tile[0], tile[1])
    behind = (DTYPES[x.dtype], scale is not None, activation, pooled)
    conv = Depthwise(height, width, channels, window, stride, (padding[0], padding[1]), *behind, weight.shape[1])
    made = [x.new_empty(images, *conv.out, channels)]
    made += [x.new_empty(images, by.tiles(conv), channels, dtype=torch.float32)] if pooled else []
    flat = {"x": x.contiguous().view(-1), "weight": weight.permute(0, 2, 3, 1).reshape(-1)}
    held, values = read_by(flat | {"bias": bias, "scale": scale, "shift": shift}, address)
    values |= {"out": address(made[0]), "pooled": address(made[1]) if pooled else 0, "images": images}
    return LaneCall(kernel(conv, by), ctas(conv, by, images, sms), values, made, held)
