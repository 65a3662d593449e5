"""Runs a region. What can be said once for tensors that lie where they lay before is said once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import (
    _empty_strided_cpu,  # pyright: ignore[reportAttributeAccessIssue]
    _empty_strided_cuda,  # pyright: ignore[reportAttributeAccessIssue]
)
from torch._prims_common import make_contiguous_strides_for
from torch.multiprocessing.reductions import StorageWeakRef

from tilestream.announce import announce_failure
from tilestream.errors import InputError, QueueTimeout
from tilestream.graph.lowering import PARTS, Steps
from tilestream.graph.real import real
from tilestream.graph.region import Operand
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.float32 import LARGEST, PAIRS
from tilestream.ir.pipeline import Pipeline, Role
from tilestream.ir.taps import rows_given
from tilestream.run.executable import Enqueue, Executable, executable, plain
from tilestream.run.spec import TENSOR, RegionSpec

KEPT = 512
"""Sets of addresses that a region remembers; fifteen equal blocks of a model are one region at fifteen of them."""

Build = Callable[[Pipeline], Executable]
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Sizes, strides and dtype of a result."""

_address = torch.Tensor.data_ptr


class RegionCall:
    """A region, ready to be called with its tensors and its sizes; any number of rows.

    Args:
        build: makes what runs the pipeline, at the first call.
        rescue: whether plain torch operators run the region where that fails.
    """

    def __init__(self, spec: RegionSpec, device: torch.device, build: Build | None = None, rescue: bool = True) -> None:
        self.spec, self.device, self._rescue = spec, device, rescue
        self._build = build or partial(executable, kind=spec.target, device=device)
        self._early: Build | None = None
        self._remembers = spec.target == "cuda"
        if spec.early and build is None and self._remembers:
            self._early = partial(executable, kind=spec.target, device=device, early=True)
        self._bound: dict[tuple[Any, ...], Bound] = {}
        self._copies = Copies()
        tensors = [i for i, kind in enumerate(spec.arguments) if kind == TENSOR]
        self._position = {argument: position for position, argument in enumerate(tensors)}

    def __call__(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int] = ()) -> list[torch.Tensor]:
        """The region's results.

        An exception of ours, as where no kernel can be built in this process, costs the pipeline and not the call:
        the region then runs as plain torch operators, which is announced.

        Raises:
            InputError: a tensor's dtype, device or size is not what was compiled.
            QueueTimeout: an earlier launch of this region expired: its results are lost.
        """
        key: tuple[Any, ...] = tuple(map(_address, tensors))
        if not self.spec.is_static:  # else two calls differ in addresses alone
            key = (*key, *sizes, *[(t.shape, t.stride()) for t in tensors])
        bound = self._bound.get(key)
        if bound is None or (bound.constants and not bound.holds(tensors)):
            bound = self._bind(tensors, sizes)
            if self._remembers:
                if len(self._bound) >= KEPT:
                    self._bound.clear()
                self._bound[key] = bound
        return bound(tensors)

    def on_values(self, values: Sequence[Any]) -> list[torch.Tensor]:
        """The same for arguments in order, tensors and sizes mixed."""
        tensors = [v for v, kind in zip(values, self.spec.arguments, strict=True) if kind == TENSOR]
        sizes = [v for v, kind in zip(values, self.spec.arguments, strict=True) if kind != TENSOR]
        return self(tensors, sizes)

    def _bind(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> Bound:
        values = self.spec.merged(tensors, sizes)
        with real(self.device):
            try:
                return self._bind_with(self._build, values)
            except (InputError, QueueTimeout):
                raise
            except Exception as failure:
                if not self._rescue:
                    raise
                announce_failure("a region runs as plain torch operators", failure)
                self._build, self._remembers = plain, False
                return self._bind_with(self._build, values)

    def _bind_with(self, build: Build, values: Sequence[Any]) -> Bound:
        spec = self.spec
        resting: dict[str, torch.Tensor] = {}
        moving: dict[str, Operand] = {}
        constants: list[tuple[int, Copy]] = []
        for operand in (*spec.inputs, *spec.parameters):
            self._check(operand, values[operand.index])
            viewed = apply(values[operand.index], operand.steps)
            if (copy := self._copy(operand, values[operand.index], viewed)) is not None:
                resting[operand.tensor] = copy.tensor
                constants.append((self._position[operand.index], copy))
                continue
            resting[operand.tensor] = viewed
            rests = self._remembers and is_view_of(viewed, values[operand.index])
            if not (rests and _kernels_can_read(viewed, spec.pipeline, operand.tensor)):
                moving[operand.tensor] = operand
        rows = rows_given(spec.pipeline, lambda name: resting[name].shape[0])
        written = (*[r.tensor for r in spec.results], *moving)
        fixed = {name: t for name, t in resting.items() if name not in moving}
        if self._early is not None and build is self._build and self._rest(fixed):
            build = self._early
        enqueue = build(spec.pipeline).bind(fixed, rows, written)
        shapes = spec.shapes(*[int(n) for n in spec.read_sizes(values)])
        dtypes = [TORCH_DTYPES[spec.pipeline.tensor(r.tensor).dtype] for r in spec.results]
        return Bound(
            layouts=tuple(
                (shape, make_contiguous_strides_for(shape), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)
            ),
            orders=tuple(r.order for r in spec.results),
            allocate=_empty_strided_cuda if self.device.type == "cuda" else _empty_strided_cpu,
            gpu=self.device.index if self.device.type == "cuda" else None,
            moving=tuple((self._position[o.index], o.steps) for o in moving.values()),
            enqueue=enqueue,
            reorders=any(r.order is not None for r in spec.results),
            constants=tuple(constants),
        )

    def _rest(self, fixed: Mapping[str, torch.Tensor]) -> bool:
        """Whether kernels read every parameter where it lies: a launch in front that copies one writes it."""
        from tilestream.cuda.launch import in_place

        told, names = self.spec.pipeline.tensor, [o.tensor for o in self.spec.parameters]
        return all(name in fixed and in_place(fixed[name], told(name)) for name in names)

    def _copy(self, operand: Operand, weight: torch.Tensor, viewed: torch.Tensor) -> Copy | None:
        """The one copy of a weight that does not change and lies as kernels cannot read it; None of all others."""
        if not (self.spec.constant and self._remembers) or operand not in self.spec.parameters:
            return None
        from tilestream.cuda.launch import addressable

        if addressable(viewed) and operand.steps[-1:] != PARTS:
            return None
        return self._copies.of(operand.tensor, weight, lambda: ready(viewed))

    def _check(self, operand: Operand, tensor: torch.Tensor) -> None:
        if tensor.dtype != operand.dtype or tensor.device != self.device:
            raise InputError(
                f"tensor {operand.tensor!r} of a region is {tensor.dtype} on {tensor.device}, "
                f"compiled for {operand.dtype} on {self.device}",
                "call torch.compile again for the new kind of input",
            )


@dataclass(frozen=True)
class Bound:
    """A region at one set of addresses: a call allocates the results and enqueues.

    ``gpu`` is the device's number, None on a CPU. ``moving`` are operands that are copied at every call, since their
    rows do not lie as kernels read them: position among the tensors, and steps. ``constants`` were copied once.
    """

    layouts: tuple[Layout, ...]
    orders: tuple[tuple[int, ...] | None, ...]
    allocate: Callable[..., torch.Tensor]
    gpu: int | None
    moving: tuple[tuple[int, Steps], ...]
    enqueue: Enqueue
    reorders: bool
    constants: tuple[tuple[int, Copy], ...] = ()

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the copies of constants are still those of what lies at their addresses."""
        return all(copy.is_of(tensors[at]) for at, copy in self.constants)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self.gpu is not None and self.gpu != torch._C._cuda_getDevice():
            # Memory, kernels and streams are those of the tensors' device, as with torch's own operators.
            with torch.cuda.device(self.gpu):
                return self(tensors)
        results = [self.allocate(*layout) for layout in self.layouts]
        if self.moving:
            self.enqueue([*results, *copied([(tensors[at], steps) for at, steps in self.moving])])
        else:
            self.enqueue(results)
        if self.reorders:
            return [r if order is None else ordered(r, order) for r, order in zip(results, self.orders, strict=True)]
        return results


_STEPS: dict[str, Callable[..., torch.Tensor]] = {
    "t": torch.Tensor.t,
    "matrix": lambda x: x[0],
    "rows": lambda x, first, last: x[first:last],
    "flatten": lambda x, features: x.reshape(x.numel() // features, features),
    "index": lambda x: x.reshape(-1),
    "features": lambda x, *sizes: x.reshape(x.shape[0], *sizes),
    "vector": torch.Tensor.reshape,
    "taps": lambda x: x.permute(0, 2, 3, 1).reshape(x.shape[0], -1),
    "parts": lambda x: weight_parts((x,))[0],
    "rstd": lambda x, eps: torch.rsqrt(x.float() + eps),
    "scalar": lambda x: x.reshape(()),
}
"""What ``lowering.Binding`` says of each."""


def apply(tensor: torch.Tensor, steps: Steps) -> torch.Tensor:
    """The steps of an operand; a view where one is possible."""
    for what, *numbers in steps:
        tensor = _STEPS[str(what)](tensor, *numbers)
    return tensor


def copied(operands: Sequence[tuple[torch.Tensor, Steps]]) -> list[torch.Tensor]:
    """Operands behind their steps, as kernels read them; the parts of all weights by one kernel."""
    split = [k for k, (_, steps) in enumerate(operands) if steps[-1:] == PARTS]
    made = dict(zip(split, weight_parts([apply(operands[k][0], operands[k][1][:-1]) for k in split]), strict=True))
    return [made[k] if k in made else ready(apply(*operand)) for k, operand in enumerate(operands)]


def ready(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor contiguous, and on a GPU aligned to 16 bytes for TMA: itself, or a copy."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.is_cuda and tensor.data_ptr() % 16 else tensor


def is_view_of(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether two tensors share their memory, so that what is written to the one is read from the other."""
    return view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


def _kernels_can_read(tensor: torch.Tensor, pipeline: Pipeline, name: str) -> bool:
    """Whether a tensor needs no copy at every call but one that the launches themselves make."""
    from tilestream.cuda.launch import in_place, readable
    from tilestream.cuda.turn import lies_transposed

    told = pipeline.tensor(name)
    if told.by_columns:
        return in_place(tensor, told)
    parameter = told.role is Role.PARAMETER and not pipeline.ragged
    return readable(tensor, pipeline) or (parameter and lies_transposed(tensor))


def ordered(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """A row-major tensor in the memory order that the model expects."""
    return torch.empty_permuted(tensor.shape, order, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


@dataclass(frozen=True)
class Copy:
    """``tensor`` is a copy of a weight in ``memory`` when torch had counted ``version`` changes of it in place."""

    tensor: torch.Tensor
    memory: StorageWeakRef
    version: int

    def is_of(self, weight: torch.Tensor) -> bool:
        """Whether it still holds what ``weight`` holds, as far as torch can tell: the memory was not freed, which
        another tensor may have now, and nothing was written under torch's eyes, as ``load_state_dict`` does."""
        return not self.memory.expired() and self.version == _version(weight)


class Copies:
    """The copies of a region's weights, by operand and address."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], Copy] = {}

    def of(self, name: str, weight: torch.Tensor, make: Callable[[], torch.Tensor]) -> Copy | None:
        """The copy of ``weight``, made by ``make`` where there is none or it is old; None while a CUDA graph is
        captured, whose memory is its own: the copy then has to be part of the graph."""
        key = (name, weight.data_ptr())
        found = self._kept.get(key)
        if found is not None and found.is_of(weight):
            return found
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        self._kept = {k: c for k, c in self._kept.items() if not c.memory.expired()}
        made = self._kept[key] = Copy(make(), StorageWeakRef(weight.untyped_storage()), _version(weight))
        if weight.is_cuda:
            torch.cuda.current_stream(weight.device).synchronize()  # other streams may read it from now on
        return made


def _version(weight: torch.Tensor) -> int:
    """Changes in place that torch has counted; inference tensors have no count."""
    return 0 if weight.is_inference() else weight._version


def weight_parts(weights: Sequence[Tensor]) -> list[Tensor]:
    """Of each float32 weight [out, in], in any strides, its parts as bf16 [out, 6 in]: those of ``PAIRS`` in order.

    On a GPU all are made by one kernel.
    """
    if weights and weights[0].is_cuda:
        from tilestream.cuda import weight_parts as kernel

        return kernel.made(weights)
    return [_by_torch(w) for w in weights]


def _by_torch(weight: Tensor) -> Tensor:
    rest, parts = weight, []
    for _ in range(2):
        parts.append(rest.clamp(-LARGEST, LARGEST).to(torch.bfloat16))
        rest = rest - parts[-1].float()
    parts.append(rest.to(torch.bfloat16))
    return torch.cat([parts[of_weight] for _, of_weight in PAIRS], 1)
