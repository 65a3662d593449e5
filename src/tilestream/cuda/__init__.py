"""The CUDA back end: pipelines to kernels for Hopper, compiled by NVRTC at run time."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from tilestream.cuda.cache import begun, compile_ahead, compiled
from tilestream.cuda.compile import KernelReport
from tilestream.cuda.workers import NOW
from tilestream.devices import get
from tilestream.errors import DeviceError, TilestreamError, VerifyError
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.families import kernel_of, why_no_kernel
from tilestream.kernels.fits import stages_fit_sm
from tilestream.kernels.parts.source import KernelSource

if TYPE_CHECKING:
    from tilestream.cuda.launch import CompiledPipeline

SMALLEST = "h100"  # of the devices that kernels are made for; a CTA has as much on all of them

__all__ = ["KernelReport", "KernelSource", "available", "build", "compile_only", "first_ready", "sources", "start"]


def available() -> str:
    """Empty if this machine can run our kernels, else why not."""
    if not torch.cuda.is_available():
        return "no CUDA GPU is visible to torch"
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        return f"{torch.cuda.get_device_name()} is sm_{major}{minor}; the kernels are for sm_90a (H100, H200)"
    return ""


@lru_cache(maxsize=256)
def sources(pipeline: Pipeline, stamped: bool = False, annotate: bool = False) -> tuple[KernelSource, ...]:
    """The CUDA source of each launch.

    Args:
        annotate: with comments for people, where a kernel goes step by step.

    Raises:
        VerifyError: the pipeline is of a kind that no kernel is made of, or one does not fit.
    """
    reason = why_no_kernel(pipeline)
    if reason:
        what = f"no kernel can be made of pipeline {pipeline.name!r}: {reason}"
        raise VerifyError(what, "run it by tilestream.reference")
    launches = cut_at_dram(pipeline)
    for launch in launches:
        stages_fit_sm(launch, get(SMALLEST))
    return tuple(kernel_of(launch).source(stamped, annotate) for launch in launches)


def compile_only(pipeline: Pipeline) -> list[KernelReport]:
    """Compile every launch for sm_90a; needs NVRTC, no GPU.

    Raises:
        VerifyError, CompileError: naming the cause and the remedy.
    """
    start([pipeline])
    return [compiled(source) for source in sources(pipeline)]


def start(pipelines: Sequence[Pipeline], stamped: bool = False, rank: int = 0) -> None:
    """Begin to compile them side by side, in the background; what is wrong with one is said when it is asked for.

    Args:
        rank: those of a lower one are compiled first.
    """
    wanted: list[KernelSource] = []
    for pipeline in pipelines:
        with contextlib.suppress(TilestreamError):
            wanted += sources(pipeline, stamped)
    compile_ahead(wanted, rank)


def first_ready(groups: Sequence[Sequence[Pipeline]], timeout_s: float | None = None, rank: int = NOW) -> int | None:
    """The first group whose pipelines are all compiled, once there is one; None if there is none after ``timeout_s``.

    A pipeline that cannot be compiled counts as one that is: who builds it is told why.

    Args:
        rank: how soon they are wanted from now on.
    """
    end = math.inf if timeout_s is None else time.monotonic() + timeout_s
    waiting: list[list[Future[KernelReport]]] = []
    for index, group in enumerate(groups):
        waiting.append(_waiting(group, rank))
        if all(made.done() for made in waiting[-1]):
            return index  # those behind it need not be asked for
    while True:
        waiting = [[made for made in group if not made.done()] for group in waiting]
        for index, group in enumerate(waiting):
            if not group:
                return index
        left_s = end - time.monotonic()
        if left_s <= 0 or not waiting:
            return None
        wait({made for group in waiting for made in group}, None if math.isinf(left_s) else left_s, FIRST_COMPLETED)


def _waiting(pipelines: Sequence[Pipeline], rank: int) -> list[Future[KernelReport]]:
    found: list[Future[KernelReport]] = []
    for pipeline in pipelines:
        with contextlib.suppress(TilestreamError):
            found += begun(sources(pipeline), rank)
    return found


def build(
    pipeline: Pipeline, device: torch.device | None = None, stamped: bool = False, dependent: bool = False
) -> CompiledPipeline:
    """A ``CompiledPipeline`` on ``device`` (torch's current one by default).

    Args:
        stamped: its kernels write down what their warps do when; ``CompiledPipeline.logs`` reads it. Only row streams
            have stamps.
        dependent: kernels that can (``Kernel.starts_early``) start, and load weights, while the kernel before them
            still runs (programmatic dependent launch); for callers who know that it writes none of the parameters.

    Raises:
        DeviceError: no GPU, one that is not Hopper, or one too small for the pipeline.
        VerifyError, CompileError: as ``compile_only``.
    """
    if why := available():
        raise DeviceError(f"target 'cuda' cannot be used: {why}", "use target='reference' or 'auto'")
    where = (
        device if device is not None and device.index is not None else torch.device("cuda", torch.cuda.current_device())
    )
    return _build(pipeline, where, stamped, dependent)


@lru_cache(maxsize=256)
def _build(pipeline: Pipeline, device: torch.device, stamped: bool, dependent: bool) -> CompiledPipeline:
    from tilestream.cuda.launch import CompiledPipeline
    from tilestream.cuda.one_launch import Launch

    with torch.cuda.device(device):
        start([pipeline], stamped)
        launches = [
            Launch(kernel_of(s.pipeline), s, compiled(s), device, dependent) for s in sources(pipeline, stamped)
        ]
        return CompiledPipeline(pipeline, launches, device)
