"""The one time that is shown of a pipeline: the simulator's. Choices that nothing was measured for are made by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from tilestream.devices import Device
from tilestream.errors import DeviceError, PipelineDeadlock, VerifyError, WorkloadError
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.lengths import sizes_at
from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.costs import ClosedForm
from tilestream.kernels.families import kernel_of
from tilestream.simulator import simulate


@lru_cache(maxsize=1024)
def pipeline_us(pipeline: Pipeline, rows: int, device: Device, edges: int = 0) -> float | None:
    """Microseconds of a pipeline by the simulator; None where it cannot come to its end on this device.

    Args:
        edges: of a ragged pipeline; 0 where that is not known.
    """
    try:
        return simulate(pipeline, sizes_at(pipeline, rows, edges), device, spans=False).time_us
    except (PipelineDeadlock, WorkloadError, DeviceError, VerifyError):
        return None


def pipelines_us(pipelines: Sequence[Pipeline], rows: int, device: Device, edges: int = 0) -> float | None:
    """The same of several, one after another."""
    return total_us(pipeline_us(pipeline, rows, device, edges) for pipeline in pipelines)


def closed_forms(pipelines: Iterable[Pipeline]) -> tuple[ClosedForm, ...]:
    """The formulas that tell the time of some of ``pipelines``, each once; the event loop tells that of the others."""
    found = (kernel_of(launch).closed_form for pipeline in pipelines for launch in cut_at_dram(pipeline))
    return tuple({form.name: form for form in found if form is not None}.values())


def predicted_by(pipelines: Sequence[Pipeline]) -> str:
    """``simulator``, or ``closed form of shared tiles``: what tells the time of ``pipelines``."""
    names = [form.name for form in closed_forms(pipelines)]
    return f"closed form of {' and '.join(names)}" if names else "simulator"


def total_us(each: Iterable[float | None]) -> float | None:
    """Microseconds one after another; None where one of them is not known."""
    known = list(each)
    return None if None in known else sum(us for us in known if us is not None)
