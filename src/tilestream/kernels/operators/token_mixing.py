"""Two layers over the tokens of images, channel by channel, in one kernel with the norm in front and what is added
behind (``include/token_mixing.cuh``)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil, gcd

from tilestream.kernels.operators.lanes import LaneKernel, text_of
from tilestream.kernels.parts.mma import of_columns, specialisation
from tilestream.kernels.parts.params import MAP, Field, Struct, pointers

NAME = "tilestream_token_mixing"
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")
MOST_TOKENS, MOST_CLUSTER = 256, 8
CTA_CHANNELS, CHUNK, SLOTS, WARPS, GROUPS = 128, 64, 2, 12, 2
"""Channels of a CTA; of the hidden layer at a time; of the ring; of a CTA, of which two warpgroups multiply."""

PARAMS = Struct(
    "TokenMixingParams",
    (
        *(Field(MAP, name) for name in ("x", "residual", "w2", "out")),
        *pointers("w1", type="const char*", notes={"w1": "[HIDDEN, TOKENS]"}),
        *pointers("b1", "b2", "gamma", "beta", type="const void*", notes={"b1": "vectors, or null"}),
        Field("float", "eps"),
    ),
)


@dataclass(frozen=True)
class Mixing:
    """Layers [tokens, hidden] and [hidden, tokens] of images [tokens, channels], bf16 or f16.

    Args:
        normed: a LayerNorm of each token is in front. residual: something is added.
        activation: one of ``ACTIVATIONS``, between the layers.
    """

    tokens: int
    hidden: int
    channels: int
    dtype: str = "bf16"
    normed: bool = False
    residual: bool = False
    activation: str = "gelu"

    @property
    def parts(self) -> int:
        """CTAs of an image."""
        return ceil(self.channels / CTA_CHANNELS)

    @property
    def depth(self) -> int:
        """Tokens that the first product sums over, zeros behind them included."""
        return 16 * ceil(self.tokens / 16)

    @property
    def piece(self) -> int:
        """Bytes by which rows of the first weight are copied."""
        return gcd(16, 2 * self.tokens)

    @property
    def slot_bytes(self) -> int:
        weights = 8192 * ceil(self.depth / 64) + 1024 * ceil(self.tokens / 8)
        return max(weights, GROUPS * 128 * self.depth)

    @property
    def shared_bytes(self) -> int:
        known = 8 * self.depth * GROUPS * self.parts if self.normed else 0
        return GROUPS * 128 * self.depth + SLOTS * self.slot_bytes + 16 * SLOTS + 16 + known

    @property
    def taken(self) -> bool:
        """Whether there is a kernel."""
        whole = self.tokens % 2 == 0 and self.hidden % 8 == 0 and self.channels % 8 == 0
        sizes = 0 < self.tokens <= MOST_TOKENS and self.hidden > 0 and self.channels > 0
        return whole and sizes and (not self.normed or self.parts <= MOST_CLUSTER)


@cache
def kernel(mixing: Mixing) -> LaneKernel:
    """The kernel of a mixing."""
    cluster = mixing.parts if mixing.normed else 1
    shape = {
        "DTYPE": mixing.dtype, "TOKENS": mixing.tokens, "HIDDEN": mixing.hidden, "CHANNELS": mixing.channels,
        "ACTIVATION": mixing.activation, "NORMED": int(mixing.normed), "RESIDUAL": int(mixing.residual),
        "CLUSTER": cluster, "PIECE": mixing.piece,
    }  # fmt: skip
    made = [of_columns(mixing.dtype, CHUNK // 8, False), specialisation(mixing.dtype, ceil(mixing.tokens / 8))]
    text = text_of("token_mixing.cuh", PARAMS, shape, products=made)
    return LaneKernel(NAME, text, PARAMS, WARPS, mixing.shared_bytes, warpgroups=GROUPS, cluster=cluster)


ISSUED = 0.65
"""Instructions a cycle of a scheduler, as depthwise convolutions were measured to have."""
ACTIVATED, NORMED, STORED = 19, 15, 13
"""Instructions for an element of the hidden layer, of a normed image, and of the result. Counted in machine code."""
BEGUN = 3000
"""Cycles until the image has come and behind the last sum. Assumed, as all of this: no GPU has timed it yet."""


def cycles(mixing: Mixing) -> float:
    """Of an SM for a CTA: its two warpgroups take turns at the tensor cores, which the activations of the other hide as
    far as they take as long."""
    chunks, channels = ceil(mixing.hidden / CHUNK), min(CTA_CHANNELS, mixing.channels)
    tensor = GROUPS * chunks * (2 * mixing.depth + CHUNK // 16 * 4 * ceil(mixing.tokens / 8))
    lanes = 128 * ISSUED
    activated = chunks * CHUNK * channels * ACTIVATED / lanes
    ends = mixing.tokens * channels * (STORED + NORMED * mixing.normed) / lanes
    return BEGUN + max(tensor, activated) + min(tensor, activated) / GROUPS + ends
