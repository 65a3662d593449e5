"""Lookups and products of pairs of their rows in one kernel, and its backward pass (``include/interaction.cuh``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tilestream.cuda import beside
from tilestream.cuda.diagnose import Record, index_record
from tilestream.ir.dtypes import DTYPES
from tilestream.kernels.parts.params import Field, Struct, pointers

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
        return (self.features if self.head >= 0 else 0) + _ceil(self.pairs, PIECE)

    @property
    def slot_bytes(self) -> int:
        """Of a warp's sample: its rows, and products in their place or, backward, beside them."""
        blocks = -(-self.vectors // 16)
        rows = self.vectors * self.pitch
        square = blocks * 16 * (blocks * 16 + 8) * 2
        return rows + square if self.name == BACKWARD else max(rows, square)

    @property
    def pitch(self) -> int:
        return _ceil(self.features, 16) * 2 + 16

    @property
    def common_bytes(self) -> int:
        """Of a CTA: where products go or come from, and, backward, a row of zeros."""
        table = _ceil(self.pairs, PIECE)
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
        lines = [f"#define {name} {n}" for name, n in (*numbers.items(), *shape.items())]
        return "\n".join(
            [*lines, '#include "lanes.cuh"', argument(self.vectors).text, '#include "interaction.cuh"', ""]
        )


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


def lookup_record(vectors: int) -> Record:
    """Of an index that names no row of its table, by vector and sample; or a pair that names no vector."""

    def describe(vector: int, place: int, rows: int, found: int) -> str:
        if vector == vectors:
            return f"pair {place} of an interaction names vector {found}, and there are {rows}"
        return f"the index of sample {place} into table {vector} of an interaction is {found}, and it has {rows} rows"

    return index_record(describe)


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
    loaded = _ready(kernel, first.device)
    batch = _batch(sources, indices)
    out = torch.empty(batch, kernel.width, dtype=sources[0].dtype, device=sources[0].device)
    if batch:
        _launch(loaded, sources, indices, first, second, None, out, batch)
    return out


def backward(
    sources: Sequence[Tensor], indices: Sequence[Tensor | None], first: Tensor, second: Tensor, given: Tensor
) -> Tensor:
    """[vectors, batch, features]: gradients of every sample's rows, from those of its products [batch, pairs].

    Raises:
        InputError: as ``forward``.
    """
    kernel = Kernel(BACKWARD, len(sources), sources[0].shape[1], len(first), -1, DTYPES[sources[0].dtype])
    loaded = _ready(kernel, first.device)
    batch = len(given)
    out = torch.empty(len(sources), batch, kernel.features, dtype=given.dtype, device=given.device)
    if batch:
        _launch(loaded, sources, indices, first, second, given, out, batch)
    return out


@dataclass(frozen=True)
class _Loaded:
    """A kernel on a device, what it leaves behind, its warps a CTA, and how many CTAs are resident at once."""

    function: beside.driver.Function
    record: Record
    warps: int
    resident: int


def _ready(kernel: Kernel, device: torch.device) -> _Loaded:
    """The kernel; before anything else asks a context that may be lost.

    Raises:
        InputError: an index of an earlier call named no row.
    """
    loaded = _loaded(kernel, device.index or 0)
    loaded.record.check()
    return loaded


def _launch(
    loaded: _Loaded,
    sources: Sequence[Tensor],
    indices: Sequence[Tensor | None],
    first: Tensor,
    second: Tensor,
    given: Tensor | None,
    out: Tensor,
    batch: int,
) -> None:
    rows = [_readable(t) for t in sources]
    names = [None if i is None else i.contiguous() for i in indices]
    pairs = [t.contiguous() for t in (first, second)]
    if given is not None and given.stride(1) != 1:
        given = given.contiguous()
    packed = parameters(
        [(t.data_ptr(), 0 if i is None else i.data_ptr(), len(t), t.stride(0) * t.element_size(), _wide(i))
         for t, i in zip(rows, names, strict=True)],
        [t.data_ptr() for t in pairs], 0 if given is None else given.data_ptr(), out.data_ptr(), loaded.record.address,
        0 if given is None else given.stride(0) * given.element_size(), batch, _wide(first),
    )  # fmt: skip
    stream = torch.cuda.current_stream(out.device).cuda_stream
    ctas = min(-(-batch // loaded.warps), loaded.resident)
    loaded.function.launch((ctas, 1), 32 * loaded.warps, stream, packed)


def parameters(
    sources: Sequence[tuple[int, int, int, int, int]],
    pairs: Sequence[int],
    given: int,
    out: int,
    record: int,
    given_stride: int,
    batch: int,
    wide: int,
) -> bytes:
    """The bytes of ``InteractionParams``.

    Args:
        sources: of each, addresses of rows and index, rows, bytes from row to row, and whether indices have 64 bits.
        given_stride: bytes from row to row of ``given``.
        wide: whether pairs have 64 bits.
    """
    names = [field.name for field in SOURCE.fields]
    return argument(len(sources)).pack(
        sources=[dict(zip(names, source, strict=True)) for source in sources],
        first=pairs[0], second=pairs[1], given=given, out=out, record=record, given_stride=given_stride,
        batch=batch, wide=wide,
    )  # fmt: skip


@cache  # captured graphs keep the record's address
def _loaded(kernel: Kernel, device_index: int) -> _Loaded:
    warps = kernel.warps
    function = beside.function(kernel.name, kernel.text(warps), device_index, kernel.shared_bytes(warps))
    sms = torch.cuda.get_device_properties(device_index).multi_processor_count
    return _Loaded(function, lookup_record(kernel.vectors), warps, sms * function.blocks_per_sm(32 * warps))


def _batch(sources: Sequence[Tensor], indices: Sequence[Tensor | None]) -> int:
    return len(sources[0]) if indices[0] is None else len(indices[0])


def _readable(rows: Tensor) -> Tensor:
    """Rows that start on 16 bytes: the tensor, or a copy."""
    size = rows.element_size()
    bad = rows.stride(1) != 1 or rows.stride(0) * size % 16 or rows.data_ptr() % 16
    return rows.clone(memory_format=torch.contiguous_format) if bad else rows


def _wide(index: Tensor | None) -> int:
    return int(index is not None and index.dtype == torch.int64)


def _ceil(n: int, step: int) -> int:
    return -(-n // step) * step
