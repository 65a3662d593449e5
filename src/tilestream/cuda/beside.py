"""Kernels that run beside those of pipelines: operators of ours, and copies of weights. Each is a header, kept on
disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilestream.cuda import driver
from tilestream.cuda.cache import compiled
from tilestream.cuda.one_launch import Launch
from tilestream.kernels.operators.lanes import LaneKernel as LaneKernel
from tilestream.kernels.operators.lanes import text_of as text_of
from tilestream.kernels.parts.source import BesideSource

Address = Callable[[Tensor], int]
"""Where a tensor is: ``Tensor.data_ptr``, or its place on the host's machine."""


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


@cache  # captured graphs keep the record's address
def loaded(kernel: LaneKernel, device_index: int) -> Launch:
    """A kernel, ready on a device."""
    return Launch(kernel, kernel.source, compiled(kernel.source), torch.device("cuda", device_index))


def explained(kernel: LaneKernel, device: torch.device) -> AbstractContextManager[None]:
    """What is called inside fails with what an earlier launch left behind, before anything asks a context that may be
    lost."""
    record = loaded(kernel, device.index or 0).record
    return nullcontext() if record is None else record.explained()


def launch(call: LaneCall, device: torch.device) -> Sequence[Tensor]:
    """The results of a call, enqueued on torch's stream of a device."""
    if call.ctas:
        stream = torch.cuda.current_stream(device).cuda_stream
        for prepared in loaded(call.kernel, device.index or 0).prepare({}, call.ctas, stream, 0, call.values):
            prepared()
    return call.results


def read_by(tensors: Mapping[str, Tensor | None], address: Address) -> tuple[list[Tensor | None], dict[str, Any]]:
    """What a kernel reads, in rows that start on 16 bytes, and where each is by its name; 0 where there is none."""
    held = {name: None if t is None else readable(t) for name, t in tensors.items()}
    return [*held.values()], {name: 0 if t is None else address(t) for name, t in held.items()}


def readable(rows: Tensor) -> Tensor:
    """Rows that start on 16 bytes: the tensor, or a copy."""
    apart = [stride for n, stride in zip(rows.shape[:-1], rows.stride(), strict=False) if n > 1]
    bad = rows.stride(-1) != 1 or any(n * rows.element_size() % 16 for n in apart) or rows.data_ptr() % 16
    return rows.clone(memory_format=torch.contiguous_format) if bad else rows
