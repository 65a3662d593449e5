"""Token mixing, launched (``kernels/operators/token_mixing``)."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

from torch import Tensor

from tilestream.cuda import driver
from tilestream.cuda.beside import Address, LaneCall, launch, read_by, readable
from tilestream.ir.dtypes import DTYPES
from tilestream.kernels.operators.token_mixing import CHUNK, Mixing, kernel
from tilestream.kernels.parts.tensor_maps import Encode, HeadsMap, MatrixMap


def mixed(*given: Any) -> Tensor:
    """``graph.token_mixing.token_mixing`` by its kernel."""
    return launch(call(given), given[0].device)[0]


def call(given: Sequence[Any], address: Address = Tensor.data_ptr, encode: Encode = driver.encoded) -> LaneCall:
    """The launch of ``mixed`` of what it is given."""
    x, gamma, beta, eps, w1, b1, w2, b2, activation, normed, residual = given
    images, tokens, channels = x.shape
    dtype, hidden = DTYPES[x.dtype], w1.shape[0]
    mixing = Mixing(tokens, hidden, channels, dtype, normed, residual is not None, activation)
    out = x.new_empty(images, tokens, channels)
    held = {"x": readable(x), "residual": readable(x if residual is None else residual), "out": out, "w2": readable(w2)}
    values: dict[str, Any] = {"eps": eps}
    for name in ("x", "residual", "out"):
        t = held[name]
        apart = (t.stride(1) * 2, t.stride(0) * 2, t.stride(0) * 2)
        values[name] = encode(HeadsMap(dtype, address(t), (channels, tokens, 1, images), apart, mixing.depth))
    rows = 8 * ceil(tokens / 8)
    values["w2"] = encode(MatrixMap(dtype, address(held["w2"]), hidden, tokens, held["w2"].stride(0) * 2, rows, CHUNK))
    vectors = {"w1": w1.contiguous().view(-1), "b1": b1, "b2": b2, "gamma": gamma, "beta": beta}
    whole, addresses = read_by(vectors, address)
    return LaneCall(kernel(mixing), images * mixing.parts, values | addresses, [out], [*held.values(), *whole])
