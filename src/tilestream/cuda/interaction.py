"""Lookups and products of pairs of their rows, launched (``kernels/operators/interaction``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilestream.cuda.beside import Address, LaneCall, explained, launch, readable
from tilestream.ir.dtypes import DTYPES
from tilestream.kernels.operators.interaction import BACKWARD, FORWARD, Kernel, lane_kernel
from tilestream.kernels.operators.lanes import LaneKernel


def forward(
    sources: Sequence[Tensor], indices: Sequence[Tensor | None], first: Tensor, second: Tensor, head: int
) -> Tensor:
    """[batch, ``Kernel.width``]: vector ``head``, then of each pair the product of its vectors, then zeros.

    Args:
        sources: of each vector a table [rows, features], or, without an index, a row for each sample [batch, features].
        indices: int64 or int32 [batch].
        first, second: vectors of the pairs, int64 or int32 [pairs] alike.

    Raises:
        InputError: an index of an earlier call named no row; the context is lost.
    """
    kernel = Kernel(FORWARD, len(sources), sources[0].shape[1], len(first), head, DTYPES[sources[0].dtype])
    return _run(kernel, sources, indices, first, second)


def backward(
    sources: Sequence[Tensor], indices: Sequence[Tensor | None], first: Tensor, second: Tensor, given: Tensor
) -> Tensor:
    """[vectors, batch, features]: gradients of every sample's rows, from those of its products [batch, pairs].

    Raises:
        InputError: as ``forward``.
    """
    kernel = Kernel(BACKWARD, len(sources), sources[0].shape[1], len(first), -1, DTYPES[sources[0].dtype])
    return _run(kernel, sources, indices, first, second, given)


def _run(kernel: Kernel, *operands: Any) -> Tensor:
    device = operands[2].device
    with explained(lane_kernel(kernel), device):
        return launch(call(kernel, lane_kernel(kernel), *operands), device)[0]


def call(
    kernel: Kernel,
    lanes: LaneKernel,
    sources: Sequence[Tensor],
    indices: Sequence[Tensor | None],
    first: Tensor,
    second: Tensor,
    given: Tensor | None = None,
    address: Address = Tensor.data_ptr,
) -> LaneCall:
    """The launch of ``forward``, or with ``given`` of ``backward``, by a ``lane_kernel`` of ``kernel``."""
    batch = len(given if given is not None else sources[0] if indices[0] is None else indices[0])
    shape = (batch, kernel.width) if given is None else (kernel.vectors, batch, kernel.features)
    out = torch.empty(shape, dtype=sources[0].dtype, device=sources[0].device)
    if given is not None and given.stride(1) != 1:
        given = given.contiguous()
    size = out.element_size()
    rows, names = [readable(t) for t in sources], [None if i is None else i.contiguous() for i in indices]
    pairs = [first.contiguous(), second.contiguous()]
    each = [
        {
            "rows": address(t), "index": 0 if i is None else address(i), "count": len(t),
            "stride": t.stride(0) * size, "wide": _wide(i),
        }
        for t, i in zip(rows, names, strict=True)
    ]  # fmt: skip
    values = {
        "sources": each, "first": address(pairs[0]), "second": address(pairs[1]), "out": address(out),
        "given": 0 if given is None else address(given), "given_stride": 0 if given is None else given.stride(0) * size,
        "batch": batch, "wide": _wide(first),
    }  # fmt: skip
    return LaneCall(lanes, -(-batch // lanes.warps), values, [out], [*rows, *names, *pairs, given])


def _wide(index: Tensor | None) -> int:
    return int(index is not None and index.dtype == torch.int64)
