"""The four ways to run a model that are compared: eager, Inductor, Inductor max-autotune, tilestream."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tilestream.options import Options

ARMS = ("eager", "inductor", "inductor_max_autotune", "tilestream")


@dataclass(frozen=True)
class Arm:
    """``run()`` gives the module's result; ``compile_s`` is how long its first call took, in seconds."""

    name: str
    run: Callable[[], object]
    compile_s: float


def make(
    name: str,
    module: nn.Module,
    inputs: Sequence[object],
    options: Options,
    keywords: Mapping[str, object] | None = None,
) -> Arm:
    """Compile ``module`` in the way called ``name`` and run it once on ``inputs`` and ``keywords``.

    The max-autotune arm leaves CUDA graphs to the caller, who captures every arm alike. ``capture`` is no arm of a
    benchmark: it compiles nothing, and shows what Dynamo and AOTAutograd take.
    """
    if name == "eager":
        function: Callable[..., object] = module
    elif name == "capture":
        function = torch.compile(module, backend="aot_eager", dynamic=False)
    elif name == "inductor":
        function = torch.compile(module, dynamic=False)
    elif name == "inductor_max_autotune":
        function = torch.compile(module, dynamic=False, mode="max-autotune-no-cudagraphs")
    else:
        function = compiled(module, options)

    def run() -> object:
        with torch.no_grad():
            return function(*inputs, **(keywords or {}))

    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Arm(name, run, time.perf_counter() - start)


@contextlib.contextmanager
def planned_anew() -> Iterator[None]:
    """Models compiled inside are planned, or their plans read, in this process: it knows what they run, and how fast.

    A graph that AOTAutograd's cache holds would come back compiled, and tell nothing.
    """
    from torch._functorch import config

    with config.patch(enable_autograd_cache=False):
        yield


def compiled(module: nn.Module, options: Options) -> Callable[..., object]:
    """``module`` through ``torch.compile`` with tilestream as its back end."""
    return torch.compile(module, backend=backend(), options=vars(options))  # pyright: ignore[reportArgumentType]


def backend() -> Callable[..., Any]:
    """The back end itself: a source tree that is not installed has no entry point for its name."""
    from tilestream.run.backend import tilestream

    return tilestream
