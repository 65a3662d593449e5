"""tilestream compiles PyTorch models to dataflow: ``torch.compile(model, backend="tilestream")``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tilestream.errors import (
    CacheError,
    CaptureError,
    CompileError,
    DeviceError,
    InputError,
    IRError,
    OptionError,
    PipelineDeadlock,
    PlanError,
    QueueTimeout,
    SparseError,
    StreamDeadlock,
    TilestreamError,
    VerifyError,
    WorkerError,
    WorkloadError,
)
from tilestream.ir.pipeline import (
    TILE_ROWS,
    Pipeline,
    Queue,
    Residency,
    Role,
    Shard,
    Stage,
    Tensor,
    Tile,
    TileOp,
    Transport,
)
from tilestream.options import Options

if TYPE_CHECKING:
    from tilestream.report.explain import Report
    from tilestream.report.simulation import Simulation
    from tilestream.run.generate import decoding_loop

__all__ = [
    "TILE_ROWS",
    "CacheError",
    "CaptureError",
    "CompileError",
    "DeviceError",
    "IRError",
    "InputError",
    "OptionError",
    "Options",
    "Pipeline",
    "PipelineDeadlock",
    "PlanError",
    "Queue",
    "QueueTimeout",
    "Residency",
    "Role",
    "Shard",
    "SparseError",
    "Stage",
    "StreamDeadlock",
    "Tensor",
    "Tile",
    "TileOp",
    "TilestreamError",
    "Transport",
    "VerifyError",
    "WorkerError",
    "WorkloadError",
    "decoding_loop",
    "explain",
    "simulate",
]

__version__ = "0.1.0"
_PARTS = ("apps", "devices", "simulator", "sparse", "studies")
"""Packages that ``import tilestream`` alone makes reachable, and loads when they are first used."""


def __getattr__(name: str) -> Any:
    if name == "decoding_loop":
        return import_module("tilestream.run.generate").decoding_loop
    if name in _PARTS:
        return import_module(f"tilestream.{name}")
    raise AttributeError(f"module 'tilestream' has no attribute {name!r}")


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    training: bool | None = None,
    options: Mapping[str, Any] | Options | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **named: Any,
) -> Report:
    """What tilestream makes of ``model(*inputs)``, and why: who runs what, regions, exclusions, candidates, costs.

    Nothing is computed (only a model that branches on values is run), and no GPU is needed. The model, its inputs and
    the random number generators are left as they were. ``str()`` of the result is the text, ``.json()`` the data.

    Args:
        model: a module or function, in the mode (eval or train) that it is in.
        inputs: what it is called with; their shapes decide the plans. They may be nested, and need not be tensors.
        training: with gradients: the forward and the backward graphs. Otherwise as under ``torch.no_grad()``.
        options, kwargs: options, and keyword arguments of the model.
        named: both by their names, as in ``explain(model, x, mask=m, device="h200")``.

    Raises:
        CaptureError: the model cannot be captured.
        OptionError: an option is unknown, out of range or contradicts another; a name is both an option and an
            argument of the model, or neither.
        DeviceError: no device of that name is known.
    """
    from tilestream.plan.analyse import analyse
    from tilestream.report.explain import Report
    from tilestream.report.keywords import split

    if training is not None:
        named = {**named, "training": training}
    chosen, keywords = split(model, named, options, kwargs, own=("training",))
    return Report(analyse(model, inputs, chosen, keywords=keywords, training=bool(training)))


def simulate(
    model: Callable[..., Any],
    *inputs: Any,
    device: str | None = None,
    options: Mapping[str, Any] | Options | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **named: Any,
) -> Simulation:
    """Predicted time, utilisation and traffic of a model's pipelines on a device, present or not.

    Args:
        model, inputs: a module or function and what it is called with, as ``explain`` takes them.
        device: a name known to ``tilestream.devices``; ``h200`` unless told otherwise.
        options, kwargs, named: as ``explain``.

    Raises:
        CaptureError, OptionError, DeviceError: as ``explain``.
    """
    from tilestream.plan.analyse import analyse
    from tilestream.report.keywords import split
    from tilestream.report.simulation import Simulation

    if device is not None:
        named = {**named, "device": device}
    chosen, keywords = split(model, named, options, kwargs)
    chosen = chosen if chosen.device is not None else chosen.with_(device="h200")
    return Simulation.of(analyse(model, inputs, chosen, keywords=keywords))
