"""Hardware as data: one frozen dataclass, units in the field names."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field, fields, replace

from tilestream.errors import DeviceError


@dataclass(frozen=True)
class Device:
    """What the planner, the cost model and the simulator know of a machine, real or imagined.

    Rates are those that a good kernel sustains, not those of a data sheet. ``tensor_flops`` counts
    two operations a multiply-add; ``simt_flops`` counts issued fp32 lane operations (an FMA is one).

    Raises:
        DeviceError: naming the number that cannot be.
    """

    name: str
    compute_capability: tuple[int, int]
    sms: int
    clock_hz: float
    shared_bytes_per_cta: int
    registers_per_cta: int
    l2_bytes: int
    dram_bytes: int
    dram_bytes_per_s: float
    l2_bytes_per_s: float
    """Traffic of distinct lines: what queues between SMs can share."""
    l2_shared_bytes_per_s: float
    """Traffic of lines that all SMs read at about the same time: streamed weights."""
    tensor_flops: dict[str, float] = field(hash=False)
    simt_flops: float
    sfu_ops_per_s: float
    launch_s: float
    """From one kernel of a CUDA graph to the next: gap, first load and tail."""
    queue_curve: tuple[tuple[int, float], ...]
    """Payload bytes of a tile and seconds from one SM to another through an L2 ring queue."""
    stage_efficiency: float = 0.845
    """Share of ``tensor_flops`` that the two warpgroups of a stage reach together."""
    bulk_efficiency: float = 0.83
    """Share of (memory time + tensor time) that one library kernel an operator reaches."""
    queue_exposed: float = 0.65
    """Share of a queue's hand-over that the consuming stage cannot hide."""
    turnaround_s: float = 0.25e-6
    """From a warpgroup's last wgmma to its next, besides the epilogue: drain, fence, barrier."""
    handoff_ops: float = 4.0
    """Lane operations an element to round, pack and store a linear's result for the next use."""

    def __post_init__(self) -> None:
        check(self)

    def queue_s(self, payload: float) -> float:
        """Seconds for a tile of ``payload`` bytes to pass from SM to SM: the measured curve, linear between points."""
        curve = self.queue_curve
        sizes = [size for size, _ in curve]
        if payload <= sizes[0]:
            return curve[0][1]
        if payload > sizes[-1]:
            return curve[-1][1] * payload / sizes[-1]
        i = bisect_left(sizes, payload)
        (x0, y0), (x1, y1) = curve[i - 1], curve[i]
        return y0 + (y1 - y0) * (payload - x0) / (x1 - x0)

    def with_sms(self, sms: int) -> Device:
        """The same machine with another number of SMs: rates that live in the SMs scale, memory does not."""
        if sms < 1:
            raise DeviceError(f"device {self.name!r}: sms is {sms!r}", "give a number above 0")
        scale = sms / self.sms
        return replace(
            self,
            sms=sms,
            tensor_flops={dtype: rate * scale for dtype, rate in self.tensor_flops.items()},
            simt_flops=self.simt_flops * scale,
            sfu_ops_per_s=self.sfu_ops_per_s * scale,
        )


def check(device: Device) -> None:
    """Raise ``DeviceError`` that names the first number that no machine can have."""

    def wrong(what: str, value: object, why: str) -> DeviceError:
        return DeviceError(f"device {device.name!r}: {what} is {value!r}", why)

    for entry in fields(device):
        value = getattr(device, entry.name)
        if isinstance(value, (int, float)) and not (math.isfinite(value) and value > 0):
            raise wrong(entry.name, value, "give a number above 0")
    for name in ("stage_efficiency", "bulk_efficiency", "queue_exposed"):
        if getattr(device, name) > 1:
            raise wrong(name, getattr(device, name), "a share is at most 1")
    for dtype in ("bf16", "f16", "f32"):
        rate = device.tensor_flops.get(dtype)
        if rate is None or not (math.isfinite(rate) and rate > 0):
            raise wrong(f"tensor_flops[{dtype!r}]", rate, "give FLOP/s above 0 for bf16, f16 and f32")
    if device.l2_bytes_per_s < device.dram_bytes_per_s:
        raise wrong(
            "l2_bytes_per_s",
            device.l2_bytes_per_s,
            "DRAM traffic passes through the L2: make it at least dram_bytes_per_s",
        )
    if device.l2_shared_bytes_per_s < device.l2_bytes_per_s:
        raise wrong("l2_shared_bytes_per_s", device.l2_shared_bytes_per_s, "make it at least l2_bytes_per_s")
    points = device.queue_curve
    if not points or any(size <= 0 or not (math.isfinite(s) and s > 0) for size, s in points):
        raise wrong("queue_curve", points, "give (payload bytes, seconds) pairs above 0")
    if any(a[0] >= b[0] or a[1] > b[1] for a, b in zip(points, points[1:], strict=False)):
        raise wrong("queue_curve", points, "sort it: larger payloads take at least as long")
