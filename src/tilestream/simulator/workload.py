"""What the simulator runs: stages of tiles joined by rings, launch after launch.

A ``Pipeline`` of the IR becomes one (``from_pipeline``, ``from_axes``, ``ragged``), and so does a whole captured model,
operator by operator (``kitsune``): training graphs, attention and gathers included, which the CUDA back end does not
take.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum

from tilestream.errors import WorkloadError


class Engine(StrEnum):
    """Which pipes a stage keeps busy; the dual arbiter pairs one CTA of each on an SM (Kitsune 2.3)."""

    TENSOR = "tensor"
    SIMT = "simt"


@dataclass(frozen=True)
class TileWork:
    """What one tile asks of its SM and of the memories. All are amounts, none is a time.

    ``tensor_flops`` run at the share ``tensor_share`` of the rate of ``dtype`` (small tiles, padded ones) and keep the
    tensor pipe busy for as long; ``simt_ops`` are issued fp32 lane operations and ``sfu_ops`` those of the special
    function unit; bytes are read and written at each level. ``own_s`` is work of the CTA that keeps no pipe busy,
    beside its loads as the pipes' work is; ``latency_s`` is what nothing can hide.
    ``l2_read`` and ``l2_write`` are all bytes between the SM and the L2, those that go on to DRAM included;
    ``l2_shared_read`` are further reads of lines that all SMs take at about the same time (weights); the L2 serves them
    once for ``multicast`` CTAs of a cluster. Payloads of queues are not counted here: the simulator adds them.
    """

    tensor_flops: float = 0.0
    dtype: str = "bf16"
    simt_ops: float = 0.0
    sfu_ops: float = 0.0
    l2_read: float = 0.0
    l2_write: float = 0.0
    dram_read: float = 0.0
    dram_write: float = 0.0
    latency_s: float = 0.0
    own_s: float = 0.0
    l2_shared_read: float = 0.0
    tensor_share: float = 1.0
    multicast: float = 1.0

    @property
    def shared_served(self) -> float:
        """Bytes of ``l2_shared_read`` that the L2 sends."""
        return self.l2_shared_read / self.multicast

    @property
    def full_rate_flops(self) -> float:
        """FLOPs that the tensor pipe could have done meanwhile."""
        return self.tensor_flops / self.tensor_share

    def __add__(self, other: TileWork) -> TileWork:
        both = {name: getattr(self, name) + getattr(other, name) for name in AMOUNTS}
        full = self.full_rate_flops + other.full_rate_flops
        share = both["tensor_flops"] / full if full else 1.0
        served = self.shared_served + other.shared_served
        multicast = both["l2_shared_read"] / served if served else 1.0
        dtype = self.dtype if self.tensor_flops else other.dtype
        return TileWork(dtype=dtype, tensor_share=share, multicast=multicast, **both)

    def scaled(self, factor: float) -> TileWork:
        return replace(self, **{name: getattr(self, name) * factor for name in AMOUNTS})


AMOUNTS = tuple(f.name for f in fields(TileWork) if f.name not in ("dtype", "tensor_share", "multicast"))


@dataclass(frozen=True)
class SimStage:
    """``tiles`` tiles of equal work, dealt round-robin to ``ctas`` CTAs that stay resident. Where they are not equal,
    ``weights`` say how much of ``work`` each is, and their mean is 1; ``waits_s`` what nothing hides of each alone.

    ``registers`` are of the whole CTA; ``once`` is what each CTA does before its first tile (resident weights).
    A CTA does the tensor work of a tile and then its SIMT work; with ``overlap`` it does both side by side, as
    warpgroups in ping-pong do. ``ops`` and ``source`` say what it stands for.
    """

    name: str
    engine: Engine
    tiles: int
    ctas: int
    work: TileWork
    once: TileWork = TileWork()
    registers: int = 65536
    shared_bytes: int = 0
    ops: tuple[str, ...] = ()
    source: str = ""
    overlap: bool = False
    weights: tuple[float, ...] = ()
    waits_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class SimQueue:
    """A ring from ``producer`` to ``consumers``: ``depth`` entries of ``payload`` bytes a producing CTA.

    It lies in the L2. With ``cluster`` the CTAs at its ends are one cluster of so many, and payloads go from shared
    memory to shared memory: no level of memory moves a byte for them.

    ``room``, where given, is the number of entries in all. An entry may consist of ``parts``, of
    which ``abreast`` cross side by side (warpgroups), those of several entries too; by default all of one entry's.
    ``ratios``, one a consumer, say how many tiles of the producer and of the consumer are equally much; by default all.

    The producer's tile ``t`` of ``n`` feeds the consumer's tiles from ``t * m / n`` on, where ``m`` are the consumer's:
    a consumer with fewer tiles takes several (a reduction: each entry is taken as it comes), one with more splits them.
    """

    producer: str
    consumers: tuple[str, ...]
    payload: float
    depth: int = 2
    room: int | None = None
    ratios: tuple[tuple[int, int], ...] | None = None
    parts: int = 1
    abreast: int | None = None
    cluster: int = 0


@dataclass(frozen=True)
class SimLaunch:
    """Stages that are resident together, and their queues: one kernel launch. A bulk operator is one stage."""

    name: str
    stages: tuple[SimStage, ...]
    queues: tuple[SimQueue, ...] = ()
    launch_s: float | None = None  # None: the device's

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class Workload:
    """Launches, one after another, each after all of the one before it has ended."""

    name: str
    launches: tuple[SimLaunch, ...]


def check(launch: SimLaunch) -> None:
    """Numbers are finite and not negative, names once, queues between stages of the launch, without cycles.

    Raises:
        WorkloadError: naming the stage and the number.
    """
    names = [s.name for s in launch.stages]
    if not names:
        raise WorkloadError(f"launch {launch.name!r} has no stages", "give it at least one")
    if len(set(names)) != len(names):
        raise WorkloadError(f"launch {launch.name!r} has two stages of one name", "give each stage its own name")
    for stage in launch.stages:
        _check_stage(stage)
    after: dict[str, set[str]] = {n: set() for n in names}
    for q in launch.queues:
        _check_queue(q, launch.name, names)
        after[q.producer] |= set(q.consumers)
    if stuck := _in_cycles(after):
        raise WorkloadError(
            f"the stages {', '.join(stuck)} of launch {launch.name!r} wait for each other", "cut the cycle"
        )


def _check_stage(stage: SimStage) -> None:
    for what, least, value in (("tiles", 0, stage.tiles), ("ctas", 1, stage.ctas), ("registers", 0, stage.registers)):
        if value < least:
            raise WorkloadError(f"stage {stage.name!r} has {value} {what}", f"use at least {least}")
    for what, of in (("weights", stage.weights), ("waits", stage.waits_s)):
        if of and (len(of) != stage.tiles or not all(math.isfinite(x) and x >= 0 for x in of)):
            raise WorkloadError(
                f"stage {stage.name!r} has {len(of)} {what} for {stage.tiles} tiles, from {min(of)} to {max(of)}",
                "give each tile one, finite and not negative",
            )
    if stage.weights and not math.isclose(sum(stage.weights), stage.tiles, rel_tol=1e-6):
        raise WorkloadError(
            f"stage {stage.name!r} has weights that sum to {sum(stage.weights)}, and {stage.tiles} tiles",
            "let their mean be 1",
        )
    for part in (stage.work, stage.once):
        for name in AMOUNTS:
            value = getattr(part, name)
            if not (math.isfinite(value) and value >= 0):
                raise WorkloadError(
                    f"stage {stage.name!r} has {name} = {value}", "use a finite number that is not negative"
                )
        if part.multicast < 1:
            raise WorkloadError(f"stage {stage.name!r} has multicast = {part.multicast}", "use at least 1")
        if not 0 < part.tensor_share <= 1:
            raise WorkloadError(
                f"stage {stage.name!r} has tensor_share = {part.tensor_share}", "use a share above 0, at most 1"
            )


def _check_queue(q: SimQueue, launch: str, names: Sequence[str]) -> None:
    for end in (q.producer, *q.consumers):
        if end not in names:
            raise WorkloadError(
                f"a queue of launch {launch!r} ends at {end!r}, which is no stage of it",
                f"use one of: {', '.join(names)}",
            )
    entries = q.depth if q.room is None else q.room
    if entries < 1 or q.parts < 1 or (q.abreast or 1) < 1 or not (math.isfinite(q.payload) and q.payload > 0):
        raise WorkloadError(
            f"the queue from {q.producer!r} has {entries} entries of {q.payload} bytes in {q.parts} parts",
            "use at least 1 entry, 1 part and a payload above 0",
        )
    if q.ratios is not None and (len(q.ratios) != len(q.consumers) or min(map(min, q.ratios)) < 1):
        raise WorkloadError(
            f"the queue from {q.producer!r} to {len(q.consumers)} consumers has ratios {q.ratios}",
            "give one pair of numbers above 0 for each consumer",
        )


def _in_cycles(after: Mapping[str, set[str]]) -> list[str]:
    """Names that wait for each other, or for those that do. ``after``: of each name, those that come behind it."""
    indegree = {n: sum(n in later for later in after.values()) for n in after}
    ready = [n for n in after if not indegree[n]]
    while ready:
        for later in after[ready.pop()]:
            indegree[later] -= 1
            if indegree[later] == 0:
                ready.append(later)
    return [n for n in after if indegree[n] > 0]
