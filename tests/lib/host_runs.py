"""Kernels on the host against the reference machine, and kernels of operators against what they mean."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from random_pipelines import tensors_for

from tilestream import reference
from tilestream.cuda.host.build import HostRace, HostRun, HostTrap, Mutation, run_on_host
from tilestream.errors import QueueTimeout
from tilestream.ir.pipeline import Pipeline

# Beyond the reference machine's own error, relative to the norm: half an ulp of the result. Products of fp32 truncate
# their operands to ten bits.
CLOSE = {"bf16": 2**-9, "f16": 2**-12, "f32": 2**-17}
TF32 = 2**-8

gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

# What a broken protocol shows, but for a wrong value: a race, or a wait that expires, in the machine or for a flag.
# Which of them it is depends on the threads' timing.
CAUGHT = (HostRace, HostTrap, QueueTimeout)


def check(pipeline: Pipeline, rows: int, folder: Path, seed: int = 0, **options) -> None:
    """The kernels' error against float64 is that of the reference machine at the same precision, or nearly."""
    tensors = tensors_for(pipeline, rows, seed)
    got = run_on_host(pipeline, tensors, HostRun(folder=folder, **options))
    working = reference.run(pipeline, tensors)
    exact = reference.run(pipeline, tensors, precision="float64")
    weights = [pipeline.tensor(op.params[0]) for s in pipeline.stages for op in s.ops if op.kind == "linear"]
    for name, value in got.items():
        norm = exact[name].double().norm().clamp_min(1e-30)
        error = float((value.double() - exact[name].double()).norm() / norm)
        allowed = 2 * float((working[name].double() - exact[name].double()).norm() / norm)
        close = TF32 if any(w.dtype == "f32" for w in weights) else CLOSE[pipeline.tensor(name).dtype]
        assert error <= allowed + close, f"{name}: error {error:.2e}, the reference machine's is {allowed / 2:.2e}"


def is_caught(
    is_right: Callable[[HostRun], bool], header: str, old: str, new: str, races: bool = False, limit_s: float = 240.0
) -> bool:
    """Whether a kernel shows that ``new`` stands for ``old`` in its header: by what it makes, or as ``CAUGHT``.

    Args:
        is_right: runs it, and says whether what it made is right. races: under ThreadSanitizer.
    """
    options = HostRun(sanitize=races, mutations=(Mutation(header, old, new),), limit_s=limit_s)
    try:
        return not is_right(options)
    except CAUGHT:
        return True


def with_stage(p: Pipeline, **changes) -> Pipeline:
    return p.with_stages((p.stages[0].with_(**changes),))
