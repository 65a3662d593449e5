"""What runs a pipeline: compiled kernels, the reference machine, or plain torch operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from tilestream.graph.real import real
from tilestream.ir.pipeline import Pipeline, Role
from tilestream.run.stopwatch import timed

LAST = 1000
"""A rank that hurries nothing."""

Enqueue = Callable[[Sequence[torch.Tensor]], None]
"""Takes the tensors that are new at each call, and writes the outputs among them."""


class Executable(Protocol):
    """Something that runs a pipeline."""

    def bind(self, tensors: Mapping[str, torch.Tensor], rows: int, written: Sequence[str]) -> Enqueue:
        """The pipeline on ``tensors``, which stay where they are.

        Args:
            tensors: inputs ``[rows, features]`` and parameters as declared.
            written: names of the tensors that each call gives: outputs, and inputs that are elsewhere each time.
        """
        ...


_executables: dict[tuple[Pipeline, str, torch.device, bool], Executable] = {}


def executable(pipeline: Pipeline, kind: str, device: torch.device, early: bool = False) -> Executable:
    """What runs ``pipeline`` on ``device``; ``kind`` is ``cuda`` or ``reference``.

    ``early``: kernels may start while the one in front of them still runs, which writes no parameter.

    Built once a process, since neither the number of rows nor where tensors lie is part of it.

    Raises:
        CompileError: NVRTC is missing or refuses a kernel.
        DeviceError: the GPU cannot hold the pipeline.
    """
    key = (pipeline, kind, device, early)
    if key not in _executables:
        with timed("kernels"), real(device):
            _executables[key] = _kernels(pipeline, device, early) if kind == "cuda" else _reference(pipeline)
    return _executables[key]


def build_ahead(pipelines: Sequence[Pipeline], kind: str, rank: int = 0) -> None:
    """Begin to compile the kernels of all of them, side by side; those of a lower ``rank`` first."""
    if kind == "cuda":
        from tilestream import cuda

        with timed("kernels"):
            cuda.start(pipelines, rank=rank)


def unwanted_rest(kind: str) -> AbstractContextManager[None]:
    """Inside, no compilation begins but those that somebody waits for: Inductor's processes have the cores."""
    if kind != "cuda":
        return nullcontext()
    from tilestream.cuda.workers import workers

    return workers().resting()


def first_built(
    groups: Sequence[Sequence[Pipeline]], kind: str, timeout_s: float | None, in_turn: bool = False
) -> int | None:
    """The first group for which ``executable`` need not wait for a compiler, once there is one.

    None where ``timeout_s`` seconds have passed.

    Args:
        in_turn: they are compiled in the order of their ranks; otherwise before all that nobody waits for.
    """
    if kind != "cuda":
        return 0
    from tilestream import cuda

    with timed("kernels"):
        return cuda.first_ready(groups, timeout_s, LAST) if in_turn else cuda.first_ready(groups, timeout_s)


def _kernels(pipeline: Pipeline, device: torch.device, early: bool) -> Executable:
    from tilestream import cuda

    return cuda.build(pipeline, device, dependent=early)


def _reference(pipeline: Pipeline) -> Executable:
    from tilestream import reference

    return Interpreted(pipeline, reference.run)


def plain(pipeline: Pipeline) -> Executable:
    """The pipeline as torch operators on whole tensors."""
    from tilestream.reference.whole import run_whole

    return Interpreted(pipeline, run_whole, on_cpu=False)


class Interpreted:
    """A pipeline executed in Python, by ``run(pipeline, tensors)``."""

    def __init__(self, pipeline: Pipeline, run: Callable[..., Mapping[str, torch.Tensor]], on_cpu: bool = True) -> None:
        self._pipeline, self._run, self._on_cpu = pipeline, run, on_cpu
        self._outputs = [t.name for t in pipeline.by_role(Role.OUTPUT)]

    def bind(self, tensors: Mapping[str, torch.Tensor], rows: int, written: Sequence[str]) -> Enqueue:
        def enqueue(new: Sequence[torch.Tensor]) -> None:
            by_name = dict(zip(written, new, strict=True))
            values = {**tensors, **{name: t for name, t in by_name.items() if name not in self._outputs}}
            if self._on_cpu:
                values = {name: t.cpu() for name, t in values.items()}
            found = self._run(self._pipeline, values)
            for name in self._outputs:
                by_name[name].copy_(found[name].view(by_name[name].shape))

        def zero(new: Sequence[torch.Tensor]) -> None:
            for name, t in zip(written, new, strict=True):
                if name in self._outputs:
                    t.zero_()  # a sum over no rows; results with rows have no elements

        return enqueue if rows else zero
