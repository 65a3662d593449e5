"""A launch on a device as arrays of seconds: what the event loop reads.

Amounts become seconds here: of a pipe of one SM, of the DRAM, of the L2, of the port between the L2 and an SM.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tilestream.devices import Device
from tilestream.simulator.placement import Placement
from tilestream.simulator.workload import SimLaunch, SimQueue, SimStage, TileWork


def _fields(kind: type, *names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names]


STAGE = np.dtype(
    [
        *_fields(np.int64, "tiles", "ctas", "first_tile", "first_cta", "overlap"),
        *_fields(np.int64, "out_ring_first", "out_ring_stop", "out_edge_first", "out_edge_stop"),
        *_fields(np.int64, "in_edge_first", "in_edge_stop"),
        *_fields(np.float64, "tensor", "simt", "own", "latency", "once_compute"),
        *((name, np.float64, (3,)) for name in ("load", "store", "once")),
    ],
    align=True,
)
"""One record a stage: counts, and seconds of one tile (``once``: of one CTA); ``load``, ``store`` and ``once`` are
seconds of DRAM, L2 and port. ``out_ring_first`` and the like say which entries of ``Tables.links`` are its own."""

RING = np.dtype([*_fields(np.int64, "producer", "first", "room"), ("credit", np.float64)], align=True)
"""One record a queue. ``room`` is how many tiles of its producer it holds in all."""

EDGE = np.dtype(
    [*_fields(np.int64, "ring", "producer", "consumer", "gives", "takes", "many"), ("flight", np.float64)], align=True
)
"""One record a consumer of a queue: ``gives`` tiles of the producer are as much as ``takes`` of the consumer. ``many``
says that one tile of the consumer takes several of the producer's."""


class Tables(NamedTuple):
    """A launch for the event loop. ``links`` are the rings and edges of each stage, as the stages say; ``weights`` how
    much of its stage's work each tile is, ``waits_s`` what each waits besides."""

    stages: np.ndarray
    rings: np.ndarray
    edges: np.ndarray
    links: np.ndarray
    sm_of: np.ndarray
    sms: int
    launch_s: float
    weights: np.ndarray
    waits_s: np.ndarray


class Bytes(NamedTuple):
    """Bytes that a launch moves at each level, and its tensor FLOPs."""

    dram: float
    l2: float
    flops: float


def compute_s(work: TileWork, device: Device) -> tuple[float, float]:
    """Seconds of one tile on the tensor pipe and on the SIMT pipes of one SM."""
    tensor = work.full_rate_flops / (device.tensor_flops[work.dtype] / device.sms)
    simt = max(work.simt_ops / (device.simt_flops / device.sms), work.sfu_ops / (device.sfu_ops_per_s / device.sms))
    return tensor, simt


def handover_s(queue: SimQueue, part: float, device: Device) -> float:
    """Seconds in which ``part`` entries cross, ``abreast`` of their parts at a time; a part of a part is smaller."""
    parts, abreast = part * queue.parts, queue.abreast or queue.parts
    one = queue.payload / queue.parts
    return hop_s(queue, min(1.0, parts) * one, device) * max(1.0, parts / abreast)


def hop_s(queue: SimQueue, payload: float, device: Device) -> float:
    """Seconds for ``payload`` bytes from SM to SM by the way that the queue goes."""
    return device.dsm_s(payload) if queue.cluster else device.queue_s(payload)


def spilled(launch: SimLaunch, device: Device) -> float:
    """Share of what passes through the rings that does not fit into the L2 and goes by DRAM."""
    ctas = {s.name: s.ctas for s in launch.stages}
    footprint = sum(room_of(q, ctas[q.producer]) * q.payload for q in launch.queues if not q.cluster)
    return max(0.0, 1.0 - device.l2_bytes / footprint) if footprint > 0 else 0.0


def spilled_bytes(launch: SimLaunch, device: Device) -> float:
    """Bytes that rings send through DRAM since they do not fit into the L2, written and read."""
    return ring_bytes(launch) * spilled(launch, device)


def ring_bytes(launch: SimLaunch) -> float:
    """Bytes that pass through all rings in the L2: a write, and a read a consumer."""
    tiles = {s.name: s.tiles for s in launch.stages}
    return sum(
        q.payload * tiles[q.producer] * (1 + sum(tiles[c] > 0 for c in q.consumers))
        for q in launch.queues
        if not q.cluster
    )


def room_of(queue: SimQueue, ctas: int) -> int:
    """Entries of the ring in all, for a producer of ``ctas`` CTAs."""
    return queue.depth * ctas if queue.room is None else queue.room


def ratio_of(queue: SimQueue, producer: SimStage, consumer: SimStage) -> tuple[int, int]:
    """Tiles of the producer and of the consumer that are equally much."""
    if queue.ratios is None:
        return producer.tiles, consumer.tiles
    return queue.ratios[queue.consumers.index(consumer.name)]


def entries(queue: SimQueue, producer: SimStage, consumer: SimStage) -> float:
    """Entries of ``queue`` that one tile of ``consumer`` takes; a part of one where it has more tiles."""
    gives, takes = ratio_of(queue, producer, consumer)
    return gives / takes if takes else 0.0


def moved(launch: SimLaunch, device: Device) -> Bytes:
    """Bytes of the whole launch, counted from the workload."""
    dram = l2 = flops = 0.0
    for stage in launch.stages:
        for work, times in ((stage.work, stage.tiles), (stage.once, stage.ctas)):
            dram += times * (work.dram_read + work.dram_write)
            l2 += times * (_l2_read(work) + work.shared_served + max(work.l2_write, work.dram_write))
            flops += times * work.tensor_flops
    return Bytes(dram + spilled_bytes(launch, device), l2 + ring_bytes(launch), flops)


def _l2_read(work: TileWork) -> float:
    return max(work.l2_read, work.dram_read - work.l2_shared_read)


def build(launch: SimLaunch, device: Device, placement: Placement, whole: SimLaunch) -> Tables:
    """Arrays of ``launch``; seconds at the rates of ``device``.

    Args:
        whole: the launch before its tiles were joined in groups; queues pass its payloads, a group's at a time.
    """
    index = {s.name: i for i, s in enumerate(launch.stages)}
    grown = [w.tiles / s.tiles if s.tiles else 1.0 for w, s in zip(whole.stages, launch.stages, strict=True)]
    count = len(launch.stages)
    spill = spilled(whole, device)
    stages = np.zeros(count, dtype=STAGE)
    for record, stage in zip(stages, launch.stages, strict=True):
        record["tiles"], record["ctas"], record["overlap"] = stage.tiles, stage.ctas, stage.overlap
        record["tensor"], record["simt"] = compute_s(stage.work, device)
        record["latency"], record["own"] = stage.work.latency_s, stage.work.own_s
        record["load"], record["store"] = memory_s(stage.work, device)
        record["once"] = sum(memory_s(stage.once, device))
        record["once_compute"] = sum(compute_s(stage.once, device)) + stage.once.latency_s
    stages["first_tile"] = _starts(stages["tiles"])[:-1]
    stages["first_cta"] = _starts(stages["ctas"])[:-1]
    exposed = np.zeros(count)
    for q in launch.queues:
        p = index[q.producer]
        stages["store"][p] += grown[p] * _queue(q, q.payload, spill, device)
        for name in q.consumers:
            i = index[name]
            part = entries(q, whole.stages[p], whole.stages[i])
            stages["load"][i] += grown[i] * _queue(q, q.payload * part, spill, device)
            exposed[i] = max(exposed[i], grown[i] * device.queue_exposed * handover_s(q, part, device))
    stages["latency"] += exposed
    rings, edges = _queues(launch, index, stages, device)
    links = _links(stages, rings, edges)
    sm_of = np.array([sm for stage in placement for sm in stage], dtype=np.int64)
    launch_s = device.launch_s if launch.launch_s is None else launch.launch_s
    weights = np.concatenate([s.weights or np.ones(s.tiles) for s in launch.stages])
    waits_s = np.concatenate([s.waits_s or np.zeros(s.tiles) for s in launch.stages])
    return Tables(stages, rings, edges, links, sm_of, device.sms, launch_s, weights, waits_s)


def memory_s(work: TileWork, device: Device) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of DRAM, L2 and port that the loads and the stores of a tile take."""
    read, write = _l2_read(work), max(work.l2_write, work.dram_write)
    load = (
        work.dram_read / device.dram_bytes_per_s,
        read / device.l2_bytes_per_s + work.shared_served / device.l2_shared_bytes_per_s,
        (read + work.l2_shared_read) / device.sm_bytes_per_s,
    )
    store = (work.dram_write / device.dram_bytes_per_s, write / device.l2_bytes_per_s, write / device.sm_bytes_per_s)
    return np.array(load), np.array(store)


def _queue(queue: SimQueue, payload: float, spill: float, device: Device) -> np.ndarray:
    if queue.cluster:
        return np.array((0.0, 0.0, payload * device.sms / device.dsm_bytes_per_s))
    return np.array(
        (spill * payload / device.dram_bytes_per_s, payload / device.l2_bytes_per_s, payload / device.sm_bytes_per_s)
    )


def _queues(
    launch: SimLaunch, index: dict[str, int], stages: np.ndarray, device: Device
) -> tuple[np.ndarray, np.ndarray]:
    hidden = 1 - device.queue_exposed
    rings = np.zeros(len(launch.queues), dtype=RING)
    made = []
    for r, q in enumerate(launch.queues):
        p = index[q.producer]
        rings[r]["producer"], rings[r]["room"] = p, room_of(q, int(stages["ctas"][p]))
        rings[r]["credit"] = hidden * hop_s(q, 1, device)
        for name in q.consumers:
            gives, takes = ratio_of(q, launch.stages[p], launch.stages[index[name]])
            flight = hidden * hop_s(q, q.payload / q.parts, device)
            made.append((r, p, index[name], gives, takes, gives > takes, flight))
    rings["first"] = _starts(stages["tiles"][rings["producer"]])[:-1]
    return rings, np.array(made, dtype=EDGE)


def _links(stages: np.ndarray, rings: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Rings and edges grouped by stage, in one array; each stage is told where its own are."""
    parts, start = [], 0
    for name, owner in (
        ("out_ring", rings["producer"]),
        ("out_edge", edges["producer"]),
        ("in_edge", edges["consumer"]),
    ):
        parts.append(np.argsort(owner, kind="stable").astype(np.int64))
        stops = start + _starts(np.bincount(owner, minlength=len(stages)))
        stages[f"{name}_first"], stages[f"{name}_stop"] = stops[:-1], stops[1:]
        start += len(owner)
    return np.concatenate(parts)


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)])
