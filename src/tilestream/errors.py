"""Every error that tilestream raises on purpose: each names the cause and the remedy."""

from __future__ import annotations


class TilestreamError(Exception):
    """Base of all of tilestream's errors.

    Args:
        cause: what is wrong, with the offending value and, where known, the user's source line.
        remedy: what the user can do about it.
    """

    def __init__(self, cause: str, remedy: str = "") -> None:
        self.cause = cause
        self.remedy = remedy
        super().__init__(f"{cause}. Remedy: {remedy}" if remedy else cause)


class OptionError(TilestreamError):
    """An option is unknown, has a value outside its range, or contradicts another."""


class InputError(TilestreamError):
    """A tensor given to a compiled pipeline has the wrong shape, dtype or device."""


class IRError(TilestreamError):
    """A Tile, TileOp, Stage, Queue or Pipeline is not well formed."""


class VerifyError(TilestreamError):
    """A well-formed pipeline is not legal: it could deadlock, or does not fit the device."""


class CaptureError(TilestreamError):
    """A model or a file could not be captured as a graph."""


class PlanError(TilestreamError):
    """No legal pipeline was found for a region under the given options."""


class DeviceError(TilestreamError):
    """A device is missing, too old, too small, or its description is impossible."""


class CompileError(TilestreamError):
    """NVRTC is missing or refused a generated kernel."""


class CacheError(TilestreamError):
    """The cache folder cannot be used; raised only where a user asked for the cache by name."""


class PipelineDeadlock(TilestreamError):
    """The reference machine found that no stage can go on."""


class QueueTimeout(TilestreamError):
    """A bounded wait inside a kernel expired; the message dumps every queue."""


class SparseError(TilestreamError):
    """A sparse program, format, schedule, stream graph or file is not well formed, or cannot be lowered."""


class StreamDeadlock(TilestreamError):
    """Bounded channels of a stream graph filled up so that no node can go on; names the cycle of nodes."""


class WorkerError(TilestreamError):
    """A process that did a part of the work ended before its task did."""


class WorkloadError(TilestreamError):
    """A simulated workload cannot run: impossible numbers, or stages that cannot be resident together."""
