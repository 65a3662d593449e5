"""Runs one region: arguments bound to a pipeline's tensors, the kernels or the reference machine, results shaped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from tilestream.dtypes import TORCH_DTYPES
from tilestream.emitter import Steps
from tilestream.errors import InputError
from tilestream.ir import Pipeline
from tilestream.lower import Operand, Region, Result
from tilestream.modes import real
from tilestream.stopwatch import timed
from tilestream.target import Target

Execute = Callable[[Mapping[str, torch.Tensor], int], Mapping[str, torch.Tensor]]
"""Tensors of a pipeline (inputs ``[rows, features]``, parameters as declared) and the rows; returns its outputs."""

_executables: dict[tuple[Pipeline, str, torch.device], Execute] = {}


def executable(pipeline: Pipeline, target: Target) -> Execute:
    """What runs ``pipeline``; built once a process, since the number of rows is not part of it.

    Raises:
        CompileError: NVRTC is missing or refuses a kernel.
        DeviceError: the GPU cannot hold the pipeline.
    """
    key = (pipeline, target.kind, target.device)
    if key not in _executables:
        with timed("kernels"), real(target.device):
            _executables[key] = _kernels(pipeline, target) if target.kind == "cuda" else _reference(pipeline)
    return _executables[key]


def build_ahead(pipelines: Sequence[Pipeline], target: Target) -> None:
    """Begin to compile the kernels of all of them, side by side."""
    if target.kind == "cuda":
        from tilestream import cuda

        with timed("kernels"):
            cuda.start(pipelines)


def built(pipeline: Pipeline, target: Target, timeout_s: float | None) -> bool:
    """Whether ``executable`` need not wait for a compiler, once up to ``timeout_s`` seconds have passed.

    Raises:
        CompileError: as ``executable``.
    """
    if target.kind != "cuda":
        return True
    from tilestream import cuda

    with timed("kernels"):
        return cuda.ready(pipeline, timeout_s)


def _kernels(pipeline: Pipeline, target: Target) -> Execute:
    from tilestream import cuda

    return cuda.build(pipeline, target.device)


def _reference(pipeline: Pipeline) -> Execute:
    from tilestream import reference

    def execute(tensors: Mapping[str, torch.Tensor], rows: int) -> Mapping[str, torch.Tensor]:
        home = next(iter(tensors.values())).device
        found = reference.run(pipeline, {name: t.cpu() for name, t in tensors.items()})
        return {name: t.to(home) for name, t in found.items()}

    return execute


@dataclass(frozen=True)
class RegionCall:
    """Arguments in, pipeline, results out. Rows are read from the arguments, so any number runs."""

    region: Region
    execute: Execute

    def __call__(self, values: Sequence[Any]) -> list[torch.Tensor]:
        """Run on the values of ``region.arguments``.

        Raises:
            InputError: a tensor's dtype, device or size is not what was compiled.
        """
        region = self.region
        tensors: dict[str, torch.Tensor] = {}
        rows = -1
        for operand in region.inputs:
            tensor = self._bind(operand, values)
            if rows not in (-1, tensor.shape[0]):
                raise InputError(
                    f"{region.name}: input {operand.tensor!r} has {tensor.shape[0]} rows, others {rows}",
                    "give inputs of one batch",
                )
            rows = tensor.shape[0]
            tensors[operand.tensor] = tensor
        sizes = self._sizes(values)
        if rows == 0:
            return [self._empty(result, sizes) for result in region.results]
        for operand in region.parameters:
            tensors[operand.tensor] = self._bind(operand, values)
        found = self.execute(tensors, rows)
        return [shaped(found[r.tensor], r, sizes) for r in region.results]

    def _bind(self, operand: Operand, values: Sequence[Any]) -> torch.Tensor:
        tensor = values[operand.index]
        if tensor.dtype != operand.dtype or tensor.device.type != self.region.device.type:
            raise InputError(
                f"{self.region.name}: {operand.tensor!r} is {tensor.dtype} on {tensor.device}, "
                f"compiled for {operand.dtype} on {self.region.device}",
                "call torch.compile again for the new kind of input",
            )
        return bind(tensor, operand.steps) if operand.steps else ready(tensor)

    def _sizes(self, values: Sequence[Any]) -> dict[sympy.Symbol, int]:
        return {
            symbol: int(values[index]) if dim < 0 else values[index].shape[dim]
            for symbol, index, dim in self.region.symbols
        }

    def _empty(self, result: Result, sizes: Mapping[sympy.Symbol, int]) -> torch.Tensor:
        dtype = TORCH_DTYPES[self.region.program.tensor(result.tensor).dtype]
        return torch.empty(concrete(result.shape, sizes, 0), dtype=dtype, device=self.region.device)


def bind(tensor: torch.Tensor, steps: Steps) -> torch.Tensor:
    """Apply the steps of an operand, and make the result ``ready``."""
    for what, *numbers in steps:
        if what == "t":
            tensor = tensor.t()
        elif what == "matrix":
            tensor = tensor[0]
        elif what == "rows":
            first, last = numbers
            tensor = tensor[int(first) : int(last)]
        elif what == "flatten":
            features = int(numbers[0])
            tensor = tensor.reshape(tensor.numel() // features, features)
        elif what == "vector":
            tensor = tensor.reshape(int(numbers[0]))
        elif what == "rstd":
            tensor = torch.rsqrt(tensor.float() + float(numbers[0]))
        else:
            tensor = tensor.reshape(())
    return ready(tensor)


def ready(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor contiguous, and on a GPU aligned to 16 bytes for TMA: itself, or a copy."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.is_cuda and tensor.data_ptr() % 16 else tensor


def concrete(shape: tuple[int | sympy.Expr, ...], sizes: Mapping[sympy.Symbol, int], elements: int) -> tuple[int, ...]:
    """The shape for the sizes of this call; one dimension that no argument tells is inferred from ``elements``."""
    dims = [d if isinstance(d, int) else _size(d, sizes) for d in shape]
    if dims.count(None) > 1:
        raise InputError(f"the result's shape {shape} cannot be told from the arguments", "use static shapes")
    known = 1
    for dim in dims:
        known *= 1 if dim is None else dim
    return tuple((elements // known if known else 0) if d is None else d for d in dims)


def _size(dim: sympy.Expr, sizes: Mapping[sympy.Symbol, int]) -> int | None:
    if isinstance(dim, sympy.Symbol):
        return sizes.get(dim)
    found = dim.subs({symbol: sympy.Integer(size) for symbol, size in sizes.items()})
    return int(found) if isinstance(found, sympy.Integer) else None


def shaped(tensor: torch.Tensor, result: Result, sizes: Mapping[sympy.Symbol, int]) -> torch.Tensor:
    """An output ``[rows, features]`` in the shape and memory order that the model expects."""
    tensor = tensor.view(concrete(result.shape, sizes, tensor.numel()))
    if result.order is None:
        return tensor
    return torch.empty_permuted(tensor.shape, result.order, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
