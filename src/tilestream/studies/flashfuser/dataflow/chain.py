"""E = act(A B) D: a chain of two products, an FFN, a gated FFN, a convolution and the 1 x 1 behind it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tilestream.errors import OptionError

ELEMENT = 2
"""Bytes of an operand: bf16."""

ACCUMULATOR = 4
"""Bytes of a partial result: fp32."""


class Gate(StrEnum):
    """How the two branches of ``act(A B0) * (A B1)`` lie over a cluster (FlashFuser, section IV).

    ``SPATIAL``: half of the blocks make a branch each, and all-exchange multiplies them. ``SEQUENTIAL``: every block
    makes both, one after the other, as if K were twice as long.
    """

    NONE = "none"
    SPATIAL = "spatial"
    SEQUENTIAL = "sequential"


@dataclass(frozen=True)
class Image:
    """What A is made from where the first product is a convolution: [height, width, channels], ``taps`` x ``taps``."""

    channels: int
    height: int
    width: int
    taps: int

    @property
    def elements(self) -> int:
        return self.channels * self.height * self.width


@dataclass(frozen=True)
class Chain:
    """A is [m, k], B [k, n], C = act(A B) [m, n], D [n, l], E [m, l]; bf16, sums in fp32.

    Attributes:
        gate: whether B is two matrices, and where their branches run.
        image: what A is made from, where it is not stored as [m, k]: im2col of it, which is never written.
    """

    name: str
    m: int
    n: int
    k: int
    l: int  # noqa: E741  # the paper's letter
    gate: Gate = Gate.NONE
    image: Image | None = None

    def __post_init__(self) -> None:
        if min(self.m, self.n, self.k, self.l) < 1:
            raise OptionError(
                f"chain {self.name!r} has sizes m {self.m}, n {self.n}, k {self.k}, l {self.l}", "give each at least 1"
            )

    @staticmethod
    def convolutions(
        name: str, channels: int, height: int, width: int, middle: int, out: int, taps: int, taps2: int = 1
    ) -> Chain:
        """A ``taps`` x ``taps`` convolution and a 1 x 1 behind it, one image, stride 1, padded to its own size.

        Raises:
            OptionError: the second is no 1 x 1. A pixel of its result would need neighbours of the middle, which
                another block has, and the chain of products would not be the chain of convolutions.
        """
        if taps2 != 1:
            raise OptionError(
                f"chain {name!r}: its second convolution is {taps2} x {taps2}, and only 1 x 1 is a product of rows",
                "keep the two convolutions apart",
            )
        pixels = height * width
        return Chain(name, pixels, middle, channels * taps * taps, out, image=Image(channels, height, width, taps))

    @property
    def branches(self) -> int:
        return 1 if self.gate is Gate.NONE else 2

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * (self.k * self.branches + self.l)

    @property
    def weight_bytes(self) -> int:
        return ELEMENT * self.n * (self.k * self.branches + self.l)

    @property
    def source(self) -> int:
        """Elements that A is made from."""
        return self.m * self.k if self.image is None else self.image.elements

    @property
    def fused_bytes(self) -> int:
        """What any kernel of the whole chain moves: A, B, D and E, each once."""
        return self.weight_bytes + ELEMENT * (self.source + self.m * self.l)

    @property
    def unfused_bytes(self) -> int:
        """The same for two kernels: C is also written and read. A gate is applied in the first one's epilogue."""
        return self.fused_bytes + 2 * ELEMENT * self.m * self.n

    def size(self, axis: str) -> int:
        """Of ``m``, ``n``, ``k`` or ``l``."""
        return {"m": self.m, "n": self.n, "k": self.k, "l": self.l}[axis]
