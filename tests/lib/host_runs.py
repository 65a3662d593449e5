"""Kernels on the host against the reference machine."""

from __future__ import annotations

from pathlib import Path

from random_pipelines import tensors_for

from tilestream import reference
from tilestream.cuda.host.build import HostRace, HostRun, HostTrap, run_on_host
from tilestream.errors import QueueTimeout
from tilestream.ir.pipeline import Pipeline

# Beyond the reference machine's own error, relative to the norm: half an ulp of the result. Products of fp32 truncate
# their operands to ten bits.
CLOSE = {"bf16": 2**-9, "f16": 2**-12, "f32": 2**-17}
TF32 = 2**-8


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


def with_stage(p: Pipeline, **changes) -> Pipeline:
    return p.with_stages((p.stages[0].with_(**changes),))
