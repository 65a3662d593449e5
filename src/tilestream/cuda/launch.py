"""Run compiled pipelines on the current stream."""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tilestream.cuda import driver, pack
from tilestream.cuda.compile import KernelReport
from tilestream.cuda.diagnose import Dump
from tilestream.cuda.emit import THREADS, KernelSource
from tilestream.cuda.workspace import Workspace, Workspaces
from tilestream.dtypes import TORCH_DTYPES
from tilestream.errors import DeviceError, InputError
from tilestream.ir import TILE_ROWS, Pipeline, Role, Tensor

MOST_ROWS = 2**31 - 1 - 2 * TILE_ROWS  # row numbers are 32-bit, and rounded up to a step of tiles
KEPT_PARAMS = 64
TIMEOUT_NS = 1_000_000_000  # less than the barriers' own bound, so that the queue's name is known


@dataclass(frozen=True)
class _Offsets:
    """Byte offsets in the kernel's Params, as the template declares it."""

    pointers: int
    strides: int
    tail: int
    size: int


class Launch:
    """One kernel of a pipeline, with its workspaces."""

    def __init__(self, source: KernelSource, report: KernelReport, device: torch.device) -> None:
        self.source, self.report, self.device = source, report, device
        self.tables = source.tables
        driver.ensure_context(device.index or 0)
        self.function = driver.Function(report.cubin, source.name, source.shared_bytes)
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.wanted = sum(s.replicas for s in source.stages)
        room = self.function.blocks_per_sm(THREADS) * self.sms
        if len(source.stages) > 1 and self.wanted > room:
            raise DeviceError(
                f"pipeline {source.pipeline.name!r} needs {self.wanted} CTAs at once and this GPU holds {room}",
                "plan for this GPU (options device=None), or with fewer replicas",
            )
        if room < 1:
            raise DeviceError(f"kernel {source.name} does not fit an SM of this GPU", "plan for this GPU")
        self.workspaces = Workspaces(self.tables, device)
        self.pack = pack.Packer(self.tables.packs, device) if self.tables.packs else None
        maps, pointers = max(len(self.tables.maps), 1), max(len(self.tables.pointers), 1)
        at = maps * driver.MAP_BYTES
        tail = at + 16 * pointers
        self.offsets = _Offsets(at, at + 8 * pointers, tail, -(-(tail + 48) // 64) * 64)
        named = [spec.name for spec in self.tables.maps if spec.kind not in ("ring", "packed")]
        self.names = tuple(dict.fromkeys([*named, *(name for _, name in self.tables.pointers)]))
        self.made: dict[tuple[int, ...], ctypes.Array] = {}
        self.dump = Dump(self.tables, [s.name for s in source.stages]) if self.tables.queues else None

    def check(self) -> None:
        """Raise ``QueueTimeout`` if an earlier launch expired."""
        if self.dump is not None:
            self.dump.check()

    def __call__(self, tensors: Mapping[str, torch.Tensor], rows: int) -> None:
        """Enqueue on the current stream. ``tensors`` holds inputs, parameters and outputs by name."""
        stream = torch.cuda.current_stream(self.device).cuda_stream
        space = self.workspaces.take(stream)
        if self.pack is not None:
            self.pack(tensors, space.packed, stream)
        params = self._params(tensors, space, rows)
        tiles = -(-rows // 64)
        if len(self.source.stages) == 1:
            stage = self.source.pipeline.stages[0]
            grid = min(self.sms, self.wanted, -(-tiles // stage.tiles_per_step))
            grid = max(stage.group, (grid + stage.group - 1) // stage.group * stage.group)
            if grid > self.sms:
                grid -= stage.group
        else:
            grid = self.wanted
        self.function.launch((grid, 1), THREADS, stream, params, cooperative=self.source.cooperative)

    def _params(self, tensors: Mapping[str, torch.Tensor], space: Workspace, rows: int) -> ctypes.Array:
        """The kernel's argument. Kept by addresses: in steady state a call finds it made (the driver copies it)."""
        key = (rows, space.epoch, *(v for n in self.names for v in _where(tensors[n])))
        params = self.made.get(key)
        if params is None:
            if len(self.made) >= KEPT_PARAMS:
                self.made.clear()  # perhaps by another thread, so what was made is returned, not looked up
            params = self.made[key] = self._make_params(tensors, space, rows)
        return params

    def _make_params(self, tensors: Mapping[str, torch.Tensor], space: Workspace, rows: int) -> ctypes.Array:
        o = self.offsets
        raw = (ctypes.c_char * o.size)()
        for k, spec in enumerate(self.tables.maps):
            if spec.kind == "ring":
                t = space.rings[int(spec.name)]
            elif spec.kind == "packed":
                t = space.packed[int(spec.name)]
            else:
                t = tensors[spec.name]
            count = spec.rows or rows
            raw[k * 128 : (k + 1) * 128] = driver.tensor_map(
                spec.dtype,
                t.data_ptr(),
                spec.columns,
                count,
                t.stride(0) * t.element_size(),
                spec.box_rows,
            )
        for k, (_, name) in enumerate(self.tables.pointers):
            t = tensors[name]
            address, stride = _where(t)
            struct.pack_into("<Q", raw, o.pointers + 8 * k, address)
            struct.pack_into("<q", raw, o.strides + 8 * k, stride)
        dump = self.dump.address if self.dump is not None else 0
        struct.pack_into("<QQQQQii", raw, o.tail, space.lines, space.epoch, space.exits, dump, TIMEOUT_NS, rows, 0)
        return raw


def _where(t: torch.Tensor) -> tuple[int, int]:
    return t.data_ptr(), t.stride(0) if t.dim() else 1


class _Thread(threading.local):
    """Whether a thread that may never have called CUDA has a context."""

    ready = False


_thread = _Thread()


class CompiledPipeline:
    """A pipeline ready to run: its launches in order.

    Call it with every input ``[rows, features]`` and every parameter by name; it returns the outputs
    ``[rows, features]``. Work is enqueued on torch's current stream and may be captured in a graph.
    """

    def __init__(self, pipeline: Pipeline, launches: list[Launch], device: torch.device) -> None:
        self.pipeline, self.launches, self.device = pipeline, launches, device
        self._outputs = pipeline.by_role(Role.OUTPUT)
        spilled: dict[str, Tensor] = {}
        for launch in launches:
            for t in launch.source.pipeline.by_role(Role.OUTPUT):
                spilled[t.name] = t
        self._buffers = [t for n, t in spilled.items() if all(n != o.name for o in self._outputs)]

    @property
    def reports(self) -> list[KernelReport]:
        return [launch.report for launch in self.launches]

    def __call__(
        self, tensors: Mapping[str, torch.Tensor], rows: int, out: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Enqueue the pipeline for ``rows`` rows.

        Args:
            tensors: inputs ``[rows, features]`` with contiguous features, and parameters, on this device.
            rows: any number, 0 included.
            out: tensors to write instead of new ones: rows that bulk copies can address, in memory of their own.

        Raises:
            InputError: a tensor is missing, has the wrong shape, dtype or device, or is written while it is read.
            QueueTimeout: an earlier launch of this pipeline expired.
        """
        for launch in self.launches:
            launch.check()
        if rows > MOST_ROWS:
            raise InputError(f"{rows} rows are more than {MOST_ROWS}", "give the batch in parts")
        wanted = (*self.pipeline.by_role(Role.INPUT), *self.pipeline.by_role(Role.PARAMETER))
        have = {t.name: self._checked(t, tensors, rows) for t in wanted}
        given = out or {}
        results = {t.name: self._writable(t, given, rows, have) for t in self._outputs}
        if rows == 0 or not self.launches:
            return results
        have |= results
        have |= {t.name: self._empty(t, rows) for t in self._buffers}
        # Kernels and streams are those of the tensors' device, whichever is current, as with torch's own operators.
        other = torch.cuda.current_device() != self.device.index
        with torch.cuda.device(self.device) if other else contextlib.nullcontext():
            if not _thread.ready:
                driver.ensure_context(self.device.index or 0)
                _thread.ready = True
            for launch in self.launches:
                launch(have, rows)
        return results

    def _empty(self, t: Tensor, rows: int) -> torch.Tensor:
        return torch.empty(rows, t.features, dtype=TORCH_DTYPES[t.dtype], device=self.device)

    def _checked(self, t: Tensor, tensors: Mapping[str, torch.Tensor], rows: int) -> torch.Tensor:
        value = tensors.get(t.name)
        if value is None:
            raise InputError(f"tensor {t.name!r} is missing", "give every input and parameter of the pipeline")
        want = t.shape if t.role is Role.PARAMETER else (rows, t.features)
        if tuple(value.shape) != want or value.dtype != TORCH_DTYPES[t.dtype] or value.device != self.device:
            raise InputError(
                f"tensor {t.name!r} is {tuple(value.shape)} {value.dtype} on {value.device}; "
                f"the pipeline wants {want} {TORCH_DTYPES[t.dtype]} on {self.device}",
                "convert it before the call",
            )
        if t.role is Role.OUTPUT or _addressable(value):
            return value
        return value.clone(memory_format=torch.contiguous_format)

    def _writable(
        self, t: Tensor, out: Mapping[str, torch.Tensor], rows: int, have: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """The output given, or a new one. Tiles are stored while others are still read: the memory must be its own."""
        if t.name not in out:
            return self._empty(t, rows)
        value = self._checked(t, out, rows)
        if rows and not _addressable(value):
            raise InputError(
                f"kernels cannot write output {t.name!r}: strides {value.stride()}, address {value.data_ptr():#x}",
                "give a contiguous tensor that starts on 16 bytes",
            )
        others = {**have, **{name: other for name, other in out.items() if name != t.name}}
        for name, other in others.items():
            if _overlap(value, other):
                raise InputError(
                    f"output {t.name!r} shares memory with {name!r}", "give it memory of its own, or leave out= away"
                )
        return value


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the spans of two tensors meet; columns of one matrix count as meeting."""
    first, second = _span(a), _span(b)
    return first[0] < second[1] and second[0] < first[1]


def _span(t: torch.Tensor) -> tuple[int, int]:
    if t.numel() == 0:
        return 0, 0
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def _addressable(t: torch.Tensor) -> bool:
    """Whether kernels can read it in place; views at odd addresses or strides are copied instead."""
    if t.data_ptr() % 16:
        return False
    if t.dim() == 0:
        return True
    if t.shape[-1] > 1 and t.stride(-1) != 1:
        return False
    if t.dim() == 1:
        return True
    row = t.stride(0) * t.element_size()
    # Rows that bulk copies address start on 16 bytes; rows of odd widths are read element by element.
    return t.stride(0) >= t.shape[-1] and (row % 16 == 0 or t.shape[-1] * t.element_size() % 16 != 0)
