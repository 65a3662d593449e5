"""The CUDA back end: pipelines to kernels for Hopper, compiled by NVRTC at run time."""

from __future__ import annotations

from functools import lru_cache

import torch

from tilestream.cuda.cache import compiled
from tilestream.cuda.compile import KernelReport
from tilestream.cuda.emit import KernelSource, emit
from tilestream.errors import DeviceError
from tilestream.ir import Pipeline

__all__ = ["KernelReport", "KernelSource", "available", "build", "compile_only", "emit", "sources"]


def available() -> str:
    """Empty if this machine can run our kernels, else why not."""
    if not torch.cuda.is_available():
        return "no CUDA GPU is visible to torch"
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        return f"{torch.cuda.get_device_name()} is sm_{major}{minor}; the kernels are for sm_90a (H100, H200)"
    return ""


def sources(pipeline: Pipeline) -> list[KernelSource]:
    """The CUDA source of each launch."""
    return [emit(launch) for launch in pipeline.launches()]


def compile_only(pipeline: Pipeline) -> list[KernelReport]:
    """Compile every launch for sm_90a; needs NVRTC, no GPU.

    Raises:
        VerifyError, CompileError: naming the cause and the remedy.
    """
    return [compiled(source) for source in sources(pipeline)]


def build(pipeline: Pipeline, device: torch.device | None = None):
    """A ``CompiledPipeline`` on ``device`` (torch's current one by default).

    Raises:
        DeviceError: no GPU, one that is not Hopper, or one too small for the pipeline.
        VerifyError, CompileError: as ``compile_only``.
    """
    if why := available():
        raise DeviceError(f"target 'cuda' cannot be used: {why}", "use target='reference' or 'auto'")
    where = (
        device if device is not None and device.index is not None else torch.device("cuda", torch.cuda.current_device())
    )
    return _build(pipeline, where)


@lru_cache(maxsize=256)
def _build(pipeline: Pipeline, device: torch.device):
    from tilestream.cuda.launch import CompiledPipeline, Launch

    with torch.cuda.device(device):
        return CompiledPipeline(pipeline, [Launch(s, compiled(s), device) for s in sources(pipeline)], device)
