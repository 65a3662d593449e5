"""Gates of squeeze and excite, of sums of pictures' tiles, in one kernel (``include/squeeze.cuh``)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tilestream.kernels.operators.lanes import LaneKernel, text_of
from tilestream.kernels.parts.params import Field, Struct, pointers

NAME = "tilestream_squeeze"
ACTIVATIONS, GATES = ("relu", "silu"), ("sigmoid", "hardsigmoid")
MOST_CHANNELS, MOST_HIDDEN = 4096, 1024
WARPS = 32

PARAMS = Struct(
    "SqueezeParams",
    (
        Field("const float*", "sums", note="[pictures, parts, CHANNELS]"),
        *pointers("w1", "w2", type="const char*", notes={"w1": "[HIDDEN, CHANNELS]", "w2": "[CHANNELS, HIDDEN]"}),
        *pointers("b1", "b2", type="const void*", notes={"b1": "or null"}),
        Field("char*", "out", note="[pictures, CHANNELS]"),
        Field("int", "parts"),
        Field("float", "share", note="of a pixel in the mean"),
    ),
)


@dataclass(frozen=True)
class Squeeze:
    """Two layers [channels, hidden] and [hidden, channels] over means, bf16 or f16.

    Args:
        activation, gate: one of ``ACTIVATIONS`` between the layers, and of ``GATES`` behind them.
    """

    channels: int
    hidden: int
    dtype: str
    activation: str
    gate: str

    @property
    def taken(self) -> bool:
        """Whether there is a kernel."""
        known = self.activation in ACTIVATIONS and self.gate in GATES
        sizes = 0 < self.channels <= MOST_CHANNELS and 0 < self.hidden <= MOST_HIDDEN
        return known and sizes and self.channels % 4 == 0 and self.hidden % 2 == 0

    @property
    def weight_bytes(self) -> int:
        return 4 * self.channels * self.hidden


@cache
def kernel(squeeze: Squeeze) -> LaneKernel:
    """The kernel of a gate."""
    shape = {
        "DTYPE": squeeze.dtype, "CHANNELS": squeeze.channels, "HIDDEN": squeeze.hidden,
        "ACTIVATION": squeeze.activation, "GATE": squeeze.gate, "WARPS": WARPS,
    }  # fmt: skip
    shared_bytes = 16 * 32 * WARPS + 4 * (squeeze.channels + squeeze.hidden)
    return LaneKernel(NAME, text_of("squeeze.cuh", PARAMS, shape), PARAMS, WARPS, shared_bytes)
