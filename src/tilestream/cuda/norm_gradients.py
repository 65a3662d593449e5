"""Gradients of norms, launched (``kernels/operators/norm_gradients``)."""

from __future__ import annotations

import torch
from torch import Tensor

from tilestream.cuda.beside import Address, LaneCall, launch, read_by
from tilestream.ir.dtypes import DTYPES
from tilestream.kernels.operators.norm_gradients import NormGradients, kernel


def made(gradient: Tensor, *given: object) -> tuple[Tensor, Tensor]:
    """``graph.rewrites.norm_sums.norm_gradients`` by its kernel."""
    rows, sums = launch(call(gradient, *given), gradient.device)  # pyright: ignore[reportArgumentType]
    return rows, sums


def call(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    centred: bool,
    beside: Tensor | None,
    parts: int,
    address: Address = Tensor.data_ptr,
) -> LaneCall:
    """The launch of ``made``."""
    columns = x.shape[-1]
    norm = NormGradients(columns, DTYPES[x.dtype], centred, weight is not None, beside is not None)
    tensors = {"gradient": gradient, "x": x, "weight": weight, "beside": beside}
    held, values = read_by({n: None if t is None else t.contiguous().view(-1) for n, t in tensors.items()}, address)
    out = x.new_empty(x.shape)
    sums = x.new_empty(parts, norm.sums, columns, dtype=torch.float32)
    values |= {"out": address(out), "sums": address(sums), "rows": x.numel() // columns, "eps": eps}
    return LaneCall(kernel(norm), parts, values, [out, sums], held)
