"""Runs a pipeline on the GPU with and without stamps: its time, and its timeline."""

from __future__ import annotations

import torch

from tilestream import cuda
from tilestream.cuda.recording import Recording, of_logs
from tilestream.errors import InputError
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.pipeline import Pipeline, Role
from tilestream.run.timing import timed_side_by_side


def record(pipeline: Pipeline, rows: int, device: torch.device | None = None, seed: int = 0) -> Recording:
    """Run ``pipeline`` over ``rows`` rows of random numbers on a GPU, with and without stamps, at settled clocks.

    Raises:
        InputError: there are no rows.
        DeviceError, CompileError, VerifyError: as ``cuda.build``.
    """
    if rows <= 0:
        raise InputError(f"{rows} rows leave nothing to record", "give at least one row")
    plain, stamped = (cuda.build(pipeline, device, stamped=on) for on in (False, True))
    given = random_tensors(pipeline, rows, plain.device, seed)
    time_us, stamped_us = timed_side_by_side([lambda: plain(given, rows), lambda: stamped(given, rows)])
    name = torch.cuda.get_device_name(plain.device)
    return of_logs(pipeline, stamped.logs(), name, time_us, stamped_us)


def random_tensors(pipeline: Pipeline, rows: int, device: torch.device, seed: int = 0) -> dict[str, torch.Tensor]:
    """Inputs ``[rows, features]`` and parameters: normal numbers; weights keep activations of order one."""
    generator = torch.Generator(device).manual_seed(seed)
    made = {}
    for t in pipeline.tensors:
        if t.role is Role.OUTPUT:
            continue
        shape = (rows, t.features) if t.role is Role.INPUT else t.shape
        scale = t.features**-0.5 if t.role is Role.PARAMETER and len(t.shape) == 2 else 1.0
        made[t.name] = (scale * torch.randn(shape, device=device, generator=generator)).to(TORCH_DTYPES[t.dtype])
    return made
