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


def convolved(*given: Any) -> list[Tensor]:
    """``graph.depthwise.depthwise`` by its kernel."""
    device = given[0].device
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return list(launch(call(given, sms), device))


def call(given: Sequence[Any], sms: int, address: Address = Tensor.data_ptr) -> LaneCall:
    """The launch of ``convolved`` of what it is given, on a device of so many SMs."""
    x, weight, bias, scale, shift, stride, padding, activation, tile, pooled = given
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
