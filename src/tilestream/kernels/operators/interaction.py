"""Lookups and products of pairs of their rows in one kernel, and its backward pass (``include/interaction.cuh``)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tilestream.kernels.operators.lanes import LaneKernel, text_of
from tilestream.kernels.parts.params import Field, Struct, pointers
from tilestream.kernels.stream.model import ceil_to

FORWARD, BACKWARD = "tilestream_interaction", "tilestream_interaction_backward"
PIECE = 8
"""Elements of 16 bytes, which is what a lane copies."""
SM_SHARED, RESERVED = 228 * 1024, 1024
"""Bytes of an SM's shared memory on sm_90, and what of it each CTA takes for the system."""
SM_REGISTERS, REGISTERS = 65536, (64, 80, 128, 176)
"""An SM's registers, and what a lane needs for up to 16, 32, 48 and 64 vectors without spills."""
MOST_SHARED = SM_SHARED - RESERVED


@dataclass(frozen=True)
class Kernel:
    """What a kernel is compiled for.

    Args:
        vectors: of a sample, 2 to 64; ``features`` elements each, a multiple of 8.
        pairs: products wanted, 1 to 4096.
        head: the vector that results start with; -1 for none.
        dtype: ``bf16`` or ``f16``.
    """

    name: str
    vectors: int
    features: int
    pairs: int
    head: int = -1
    dtype: str = "bf16"

    @property
    def width(self) -> int:
        """Elements of a row of results: the head and the products, zeros up to 16 bytes."""
        return (self.features if self.head >= 0 else 0) + ceil_to(self.pairs, PIECE)

    @property
    def slot_bytes(self) -> int:
        """Of a warp's sample: its rows, and products in their place or, backward, beside them."""
        blocks = -(-self.vectors // 16)
        rows = self.vectors * self.pitch
        square = blocks * 16 * (blocks * 16 + 8) * 2
        return rows + square if self.name == BACKWARD else max(rows, square)

    @property
    def pitch(self) -> int:
        return ceil_to(self.features, 16) * 2 + 16

    @property
    def common_bytes(self) -> int:
        """Of a CTA: where products go or come from, and, backward, a row of zeros."""
        table = ceil_to(self.pairs, PIECE)
        return 6 * table + self.pitch if self.name == BACKWARD else 2 * table

    @property
    def warps(self) -> int:
        """Of a CTA: eight, or as many as fit."""
        return min(8, (MOST_SHARED - self.common_bytes) // self.slot_bytes)

    def shared_bytes(self, warps: int) -> int:
        return self.common_bytes + warps * self.slot_bytes

    def resident(self, warps: int) -> int:
        """CTAs that an SM's shared memory and registers hold."""
        by_memory = SM_SHARED // (self.shared_bytes(warps) + RESERVED)
        by_registers = SM_REGISTERS // (REGISTERS[-(-self.vectors // 16) - 1] * 32 * warps)
        return max(1, min(by_memory, by_registers))

    def text(self, warps: int) -> str:
        """The source for so many warps a CTA."""
        numbers = {"VECTORS": self.vectors, "FEATURES": self.features, "PAIRS": self.pairs, "HEAD": self.head}
        numbers["BACKWARD"] = int(self.name == BACKWARD)
        shape = {"DTYPE": self.dtype, "WARPS": warps, "RESIDENT": self.resident(warps)}
        return text_of("interaction.cuh", argument(self.vectors), numbers | shape, "lanes.cuh")


SOURCE = Struct(
    "Source",
    (
        *pointers("rows", type="const char*"),
        Field("const void*", "index", note="which row each sample has; null: its own"),
        Field("long long", "count", note="of rows"),
        Field("int", "stride", note="bytes from row to row"),
        Field("int", "wide", note="whether indices have 64 bits"),
    ),
)


@cache
def argument(vectors: int) -> Struct:
    """``InteractionParams`` of a kernel of so many vectors a sample."""
    given = "backward: gradients of the products [batch, PAIRS], `given_stride` bytes from row to row"
    each = (
        Field(SOURCE, "sources", vectors),
        *pointers("first", "second", type="const void*"),
        Field("const char*", "given", note=given),
        Field("char*", "out", note="forward: [batch, WIDTH]; backward: [VECTORS, batch, FEATURES]"),
        *pointers("record", type="u64*"),
        Field("long long", "given_stride"),
        Field("int", "batch"),
        Field("int", "wide", note="whether pairs are of 64 bits"),
    )
    return Struct("InteractionParams", each)


@cache
def lane_kernel(kernel: Kernel, warps: int = 0) -> LaneKernel:
    """The kernel of so many warps a CTA; by default as many as fit."""
    warps = warps or kernel.warps

    def told(vector: int, place: int, rows: int, found: int) -> str:
        """Of an index that names no row of its table, by vector and sample; or a pair that names no vector."""
        if vector == kernel.vectors:
            return f"pair {place} of an interaction names vector {found}, and there are {rows}"
        return f"the index of sample {place} into table {vector} of an interaction is {found}, and it has {rows} rows"

    argued = argument(kernel.vectors)
    return LaneKernel(kernel.name, kernel.text(warps), argued, warps, kernel.shared_bytes(warps), True, told)
