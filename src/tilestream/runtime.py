"""Runs a region by its plan: kernels, the reference machine, or the fallback."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from tilestream import fallback
from tilestream.analysis import RegionAnalysis
from tilestream.devices import Device
from tilestream.dtypes import TORCH_DTYPES
from tilestream.emitter import Steps
from tilestream.errors import InputError, PlanError, TilestreamError
from tilestream.ir import Pipeline
from tilestream.lower import Operand, Region, Result
from tilestream.modes import real
from tilestream.options import Options
from tilestream.plan_cache import cached_plan
from tilestream.planner import Candidate, Measure, Plan, summary
from tilestream.stopwatch import timed
from tilestream.target import Target

log = logging.getLogger(__name__)

Execute = Callable[[Mapping[str, torch.Tensor], int], Mapping[str, torch.Tensor]]
"""Tensors of a pipeline (inputs ``[rows, features]``, parameters as declared) and the rows; returns its outputs."""

GROWTH = 4
"""A region is planned anew where its rows have grown by more than this factor: more stages may pay then."""

_executables: dict[tuple[Pipeline, str, torch.device], Execute] = {}
_plans: dict[tuple[Pipeline, Device, Options], list[Plan]] = {}
_analyses: list[RegionAnalysis] = []


def analyses() -> list[RegionAnalysis]:
    """The regions that this process has compiled so far, with the plans that they really use."""
    return list(_analyses)


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


def _kernels_kept(options: Options, target: Target) -> contextlib.AbstractContextManager[None]:
    """Where the options say that kernels are kept, for those built inside."""
    if target.kind != "cuda":
        return contextlib.nullcontext()
    from tilestream.cuda import cache

    return cache.keep_in(options.cache_folder if options.cache else None)


def _reference(pipeline: Pipeline) -> Execute:
    from tilestream import reference

    def execute(tensors: Mapping[str, torch.Tensor], rows: int) -> Mapping[str, torch.Tensor]:
        home = next(iter(tensors.values())).device
        found = reference.run(pipeline, {name: t.cpu() for name, t in tensors.items()})
        return {name: t.to(home) for name, t in found.items()}

    return execute


def plan(region: Region, options: Options, target: Target) -> Plan:
    """The plan of a region: from this process, from the disk, or made now (and measured, on a GPU).

    A plan serves every number of rows up to ``GROWTH`` times its own: a new batch builds no new kernel.

    Raises:
        PlanError: no pipeline is legal under the options.
    """
    made = _plans.setdefault((region.program, target.hardware, options), [])
    near = [p for p in made if GROWTH * p.rows >= region.rows]
    if near:
        return min(near, key=lambda p: abs(math.log(p.rows / region.rows)))
    measure: Measure | None = None
    if target.kind == "cuda" and options.measure and not torch.cuda.is_current_stream_capturing():
        from tilestream.measure import Measurer

        measure = Measurer(region, target, against=options.strategy == "auto")
    made.append(cached_plan(region.program, region.rows, target.hardware, options, measure))
    return made[-1]


def choose(found: Plan, target: Target) -> Candidate:
    """The candidate that runs. The reference machine was asked for, so it never gives way to Inductor."""
    if target.kind != "reference" or found.chosen.pipeline is not None:
        return found.chosen
    legal = [c for c in found.candidates if c.pipeline is not None and not c.rejected]
    if not legal:
        reasons = "; ".join(f"{c.name}: {c.rejected}" for c in found.candidates if c.rejected)
        raise PlanError(f"{found.region} has no legal pipeline ({reasons})", "allow another strategy or device")
    return min(legal, key=lambda c: c.predicted_us or float("inf"))


def compile_region(region: Region, options: Options, target: Target) -> fallback.Call | None:
    """A callable for a region, which takes its arguments and returns its results; ``None`` if Inductor runs it.

    What cannot be planned or built is announced; with ``fallback=False`` it is an error.

    Raises:
        TilestreamError: with ``fallback=False``: why the region cannot run as a pipeline.
    """
    problem, found, pipeline = "", None, None
    if region.rows == 0:
        return fallback.eager(region.graph)  # nothing to plan for: every result is empty
    try:
        with _kernels_kept(options, target):
            found = plan(region, options, target)
            pipeline = choose(found, target).pipeline
            if pipeline is None and not options.fallback:
                raise PlanError(f"{region.name}: no pipeline is faster than Inductor", "allow fallback=True")
            if pipeline is not None:
                call = RegionCall(region, executable(pipeline, target))
                _analyses.append(_analysis(region, found))
                return call
    except TilestreamError as failure:
        if not options.fallback:
            raise
        problem = str(failure)
    why = problem or (f"it is the fastest ({summary(found)})" if found is not None else "no plan")
    fallback.announce(f"{region.name} ({region.sources[0] if region.sources else '?'}) goes to Inductor: {why}")
    _analyses.append(_analysis(region, found, problem))
    return None


def _analysis(region: Region, found: Plan | None, problem: str = "") -> RegionAnalysis:
    return RegionAnalysis(region.name, 0, region.rows, region.operators, region.sources, region.program, found, problem)


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
