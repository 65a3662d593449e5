"""The kernels of a replayed CUDA graph, one by one: what each takes, and what passes in front of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile

from tilestream.run.timing import Captured, warm_up


@dataclass(frozen=True)
class KernelTime:
    """A kernel, a copy or a memset. ``gap_us`` passes between the end of the one before and its start: less than
    nothing where they overlap."""

    name: str
    us: float
    gap_us: float

    def __str__(self) -> str:
        return f"{self.us:8.2f} us, {self.gap_us:6.2f} before  {self.name}"


def kernels_of(captured: Captured) -> list[KernelTime]:
    """Of one replay, in the order of their starts. Times are those of the profiler, which are not without its costs:
    the sum may be more than a replay takes without it."""
    warm_up([captured.graph])
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        captured.graph.replay()
    events = [e for e in found.events() or () if e.device_type.name == "CUDA" and not e.is_user_annotation]
    made: list[KernelTime] = []
    end_us = None
    for event in sorted(events, key=lambda e: e.time_range.start):
        start_us = event.time_range.start
        made.append(
            KernelTime(event.name, event.time_range.end - start_us, 0.0 if end_us is None else start_us - end_us)
        )
        end_us = event.time_range.end if end_us is None else max(end_us, event.time_range.end)
    return made
