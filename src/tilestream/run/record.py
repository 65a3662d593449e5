"""Runs a pipeline on the GPU with and without stamps: its time, and its timeline."""

from __future__ import annotations

import torch

from tilestream import cuda
from tilestream.cuda.recording import Recording, of_logs
from tilestream.errors import InputError
from tilestream.ir.dtypes import INDEX_DTYPES, TORCH_DTYPES
from tilestream.ir.pipeline import Pipeline, Role
from tilestream.ir.taps import pictures
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
    """Inputs ``[rows, features]`` and parameters: normal numbers; weights keep activations of order one.

    Indices are of all rows of their tables alike; a table whose size is read at the call has ``rows``. Of
    pictures there are as many as make so many rows.
    """
    generator = torch.Generator(device).manual_seed(seed)
    made = {}
    pixels = pictures(pipeline)
    indexed = [op for stage in pipeline.stages for op in stage.ops if op.index]
    for t in pipeline.tensors:
        if t.role is Role.OUTPUT:
            continue
        shape = tuple(rows // pixels.get(t.name, 1) if a.size is None else a.size for a in t.axes)
        if t.dtype in INDEX_DTYPES:
            tables = [pipeline.tensor(op.params[0]) for op in indexed if op.index == t.name]
            least = min((x.axes[0].size or rows for x in tables), default=1)
            made[t.name] = torch.randint(least, shape, device=device, generator=generator, dtype=INDEX_DTYPES[t.dtype])
            continue
        table = any(op.params[0] == t.name for op in indexed)
        scale = t.features**-0.5 if t.role is Role.PARAMETER and len(t.shape) == 2 and not table else 1.0
        made[t.name] = (scale * torch.randn(shape, device=device, generator=generator)).to(TORCH_DTYPES[t.dtype])
    return made
