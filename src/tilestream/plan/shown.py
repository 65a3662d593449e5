"""The one time that is shown of a pipeline: the simulator's. Choices that nothing was measured for are made by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from tilestream.devices import Device
from tilestream.errors import DeviceError, PipelineDeadlock, VerifyError, WorkloadError
from tilestream.ir.pipeline import Pipeline
from tilestream.simulator import simulate


@lru_cache(maxsize=1024)
def pipeline_us(pipeline: Pipeline, rows: int, device: Device) -> float | None:
    """Microseconds of a pipeline by the simulator; None where it cannot come to its end on this device."""
    try:
        return simulate(pipeline, rows, device, spans=False).time_us
    except (PipelineDeadlock, WorkloadError, DeviceError, VerifyError):
        return None


def pipelines_us(pipelines: Sequence[Pipeline], rows: int, device: Device) -> float | None:
    """The same of several, one after another."""
    return total_us(pipeline_us(pipeline, rows, device) for pipeline in pipelines)


def total_us(each: Iterable[float | None]) -> float | None:
    """Microseconds one after another; None where one of them is not known."""
    known = list(each)
    return None if None in known else sum(us for us in known if us is not None)
