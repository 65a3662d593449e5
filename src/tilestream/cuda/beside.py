"""Kernels that run beside those of pipelines: copies of weights, sums of messages, operators of ours. Each is a header,
kept on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilestream.cuda import driver
from tilestream.cuda.cache import compiled
from tilestream.cuda.diagnose import Record
from tilestream.kernels.parts.params import Struct


@dataclass(frozen=True)
class BesideSource:
    """One kernel: a ``compile.Source`` without warps of its own kinds, so that there are no registers to split."""

    name: str
    text: str
    shared_bytes: int = 0
    register_splits: tuple[tuple[int, int], ...] = ((0, 0),)


@lru_cache(maxsize=32)
def function(
    name: str, text: str, device_index: int, shared_bytes: int = 0, asked: int | None = None
) -> driver.Function:
    """The kernel ``name`` of ``text``, compiled or found on disk, on a device.

    Args:
        asked: bytes of shared memory of its launches; ``shared_bytes`` are the most that a kernel of ``text`` takes.
    """
    driver.ensure_context(device_index)
    cubin = compiled(BesideSource(name, text, shared_bytes)).cubin
    return driver.Function(cubin, name, shared_bytes if asked is None else asked)


def text_of(header: str, argument: Struct, defines: Mapping[str, object] | None = None, before: str = "") -> str:
    """The source of a kernel that a header holds: what it is compiled for, its argument, the header.

    Args:
        before: another header, which the argument needs.
    """
    lines = [f"#define {name} {value}" for name, value in (defines or {}).items()]
    lines += [f'#include "{before}"'] if before else []
    return "\n".join([*lines, argument.text, f'#include "{header}"', ""])


@dataclass(frozen=True, eq=False)
class LaneKernel:
    """A kernel of plain warps, which an operator of ours runs as. Made once for each shape, and known by itself.

    Args:
        argument: what it takes; ``record`` among its fields is where it says why it gave up.
        persistent: no more CTAs than are resident at once have something to do.
        record: makes what reads that.
    """

    name: str
    text: str
    argument: Struct
    warps: int
    shared_bytes: int = 0
    persistent: bool = False
    record: Callable[[], Record] | None = None


Address = Callable[[Tensor], int]
"""Where a tensor is: ``Tensor.data_ptr``, or its place on the host's machine."""


class LaneCall(NamedTuple):
    """One launch of a kernel.

    Attributes:
        ctas: that have work.
        values: what its argument holds, but for ``record``.
        results: the tensors that it fills. held: what it reads besides, until it is enqueued.
    """

    kernel: LaneKernel
    ctas: int
    values: Mapping[str, Any]
    results: Sequence[Tensor]
    held: Sequence[Tensor | None]


@dataclass(frozen=True)
class _Loaded:
    """A kernel on a device, where it says why it gave up, and how many of its CTAs are launched at most."""

    function: driver.Function
    record: Record | None
    most: int


@cache  # captured graphs keep the record's address
def loaded(kernel: LaneKernel, device_index: int) -> _Loaded:
    """A kernel, ready on a device."""
    made = function(kernel.name, kernel.text, device_index, kernel.shared_bytes)
    sms = torch.cuda.get_device_properties(device_index).multi_processor_count
    most = sms * made.blocks_per_sm(32 * kernel.warps) if kernel.persistent else 2**31 - 1
    return _Loaded(made, kernel.record and kernel.record(), most)


def explained(kernel: LaneKernel, device: torch.device) -> AbstractContextManager[None]:
    """What is called inside fails with what an earlier launch left behind, before anything asks a context that may be
    lost."""
    record = loaded(kernel, device.index or 0).record
    return nullcontext() if record is None else record.explained()


def launch(call: LaneCall, device: torch.device) -> None:
    """Enqueue a call on torch's stream."""
    kernel, ready = call.kernel, loaded(call.kernel, device.index or 0)
    values = call.values if ready.record is None else {**call.values, "record": ready.record.address}
    packed = kernel.argument.pack(**values)
    stream = torch.cuda.current_stream(device).cuda_stream
    ready.function.launch((min(call.ctas, ready.most), 1), 32 * kernel.warps, stream, packed)
