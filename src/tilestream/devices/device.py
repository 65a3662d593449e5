"""Hardware as data: one frozen dataclass, units in the field names."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tilestream.devices.ranges import CAPABILITY, CLUSTER, PAYLOAD, RANGES, RESIDENT, SECONDS, TENSOR_FLOPS, Range
from tilestream.errors import DeviceError

SCALABLE = (
    "sms",
    "clock_hz",
    "tensor_flops",
    "simt_flops",
    "sfu_ops_per_s",
    "dram_bytes_per_s",
    "l2_bytes_per_s",
    "l2_bytes",
    "sm_bytes_per_clock",
    "registers_per_sm",
    "shared_bytes_per_sm",
    "launch_s",
    "hand_over_s",
)
MOST_SCALED = 1000
ALONG = {"l2_bytes_per_s": ("l2_shared_bytes_per_s",), "clock_hz": ("simt_flops", "sfu_ops_per_s")}
"""What is scaled along with a number."""


@dataclass(frozen=True)
class Device:
    """What the planner, the cost model and the simulator know of a machine, real or imagined.

    Rates are those that a good kernel sustains, not those of a data sheet. What has a default was measured or fitted on
    an H200; docs/cost-model.md says on what, and how far off it leaves the cost model. ``tensor_flops`` counts
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
    burst: float = 1.1
    """How much faster than ``tensor_flops`` tensor cores are that often idle: power does not lower the clock."""
    issue_cycles: float = 2.3
    """From one instruction of a warp's epilogue to its next: code runs once a tile, and waits for what came before."""
    code_cache: float = 2048.0
    """Instructions of a kernel up to which that holds: 32 KB."""
    cold_code: float = 0.19
    """Share that ``issue_cycles`` grows by for every doubling of the kernel beyond ``code_cache``."""
    code_held: float = 8192.0
    """Instructions that an SM's own cache holds: 128 KB, as Jia et al. found of Volta (arXiv 1804.06826). Of a longer
    kernel, gone through once a tile, none is there any more when its turn comes again. On an H200, one kernel as 11,818
    instructions took 172 us, as 7,459 it took 94 (``benchmarks/results/epilogue_turns.json``)."""
    code_bytes_per_s: float = 3.8e9
    """At which an SM gets such a kernel's code from the L2. Of one pipeline on an H200: four blocks of 192-384-192 with
    GELU by columns, 20,711 instructions of 16 bytes in 87 us a tile (``benchmarks/results/candidates.json``)."""
    barrier_cycles: float = 105.0
    """A reduction over lanes, or a meeting of warps, between two passes of an epilogue."""
    load_s: float = 0.9e-6
    """From asking for a chunk of input to having it, in DRAM and under load."""
    again_s: float = 0.6e-6
    """The same of one that the same tile was read from before: from the L2."""
    page_s: float = 0.1e-6
    """The same for a page of weights in the L2, beside its bytes at the SM's port."""
    ramp_s: float = 0.8e-6
    """Of a launch of ours beside ``launch_s``: barriers and tables set up, the last tiles written."""
    queue_exposed: float = 0.65
    """Share of a queue's hand-over that the consuming stage cannot hide."""
    turnaround_s: float = 0.25e-6
    """From a warpgroup's last wgmma to its next, besides the epilogue: drain, fence, barrier."""
    handoff_ops: float = 4.0
    """Lane operations an element to round, pack and store a linear's result for the next use."""
    hand_over_s: float = 1.0e-6
    """From the end of the slowest CTA until all have what it computed, by words with tags through the L2: 0.8 to 1.2 us
    between stages of a decode step of few values on an H200 (docs/decoding.md); of others it is assumed."""
    registers_per_sm: int = 65_536
    shared_bytes_per_sm: int = 233_472
    ctas_per_sm: int = 32
    sm_bytes_per_clock: float = 64.0
    """What one SM takes from the L2 and gives to it, together."""
    shared_bytes_per_clock: float = 128.0
    """What an SM's shared memory reads and writes, together."""
    clusters: tuple[tuple[int, int], ...] = ()
    """CTAs of a cluster, and how many such clusters are resident where a CTA takes an SM. None before Hopper."""
    dsm_curve: tuple[tuple[int, float], ...] = ()
    """Payload bytes of a tile and seconds from one SM to the next of its cluster, through distributed shared memory."""
    dsm_bytes_per_s: float = 1e12
    """What all SMs together send each other so. Counts only where there are ``clusters``."""
    arbiters: int = 1
    """Of the grid scheduler: 1 as GPUs are; 2 as Kitsune proposes, which pair a SIMT and a tensor CTA on an SM."""

    def __post_init__(self) -> None:
        check(self)

    def queue_s(self, payload: float) -> float:
        """Seconds for a tile of ``payload`` bytes to pass from SM to SM: the measured curve, linear between points."""
        return _along(self.queue_curve, payload)

    def dsm_s(self, payload: float) -> float:
        """The same inside a cluster, through distributed shared memory.

        Raises:
            DeviceError: the device has no clusters.
        """
        if not self.dsm_curve:
            raise DeviceError(
                f"device {self.name!r} has no clusters, so no distributed shared memory", "use queues through the L2"
            )
        return _along(self.dsm_curve, payload)

    @property
    def largest_cluster(self) -> int:
        """CTAs of the largest cluster; 1 without clusters."""
        return max((size for size, _ in self.clusters), default=1)

    def resident_clusters(self, size: int) -> int:
        """How many clusters of ``size`` CTAs, one an SM, run at once; of a size in between, as of the next larger one.

        Raises:
            DeviceError: clusters of this size do not exist; says which do.
        """
        fitting = [count for ctas, count in self.clusters if ctas >= size]
        if size == 1:
            return self.sms
        if size < 1 or not fitting:
            raise DeviceError(
                f"device {self.name!r} has no clusters of {size} CTAs", f"use at most {self.largest_cluster}"
            )
        return min(self.sms // size, max(fitting))

    @property
    def sm_bytes_per_s(self) -> float:
        """Bytes/s between the L2 and one SM."""
        return self.sm_bytes_per_clock * self.clock_hz

    def dual(self) -> Device:
        """The same machine with Kitsune's two arbiters (2.3)."""
        return self if self.arbiters == 2 else replace(self, name=f"{self.name}+kitsune", arbiters=2)

    def scale(self, what: str, factor: float) -> Device:
        """The same machine with ``factor`` times as much of one number: ``scale("sms", 2)``.

        More SMs bring their pipes along, and a faster clock is one of the SMs: pipes, ports and shared memory, not the
        L2 and the DRAM. A faster L2 is faster for shared lines too. All else stays.

        Raises:
            DeviceError: no such number, or a result that no machine can have.
        """
        if what not in SCALABLE:
            raise DeviceError(f"device {self.name!r} has no {what!r} to scale", f"use one of: {', '.join(SCALABLE)}")
        if not (isinstance(factor, (int, float)) and 0 < factor <= MOST_SCALED):
            remedy = f"use a factor above 0, of at most {MOST_SCALED:,}"
            raise DeviceError(f"device {self.name!r}: {what} cannot be scaled by {factor!r}", remedy)
        name = f"{self.name}+{what}*{factor:g}"
        if what == "sms":
            return replace(self.with_sms(round(self.sms * factor)), name=name)
        if what == "tensor_flops":
            return replace(self, name=name, tensor_flops={k: v * factor for k, v in self.tensor_flops.items()})
        changes: dict[str, Any] = {}
        for entry in (what, *ALONG.get(what, ())):
            value = getattr(self, entry) * factor
            changes[entry] = round(value) if isinstance(getattr(self, entry), int) else value
        if what == "clock_hz":
            changes["tensor_flops"] = {k: v * factor for k, v in self.tensor_flops.items()}
        return replace(self, name=name, **changes)

    def with_sms(self, sms: int) -> Device:
        """The same machine with another number of SMs: rates that live in the SMs scale, memory does not."""
        if not RANGES["sms"].holds(sms):
            raise DeviceError(f"device {self.name!r}: sms is {sms!r}", f"give {RANGES['sms']}")
        scale = sms / self.sms
        return replace(
            self,
            sms=sms,
            tensor_flops={dtype: rate * scale for dtype, rate in self.tensor_flops.items()},
            simt_flops=self.simt_flops * scale,
            sfu_ops_per_s=self.sfu_ops_per_s * scale,
            clusters=tuple((size, max(1, int(count * scale))) for size, count in self.clusters),
            dsm_bytes_per_s=self.dsm_bytes_per_s * scale,
        )


def _along(curve: tuple[tuple[int, float], ...], payload: float) -> float:
    """Seconds of ``payload`` bytes on a curve of (bytes, seconds): linear between points, in proportion beyond."""
    sizes = [size for size, _ in curve]
    if payload <= sizes[0]:
        return curve[0][1]
    if payload > sizes[-1]:
        return curve[-1][1] * payload / sizes[-1]
    i = bisect_left(sizes, payload)
    (x0, y0), (x1, y1) = curve[i - 1], curve[i]
    return y0 + (y1 - y0) * (payload - x0) / (x1 - x0)


def check(device: Device) -> None:
    """Raise ``DeviceError`` that names the first number that no machine can have, its value, and what is permitted."""

    def wrong(what: str, value: object, why: str) -> DeviceError:
        return DeviceError(f"device {device.name!r}: {what} is {value!r}", why)

    for name, permitted in RANGES.items():
        if not permitted.holds(value := getattr(device, name)):
            raise wrong(name, value, f"give {permitted}")
    for name, value, permitted in _numbers(device):
        if not permitted.holds(value):
            raise wrong(name, value, f"give {permitted}")
    if device.l2_bytes_per_s < device.dram_bytes_per_s:
        raise wrong(
            "l2_bytes_per_s",
            device.l2_bytes_per_s,
            f"DRAM traffic passes through the L2: make it at least dram_bytes_per_s, {device.dram_bytes_per_s:g}",
        )
    for name, least in (("l2_shared_bytes_per_s", "l2_bytes_per_s"), ("shared_bytes_per_sm", "shared_bytes_per_cta")):
        if getattr(device, name) < getattr(device, least):
            raise wrong(name, getattr(device, name), f"make it at least {least}, {getattr(device, least):,}")
    for name in ("queue_curve", "dsm_curve"):
        points = getattr(device, name)
        if any(a[0] >= b[0] or a[1] > b[1] for a, b in zip(points, points[1:], strict=False)):
            raise wrong(name, points, "sort it: larger payloads take at least as long")
    if bool(device.clusters) != bool(device.dsm_curve):
        raise wrong("dsm_curve", device.dsm_curve, "give it where there are clusters, and only there")


def _numbers(device: Device) -> Iterator[tuple[str, object, Range]]:
    """The numbers of what is no number itself, each with its name and what it may be.

    Raises:
        DeviceError: a field holds no such numbers.
    """

    def wrong(what: str, why: str) -> DeviceError:
        return DeviceError(f"device {device.name!r}: {what} is {getattr(device, what)!r}", why)

    capability = device.compute_capability
    if not (isinstance(capability, tuple) and len(capability) == 2):
        raise wrong("compute_capability", "write it as [9, 0]")
    for part in capability:
        yield "compute_capability", part, CAPABILITY
    if not isinstance(device.tensor_flops, dict):
        raise wrong("tensor_flops", f"give FLOP/s for bf16, f16 and f32, each {TENSOR_FLOPS}")
    for dtype in dict.fromkeys(("bf16", "f16", "f32", *device.tensor_flops)):
        yield f"tensor_flops[{dtype!r}]", device.tensor_flops.get(dtype), TENSOR_FLOPS
    pairs = {
        "queue_curve": ("payload bytes, seconds", PAYLOAD, SECONDS),
        "dsm_curve": ("payload bytes, seconds", PAYLOAD, SECONDS),
        "clusters": ("CTAs of a cluster, resident clusters", CLUSTER, RESIDENT),
    }
    for name, (what, first, second) in pairs.items():
        points = getattr(device, name)
        whole = isinstance(points, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in points)
        if not whole or (name == "queue_curve" and not points):
            raise wrong(name, f"give ({what}) pairs")
        for one, other in points:
            yield f"{name}, {what.split(', ')[0]}", one, first
            yield f"{name}, {what.split(', ')[1]}", other, second
