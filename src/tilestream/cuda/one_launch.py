"""One kernel on a GPU, of a pipeline or of an operator: what is enqueued for a call of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tilestream.cuda import driver, stamps
from tilestream.cuda.cache import compiled
from tilestream.cuda.compile import KernelReport, Source
from tilestream.cuda.diagnose import Record
from tilestream.cuda.driver import PreparedLaunch
from tilestream.cuda.workspace import Memory, Workspaces
from tilestream.errors import DeviceError
from tilestream.kernels.kernel import Launchable
from tilestream.kernels.operators import pack
from tilestream.kernels.parts.params import TIMEOUT_NS, Where
from tilestream.kernels.parts.source import Call, KernelSource

MOST_CTAS = 2**31 - 1
"""Of a grid."""


class Launch:
    """One kernel, with its workspaces.

    Args:
        dependent: let its CTAs start, and load weights, while the kernel before on the stream still runs (programmatic
            dependent launch), if its family can. Only where that kernel writes none of the parameters.

    Raises:
        DeviceError: its CTAs, which wait for each other, do not fit the GPU at once, or one does not fit an SM.
    """

    def __init__(
        self, kernel: Launchable, source: Source, report: KernelReport, device: torch.device, dependent: bool = False
    ) -> None:
        self.kernel, self.source = kernel, source
        self.frame = frame = kernel.frame
        # A launch in front that copies weights writes what the kernel would load before it waits.
        self.dependent = dependent and kernel.starts_early and not kernel.packs
        driver.ensure_context(device.index or 0)
        self.function = driver.Function(report.cubin, source.name, source.shared_bytes, frame.cluster)
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        room = self._room()
        self.most = room if kernel.persistent else MOST_CTAS
        self.workspaces = Workspaces(lambda: Memory(kernel.space.total)) if kernel.space.total else None
        self.packing: Launch | None = None
        if kernel.packs:
            packer = pack.kernel(sum(len(spec.segments) for spec in kernel.packs))
            self.packing = Launch(packer, packer.source, compiled(packer.source), device)
        self.record = Record(frame.words, kernel.error) if frame.words else None
        self._written: stamps.Buffer | None = None

    def check(self) -> None:
        """Raise ``QueueTimeout`` or ``InputError`` if an earlier launch left a record."""
        if self.record is not None:
            self.record.check()

    def prepare(
        self, where: Mapping[str, Where], rows: int, stream: int, capture: int, values: Mapping[str, Any] | None = None
    ) -> list[PreparedLaunch]:
        """What to enqueue on ``stream`` for ``rows`` rows of the tensors at ``where``: the packing of weights if any is
        packed, and the kernel.

        Args:
            capture: as for ``Workspaces.take``.
            values: of an operator's kernel, what its argument holds.
        """
        at: dict[str, int] = {}
        if self.workspaces is not None:
            at = self.kernel.space.at(self.workspaces.take(stream, capture).address)
        made: list[PreparedLaunch] = []
        if self.packing is not None:
            entries = pack.entries(self.kernel.packs, where, at)
            made += self.packing.prepare({}, pack.CTAS, stream, capture, {"entries": entries})
        dump = self.record.address if self.record is not None else 0
        written = self._stamps(rows)
        room = (0, 0) if written is None else (written.address, written.room)
        frame = self.frame
        for part in self.kernel.parts(rows):
            call = Call(where, at, dump, part, driver.encoded, TIMEOUT_NS, room, values or {})
            argument = self.kernel.pack(self.source, call)
            grid = (min(self.kernel.grid(part.rows, self.sms), self.most), frame.second)
            made.append(self.function.prepare(grid, frame.threads, stream, argument, frame.together, self.dependent))
        return made

    def log(self) -> stamps.LaunchLog | None:
        """The stamps of the last launch, which has ended; None where there was none, or the kernel has no stamps."""
        return self._written.read() if self._written is not None else None

    def _stamps(self, rows: int) -> stamps.Buffer | None:
        """Where a launch with stamps writes them. All launches of one number of rows share it: one runs at a time."""
        if not (isinstance(self.source, KernelSource) and self.source.stamped):
            return None
        if self._written is None or self._written.rows != rows:
            self._written = stamps.Buffer(self.source, rows, self.kernel.grid(rows, self.sms))
        return self._written

    def _room(self) -> int:
        """CTAs that can all be there at once. Refuses a kernel that needs more, or of which not even one fits."""
        frame, clustered = self.frame, self.frame.cluster > 1
        resident = self.function.resident_clusters(frame.threads, frame.cluster) if clustered else self.sms
        room = resident * (frame.cluster if clustered else self.function.blocks_per_sm(frame.threads))
        if frame.together and frame.ctas > room:
            clusters = f" in clusters of {frame.cluster}" if clustered else ""
            raise DeviceError(
                f"kernel {self.source.name} needs {frame.told} CTAs at once{clusters} and this GPU holds {room}",
                "plan for this GPU (options device=None)",
            )
        if room < 1:
            raise DeviceError(f"kernel {self.source.name} does not fit an SM of this GPU", "plan for this GPU")
        return room
