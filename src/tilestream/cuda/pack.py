"""The copy of odd-sized weights that runs before a kernel."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from tilestream.cuda import driver
from tilestream.cuda.cache import compiled
from tilestream.cuda.tables import PackSpec
from tilestream.ir.pipeline import DTYPE_BYTES
from tilestream.schedule.model import ceil_to, columns_of

ENTRY_BYTES = 48
Where = tuple[int, int]
"""A tensor in device memory: its address, and the distance of its rows in elements."""


@dataclass(frozen=True)
class PackSource:
    """The kernel that copies as many pieces of weights: a ``compile.Source``, kept on disk as every other."""

    entries: int
    name: str = "tilestream_pack"
    shared_bytes: int = 0
    register_splits: tuple[tuple[int, int], ...] = ((0, 0),)  # no warps of its own kind: nothing to split

    @property
    def text(self) -> str:
        return f'#define PACK_ENTRIES {self.entries}\n#include "pack.cuh"\n'


@lru_cache(maxsize=8)
def _function(entries: int, device_index: int) -> driver.Function:
    driver.ensure_context(device_index)
    source = PackSource(entries)
    return driver.Function(compiled(source).cubin, source.name, 0)


class Packer:
    """Fills the packed copies of ``specs`` from the weights, on the given stream."""

    def __init__(self, specs: Sequence[PackSpec], device: torch.device) -> None:
        self.specs = specs
        self.entries = [(k, s, seg) for k, s in enumerate(specs) for seg in s.segments]
        self.function = _function(len(self.entries), device.index or 0)

    def prepare(self, where: Mapping[str, Where], packed: Sequence[int], stream: int) -> driver.PreparedLaunch:
        """The copy from the weights at ``where`` to the addresses ``packed``, one a spec, on a stream."""
        raw = (ctypes.c_char * (len(self.entries) * ENTRY_BYTES + 8))()
        for n, (k, spec, (column, columns, at)) in enumerate(self.entries):
            address, stride = where[spec.weight]
            padded = ceil_to(columns, columns_of(spec.dtype))
            struct.pack_into(
                "<QQ8i", raw, n * ENTRY_BYTES, address, packed[k], spec.rows, columns,
                stride, spec.columns, column, at, padded, DTYPE_BYTES[spec.dtype],
            )  # fmt: skip
        return self.function.prepare((16, len(self.entries)), 256, stream, raw)
