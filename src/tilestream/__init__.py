"""tilestream compiles PyTorch models to dataflow: ``torch.compile(model, backend="tilestream")``."""

from __future__ import annotations

from collections.abc import Callable
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
from tilestream.ir import (
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
    "explain",
    "simulate",
]

__version__ = "0.1.0"
_PARTS = ("apps", "devices", "kitsune", "simulator", "sparse")
"""Packages that ``import tilestream`` alone makes reachable, and loads when they are first used."""


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return import_module(f"tilestream.{name}")
    raise AttributeError(f"module 'tilestream' has no attribute {name!r}")


def explain(model: Callable[..., Any], *inputs: Any, **options: Any) -> Report:
    """What tilestream makes of a model, and why: coverage, regions, exclusions, candidates, costs.

    The model runs once, eagerly; no GPU is needed. ``str()`` of the result is the text, ``.json()`` the data.

    Args:
        model: a module or function.
        inputs: what it is called with; their shapes decide the plans.
        options: fields of ``Options``; ``device="h200"`` plans for a device that is not present.

    Raises:
        CaptureError: the model cannot be captured.
        OptionError: an option is unknown, out of range or contradicts another.
        DeviceError: no device of that name is known.
    """
    from tilestream.analysis import analyse
    from tilestream.options import parse
    from tilestream.report.explain import Report

    return Report(analyse(model, inputs, parse(options)))


def simulate(model: Callable[..., Any], *inputs: Any, device: str = "h200", **options: Any) -> Simulation:
    """Predicted time, utilisation and traffic of a model's pipelines on a device, present or not.

    Args:
        model: a module or function; it runs once, eagerly.
        inputs: what it is called with.
        device: a name known to ``tilestream.devices``.
        options: fields of ``Options``.

    Raises:
        CaptureError, OptionError, DeviceError: as ``explain``.
    """
    from tilestream.analysis import analyse
    from tilestream.options import parse
    from tilestream.report.simulation import Simulation

    return Simulation.of(analyse(model, inputs, parse({**options, "device": device})))
