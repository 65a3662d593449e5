"""Gates of squeeze and excite, launched (``kernels/operators/squeeze``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tilestream.cuda.beside import Address, LaneCall, launch, read_by
from tilestream.ir.dtypes import DTYPES
from tilestream.kernels.operators.squeeze import Squeeze, kernel


def gated(*given: Any) -> Tensor:
    """``graph.squeeze.squeeze`` by its kernel."""
    return launch(call(given), given[0].device)[0]


def call(given: Sequence[Any], address: Address = Tensor.data_ptr) -> LaneCall:
    """The launch of ``gated`` of what it is given."""
    sums, share, w1, b1, w2, b2, activation, gate = given
    pictures, parts, channels = sums.shape
    shape = Squeeze(channels, w1.shape[0], DTYPES[w1.dtype], activation, gate)
    out = w1.new_empty(pictures, channels)
    flat = {name: t.contiguous().view(-1) for name, t in (("sums", sums), ("w1", w1), ("w2", w2))}
    held, values = read_by(flat | {"b1": b1, "b2": b2}, address)
    values |= {"out": address(out), "parts": parts, "share": share}
    return LaneCall(kernel(shape), pictures, values, [out], held)
