"""What a launch becomes on a GPU: the protocol of all families of kernels, and what those who run kernels read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from tilestream.devices import Device
from tilestream.errors import QueueTimeout, TilestreamError, VerifyError
from tilestream.ir.pipeline import Pipeline, Stage, Tensor
from tilestream.kernels.costs import ClosedForm, Counts
from tilestream.kernels.parts.source import Call, KernelSource, Part, Space
from tilestream.kernels.stream.tables import PackSpec

LOST = "the CUDA context is lost: restart the process; report this message"
NO_ROW = "the CUDA context is lost: restart the process, with indices that exist"


@dataclass(frozen=True)
class Footprint:
    """What one replica of a stage takes from its SM.

    ``shared_bytes`` is the sum of ``parts`` (name, bytes); ``registers`` is the estimate for one
    thread of a consumer warpgroup.
    """

    shared_bytes: int
    registers: int
    parts: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Frame:
    """How a kernel is launched.

    Attributes:
        ctas: that were planned. told: how they come about, for messages.
        threads: of a CTA. cluster: CTAs of one. warpgroups: consumers of a CTA.
        together: whether CTAs wait for each other, so that all must be resident at once.
        words: of 64 bits, of the record that an expired wait leaves; 0: it leaves none.
        second: CTAs along the grid's second axis.
        host_lanes: threads of a CTA on the host's machine, of a kernel written in lanes (lanes.cuh); 0 of others.
    """

    ctas: int
    told: str
    threads: int = 384
    cluster: int = 1
    warpgroups: int = 2
    together: bool = True
    words: int = 8
    second: int = 1
    host_lanes: int = 0


class Launchable(ABC):
    """What is launched as one kernel, whatever it is a kernel of. What loads, launches or runs kernels asks this alone.

    Attributes:
        needs_rows: without rows it has nothing to do.
        starts_early: whether it waits for the kernel in front itself, behind what it can do before (programmatic
            dependent launch): loading weights, which a launch in front must not write then.
        persistent: no more CTAs than are resident at once have something to do.
    """

    needs_rows: bool = True
    starts_early: ClassVar[bool] = False
    persistent: bool = False

    @property
    @abstractmethod
    def frame(self) -> Frame: ...

    def grid(self, rows: int, sms: int) -> int:
        """CTAs of a launch on ``rows`` rows."""
        return self.frame.ctas

    def parts(self, rows: int) -> list[Part]:
        """The launches that ``rows`` rows take."""
        return [Part(0, rows, rows)]

    @property
    def space(self) -> Space:
        """Device memory besides its tensors."""
        return Space((), frozenset())

    @property
    def buffers(self) -> Sequence[Tensor]:
        """Tensors of its own, which each call has new ones of: in ``Call.where``, as those of the launch."""
        return ()

    @property
    def packs(self) -> Sequence[PackSpec]:
        """Weights that are copied before the kernel, to the part of the space called ``packed`` and their number."""
        return ()

    @abstractmethod
    def pack(self, source: Any, call: Call) -> bytes:
        """The bytes of the kernel's argument."""

    def error(self, words: Sequence[int]) -> TilestreamError:
        """What the record of ``words`` words that a launch left says."""
        return QueueTimeout(self.describe(words), LOST)

    @abstractmethod
    def describe(self, words: Sequence[int]) -> str:
        """Who waited for what."""


class Kernel(Launchable):
    """The kernel of one launch of a pipeline. ``families.kernel_of`` makes it, once for each launch.

    Each family describes its kernels so; what compiles, times or explains a kernel asks nothing else.
    """

    family: ClassVar[str]
    closed_form: ClosedForm | None = None
    reads_columns: ClassVar[bool] = False
    """Whether it reads weights that lie by columns."""

    def __init__(self, launch: Pipeline) -> None:
        self.launch = launch
        self._sources: dict[tuple[bool, bool], KernelSource] = {}

    @classmethod
    @abstractmethod
    def matches(cls, launch: Pipeline) -> bool:
        """Whether a launch is of this family, as far as its axes go."""

    @cached_property
    def refusal(self) -> str:
        """Why no kernel can be made of the launch, with the user's line; empty if one can."""
        try:
            self._check_weights()
            self.check()
        except VerifyError as error:
            return error.cause
        return ""

    def _check_weights(self) -> None:
        odd = next((t.name for t in self.launch.tensors if t.by_columns and not self.reads_columns), "")
        if odd:
            raise VerifyError(f"weight {odd!r} lies by columns, which kernels of products alone read", "copy it")

    @abstractmethod
    def check(self) -> None:
        """Raise ``VerifyError`` where no kernel can be made of the launch."""

    # -- what it takes

    @abstractmethod
    def footprint(self, stage: Stage, limit: int) -> Footprint:
        """Registers and shared memory of one replica of ``stage``; rings fill up to ``limit`` bytes where they can.

        Raises:
            VerifyError: no kernel can be made of it. Whether it fits a device is for the caller to compare.
        """

    def clusters(self, limit: int) -> tuple[int, int]:
        """Clusters that must be resident at once, and CTAs of each; none where only CTAs must."""
        return 0, 1

    @abstractmethod
    def cost(self, rows: int, device: Device) -> Counts:
        """What a launch on ``rows`` rows asks for, and so its predicted time."""

    # -- how it is run

    @abstractmethod
    def _emit(self, stamped: bool, annotate: bool) -> KernelSource: ...

    def source(self, stamped: bool = False, annotate: bool = False) -> KernelSource:
        """Its CUDA source.

        Args:
            stamped: it writes down what its warps do when, if its family can.
            annotate: with comments for people: every operation with the user's line, and what its family says of steps.
                Text to be compiled has none.

        Raises:
            VerifyError: from the schedule, naming the user's line.
            CompileError: a tile op has no CUDA snippet, or shared memory has no room for the stamps' counters.
        """
        key = (stamped, annotate)
        if key not in self._sources:
            self._check_weights()
            made = self._emit(stamped, annotate)
            self._sources[key] = replace(made, text=told_ops(self.launch) + made.text) if annotate else made
        return self._sources[key]

    # -- the host's machine, for tests

    def hosted(self, rows: int, sanitize: bool) -> str:
        """Why the host build cannot run ``rows`` rows; empty if it can."""
        return ""

    def host_text(self, text: str) -> str:
        """The source without what the host's headers have themselves."""
        return text


def halves(words: Sequence[int], count: int) -> list[tuple[int, int]]:
    """The low and the high half of the first words."""
    return [(w & 0xFFFFFFFF, (w >> 32) & 0xFFFFFFFF) for w in words[:count]]


def told_ops(launch: Pipeline) -> str:
    """A comment a tile operation: its stage, what it makes, the user's line."""
    lines = []
    for stage in launch.stages:
        for op in stage.ops:
            made = f" {op.out.name}" if op.out is not None else "".join(f" {name}" for name in op.params)
            lines.append(f"// {stage.name}: {op.kind}{made}" + (f"; {op.source}" if op.source else ""))
    # A backslash at the end of a line would make the next one a comment.
    return "".join(line.replace("\\", "/") + "\n" for line in dict.fromkeys(lines))
