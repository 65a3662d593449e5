"""Run compiled pipelines on the current stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tilestream.cuda import stamps
from tilestream.cuda.again import Again
from tilestream.cuda.driver import PreparedLaunch
from tilestream.cuda.one_launch import Launch
from tilestream.cuda.turn import Turner
from tilestream.errors import DeviceError, InputError
from tilestream.ir.dtypes import ELEMENT_DTYPES, TORCH_DTYPES
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Pipeline, Role, Tensor
from tilestream.ir.taps import ragged_sizes, rows_given
from tilestream.kernels.parts.params import Where
from tilestream.kernels.stream.kernel import MOST_ROWS

KEPT = 16
"""Sets of addresses that a ``Bound`` keeps its launches for: where results go varies from call to call."""


def _shape(t: Tensor, rows: int, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The whole shape: what the pipeline does not know is in ``sizes``, or the launch's rows."""
    return tuple(sizes.get(a.name, rows) if a.size is None else a.size for a in t.axes)


def _where(t: torch.Tensor) -> Where:
    if t.dim() == 2:
        return Where(t.data_ptr(), _row_stride(t, t.shape[1]), t.shape[0])
    return Where(t.data_ptr(), t.stride(0) if t.dim() else 1, t.shape[0] if t.dim() else 1)


def _row_stride(t: torch.Tensor, features: int) -> int:
    """Elements from one row to the next of a matrix of ``features`` columns, which may have any other shape where it is
    contiguous: a result ``[clouds, points, features]`` has as many rows as both of these together.

    What torch says of a single row is any number, also of a contiguous one: ``[n, 1].t()`` has rows 1 apart, and no
    tensor map has that."""
    return t.stride(0) if t.dim() == 2 and t.shape[1] == features and t.shape[0] > 1 else features


_address = torch.Tensor.data_ptr


class CompiledPipeline:
    """A pipeline ready to run: its launches in order.

    Call it with every input ``[rows, features]`` and every parameter by name; it returns the outputs
    ``[rows, features]``. Work is enqueued on torch's current stream and may be captured in a graph.
    ``bind`` is for who calls again and again: what can be said once is said once.
    """

    def __init__(self, pipeline: Pipeline, launches: Sequence[Launch], device: torch.device) -> None:
        self.pipeline, self.launches, self.device = pipeline, launches, device
        self.outputs = pipeline.by_role(Role.OUTPUT)
        self._turners: dict[tuple[str, ...], Turner] = {}
        spilled: dict[str, Tensor] = {}
        beside = [launch.kernel.buffers for launch in launches]
        for made in (*(part.by_role(Role.OUTPUT) for part in cut_at_dram(pipeline)), *beside):
            for t in made:
                spilled[t.name] = t
        self.buffers = [t for n, t in spilled.items() if all(n != o.name for o in self.outputs)]

    def logs(self) -> list[stamps.LaunchLog]:
        """What the kernels of a pipeline that was built with stamps wrote in the last call, launch by launch.

        Waits for the device. Empty for kernels without stamps, and before the first call.
        """
        torch.cuda.synchronize(self.device)
        found = [launch.log() for launch in self.launches]
        return [log for log in found if log is not None]

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
        inputs = {t.name for t in self.pipeline.by_role(Role.INPUT)}
        wanted = (*self.pipeline.by_role(Role.INPUT), *self.pipeline.by_role(Role.PARAMETER))
        sizes = ragged_sizes(self.pipeline, lambda name: tensors[name].shape[0] if name in tensors else 0)
        have = {t.name: self._checked(t, tensors, rows, sizes) for t in wanted}
        rows_given(self.pipeline, lambda name: rows if name in inputs else have[name].shape[0])
        given = out or {}
        results = {t.name: self._writable(t, given, rows, have, sizes) for t in self.outputs}
        bound = self.bind(have, rows, written=tuple(results))
        with torch.cuda.device_of(next(iter(results.values()))):
            bound(tuple(results.values()))
        return results

    def bind(self, tensors: Mapping[str, torch.Tensor], rows: int, written: Sequence[str]) -> Bound:
        """The pipeline for ``rows`` rows of ``tensors``, which stay where they are.

        Args:
            tensors: inputs and parameters, of the shapes that the pipeline declares and ``in_place``, or parameters
                that lie transposed (``turn.lies_transposed``): not checked.
            written: names of the tensors that each call gives: every output, and inputs that are elsewhere each time.

        Raises:
            InputError: there are more rows than a kernel can count.
            DeviceError: a weight by columns lies otherwise.
        """
        if rows > MOST_ROWS:
            raise InputError(f"{rows} rows are more than {MOST_ROWS}", "give the batch in parts")
        told = {name: self.pipeline.tensor(name) for name in tensors}
        turned = tuple(name for name, t in tensors.items() if not in_place(t, told[name]))
        odd = next((t.name for t in self.pipeline.tensors if t.by_columns and t.name in {*turned, *written}), "")
        if odd:
            raise DeviceError(f"weight {odd!r} does not lie by columns, as kernels were made for", "compile again")
        where = {
            name: Where(t.data_ptr(), t.stride(1), t.shape[0]) if name in turned else _where(in_order(t, told[name]))
            for name, t in tensors.items()
        }
        return Bound(self, where, rows, tuple(written), turned)

    def turner(self, names: tuple[str, ...]) -> Turner:
        """What copies these parameters, which lie transposed."""
        if names not in self._turners:
            self._turners[names] = Turner([self.pipeline.tensor(name) for name in names], self.device)
        return self._turners[names]

    def empty(self, t: Tensor, rows: int, sizes: Mapping[str, int]) -> torch.Tensor:
        return torch.empty(_shape(t, rows, sizes), dtype=TORCH_DTYPES[t.dtype], device=self.device)

    def _checked(
        self, t: Tensor, tensors: Mapping[str, torch.Tensor], rows: int, sizes: Mapping[str, int]
    ) -> torch.Tensor:
        value = tensors.get(t.name)
        if value is None:
            raise InputError(f"tensor {t.name!r} is missing", "give every input and parameter of the pipeline")
        want = _shape(t, rows, sizes)
        if t.role is Role.PARAMETER and t.axes and t.axes[0].size is None:  # a table of any number of rows
            want = (*value.shape[:1], *want[1:])
        if tuple(value.shape) != want or value.dtype != ELEMENT_DTYPES[t.dtype] or value.device != self.device:
            raise InputError(
                f"tensor {t.name!r} is {tuple(value.shape)} {value.dtype} on {value.device}; "
                f"the pipeline wants {want} {ELEMENT_DTYPES[t.dtype]} on {self.device}",
                "convert it before the call",
            )
        if t.role is Role.OUTPUT or (in_place(value, t) if t.by_columns else readable(value, self.pipeline)):
            return value
        if t.by_columns:
            return value.t().clone(memory_format=torch.contiguous_format).t()
        return value.clone(memory_format=torch.contiguous_format)

    def _writable(
        self,
        t: Tensor,
        out: Mapping[str, torch.Tensor],
        rows: int,
        have: Mapping[str, torch.Tensor],
        sizes: Mapping[str, int],
    ) -> torch.Tensor:
        """The output given, or a new one. Tiles are stored while others are still read: the memory must be its own."""
        if t.name not in out:
            return self.empty(t, rows, sizes)
        value = self._checked(t, out, rows, sizes)
        if rows and not addressable(value):
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


class Bound:
    """A compiled pipeline whose tensors lie where they lie. A call gives only those that are new each time.

    What a call enqueues is kept by stream and addresses (``Again``).
    """

    def __init__(
        self,
        compiled: CompiledPipeline,
        where: dict[str, Where],
        rows: int,
        written: tuple[str, ...],
        turned: tuple[str, ...] = (),
    ) -> None:
        self._compiled, self._where, self._rows, self._written = compiled, where, rows, written
        self._features = [compiled.pipeline.tensor(name).features for name in written]
        self._again = Again(compiled.device.index or 0, KEPT)
        self._checked = [launch for launch in compiled.launches if launch.record is not None]
        needed = [launch.kernel.needs_rows for launch in compiled.launches]
        self._is_empty = not needed or (not rows and all(needed))
        self._device = compiled.device.index or 0
        self._turner = compiled.turner(turned) if turned else None

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Enqueue on torch's current stream. The pipeline's device must be the current one.

        Args:
            tensors: those named ``written``, in that order, with contiguous rows.

        Raises:
            QueueTimeout: an earlier launch of this pipeline expired.
        """
        for launch in self._checked:
            launch.check()
        if self._is_empty:
            return
        if self._compiled.buffers:
            tensors = [*tensors, *[self._compiled.empty(t, self._rows, {}) for t in self._compiled.buffers]]
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        key = (stream, *map(_address, tensors))
        self._again.enqueue(key, stream, lambda capture: self._prepared(tensors, stream, capture))

    def _prepared(self, tensors: Sequence[torch.Tensor], stream: int, capture: int) -> list[PreparedLaunch]:
        given = len(self._written)
        where = dict(self._where)
        for name, t, features in zip(self._written, tensors[:given], self._features, strict=True):
            where[name] = Where(t.data_ptr(), _row_stride(t, features), t.shape[0] if t.dim() else 1)
        for buffer, t in zip(self._compiled.buffers, tensors[given:], strict=True):
            where[buffer.name] = _where(t)
        turning: list[PreparedLaunch] = []
        if self._turner is not None:
            copies, turning = self._turner.prepare(where, stream, capture)
            where |= copies
        launches = self._compiled.launches
        return [*turning, *(p for x in launches for p in x.prepare(where, self._rows, stream, capture))]


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the spans of two tensors meet; columns of one matrix count as meeting."""
    first, second = _span(a), _span(b)
    return first[0] < second[1] and second[0] < first[1]


def _span(t: torch.Tensor) -> tuple[int, int]:
    if t.numel() == 0:
        return 0, 0
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def readable(t: torch.Tensor, pipeline: Pipeline) -> bool:
    """Whether a pipeline's kernels can read a tensor in place. Those of ragged ones load as many bytes at once as a
    row's width allows: rows that lie apart start on 16 bytes, and what has more dimensions is contiguous."""
    if not pipeline.ragged or not addressable(t):
        return addressable(t)
    return t.is_contiguous() or (t.dim() == 2 and t.stride(0) * t.element_size() % 16 == 0)


def in_order(t: torch.Tensor, of: Tensor) -> torch.Tensor:
    """``t`` with its contiguous dimension last."""
    return t.t() if of.by_columns else t


def in_place(t: torch.Tensor, of: Tensor) -> bool:
    """Whether kernels read ``t`` where it lies, in the order that the pipeline says ``of`` it."""
    return addressable(in_order(t, of))


def addressable(t: torch.Tensor) -> bool:
    """Whether kernels can read it in place; views at odd addresses or strides are copied instead."""
    if not t.is_floating_point():  # an index: read one by one
        return t.dim() == 1 and (t.stride(0) == 1 or t.shape[0] < 2)
    if t.data_ptr() % 16:
        return False
    if t.dim() == 0:
        return True
    if t.shape[-1] > 1 and t.stride(-1) != 1:
        return False
    if t.dim() == 1:
        return True
    if t.dim() == 4:  # pictures: a pixel's place is computed
        return t.is_contiguous()
    if t.dim() == 2 and t.shape[0] < 2:
        return True
    row = t.stride(0) * t.element_size()
    # Rows that bulk copies address start on 16 bytes; rows of odd widths are read element by element.
    return t.stride(0) >= t.shape[-1] and (row % 16 == 0 or t.shape[-1] * t.element_size() % 16 != 0)
