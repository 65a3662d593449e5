"""The copy of odd-sized weights that runs before a kernel."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from tilestream.cuda import beside, driver
from tilestream.cuda.tables import PackSpec
from tilestream.ir.pipeline import DTYPE_BYTES
from tilestream.schedule.model import ceil_to, columns_of

ENTRY_BYTES = 48


class Where(NamedTuple):
    """A tensor in device memory: its address, the distance of its rows in elements, and how many there are."""

    address: int
    stride: int
    rows: int


def text_of(entries: int) -> str:
    """The kernel that copies as many pieces of weights."""
    return f'#define PACK_ENTRIES {entries}\n#include "pack.cuh"\n'


class Packer:
    """Fills the packed copies of ``specs`` from the weights, on the given stream."""

    def __init__(self, specs: Sequence[PackSpec], device: torch.device) -> None:
        self.specs = specs
        self.entries = [(k, s, seg) for k, s in enumerate(specs) for seg in s.segments]
        self.function = beside.function("tilestream_pack", text_of(len(self.entries)), device.index or 0)

    def prepare(self, where: Mapping[str, Where], packed: Sequence[int], stream: int) -> driver.PreparedLaunch:
        """The copy from the weights at ``where`` to the addresses ``packed``, one a spec, on a stream."""
        raw = (ctypes.c_char * (len(self.entries) * ENTRY_BYTES + 8))()
        for n, (k, spec, (column, columns, at)) in enumerate(self.entries):
            address, stride, _ = where[spec.weight]
            padded = ceil_to(columns, columns_of(spec.dtype))
            struct.pack_into(
                "<QQ8i", raw, n * ENTRY_BYTES, address, packed[k], spec.rows, columns,
                stride, spec.columns, column, at, padded, DTYPE_BYTES[spec.dtype],
            )  # fmt: skip
        return self.function.prepare((16, len(self.entries)), 256, stream, raw)
