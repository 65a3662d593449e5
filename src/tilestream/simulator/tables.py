"""A launch on a device as arrays of seconds: what the event loop reads.

Amounts become seconds here: of a pipe of one SM, of the DRAM, of the L2, of the port between the L2 and an SM.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tilestream.devices import Device
from tilestream.simulator.placement import Placement
from tilestream.simulator.workload import SimLaunch, SimQueue, SimStage, TileWork


class Stages(NamedTuple):
    """One entry a stage: int64 counts, float64 seconds of one tile (``once``: of one CTA)."""

    tiles: np.ndarray
    ctas: np.ndarray
    first_tile: np.ndarray
    first_cta: np.ndarray
    overlap: np.ndarray
    tensor: np.ndarray
    simt: np.ndarray
    latency: np.ndarray
    load: np.ndarray  # [stages, 3]: DRAM, L2, port
    store: np.ndarray  # the same
    once: np.ndarray  # the same
    once_compute: np.ndarray


class Rings(NamedTuple):
    """One entry a queue. ``room`` is how many tiles of its producer it holds in all."""

    producer: np.ndarray
    first: np.ndarray
    room: np.ndarray
    credit: np.ndarray


class Edges(NamedTuple):
    """One entry a consumer of a queue: ``gives`` tiles of the producer are as much as ``takes`` of the consumer.

    ``many`` says that one tile of the consumer takes several of the producer's.
    """

    ring: np.ndarray
    producer: np.ndarray
    consumer: np.ndarray
    flight: np.ndarray
    gives: np.ndarray
    takes: np.ndarray
    many: np.ndarray


class Links(NamedTuple):
    """Rings and edges by stage: entry ``i`` of stage ``s`` is ``list[start[s] + i]``."""

    out_ring_start: np.ndarray
    out_rings: np.ndarray
    out_edge_start: np.ndarray
    out_edges: np.ndarray
    in_edge_start: np.ndarray
    in_edges: np.ndarray


class Tables(NamedTuple):
    stages: Stages
    rings: Rings
    edges: Edges
    links: Links
    sm_of: np.ndarray
    sms: int
    launch_s: float


class Bytes(NamedTuple):
    """Bytes that a launch moves at each level, and its tensor FLOPs."""

    dram: float
    l2: float
    flops: float


def compute_s(work: TileWork, device: Device) -> tuple[float, float]:
    """Seconds of one tile on the tensor pipe and on the SIMT pipes of one SM."""
    tensor = work.tensor_flops / (device.tensor_flops[work.dtype] / device.sms)
    simt = max(work.simt_ops / (device.simt_flops / device.sms), work.sfu_ops / (device.sfu_ops_per_s / device.sms))
    return tensor, simt


def spilled(launch: SimLaunch, device: Device) -> float:
    """Share of what passes through the rings that does not fit into the L2 and goes by DRAM."""
    ctas = {s.name: s.ctas for s in launch.stages}
    footprint = sum(room_of(q, ctas[q.producer]) * q.payload for q in launch.queues)
    return max(0.0, 1.0 - device.l2_bytes / footprint) if footprint > 0 else 0.0


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
            l2 += times * (_l2_read(work) + work.l2_shared_read + max(work.l2_write, work.dram_write))
            flops += times * work.tensor_flops
    by_name = {s.name: s for s in launch.stages}
    rings = 0.0
    for q in launch.queues:
        once = q.payload * by_name[q.producer].tiles
        rings += once + sum(once for c in q.consumers if by_name[c].tiles)
    return Bytes(dram + rings * spilled(launch, device), l2 + rings, flops)


def _l2_read(work: TileWork) -> float:
    return max(work.l2_read, work.dram_read - work.l2_shared_read)


def build(launch: SimLaunch, device: Device, placement: Placement, whole: SimLaunch | None = None) -> Tables:
    """Arrays of ``launch``; seconds at the rates of ``device``.

    Args:
        whole: the launch before its tiles were joined in groups; queues pass its payloads, a group's at a time.
    """
    whole = whole or launch
    index = {s.name: i for i, s in enumerate(launch.stages)}
    grown = [w.tiles / s.tiles if s.tiles else 1.0 for w, s in zip(whole.stages, launch.stages, strict=True)]
    count = len(launch.stages)
    spill = spilled(whole, device)
    load, store, once = (np.zeros((count, 3)) for _ in range(3))
    tensor, simt, latency, once_compute = (np.zeros(count) for _ in range(4))
    for i, stage in enumerate(launch.stages):
        tensor[i], simt[i] = compute_s(stage.work, device)
        latency[i] = stage.work.latency_s
        load[i], store[i] = _memory(stage.work, device)
        once[i] = sum(_memory(stage.once, device))
        once_compute[i] = sum(compute_s(stage.once, device)) + stage.once.latency_s
    exposed = np.zeros(count)
    for q in launch.queues:
        p = index[q.producer]
        store[p] += grown[p] * _queue(q.payload, spill, device)
        for name in q.consumers:
            i = index[name]
            part = entries(q, whole.stages[p], whole.stages[i])
            load[i] += grown[i] * _queue(q.payload * part, spill, device)
            one = q.payload / q.parts
            seconds = part * device.queue_s(one) if part >= 1 else device.queue_s(one * part)
            exposed[i] = max(exposed[i], grown[i] * device.queue_exposed * seconds)
    tiles = np.array([s.tiles for s in launch.stages], dtype=np.int64)
    ctas = np.array([s.ctas for s in launch.stages], dtype=np.int64)
    stages = Stages(
        tiles,
        ctas,
        _starts(tiles)[:-1],
        _starts(ctas)[:-1],
        np.array([s.overlap for s in launch.stages], dtype=np.int64),
        tensor,
        simt,
        latency + exposed,
        load,
        store,
        once,
        once_compute,
    )
    rings, edges = _queues(launch, index, tiles, ctas, device)
    sm_of = np.array([sm for stage in placement.sms for sm in stage], dtype=np.int64)
    launch_s = device.launch_s if launch.launch_s is None else launch.launch_s
    return Tables(stages, rings, edges, _links(rings, edges, count), sm_of, device.sms, launch_s)


def _memory(work: TileWork, device: Device) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of DRAM, L2 and port that the loads and the stores of a tile take."""
    read, write = _l2_read(work), max(work.l2_write, work.dram_write)
    shared = work.l2_shared_read
    load = (
        work.dram_read / device.dram_bytes_per_s,
        read / device.l2_bytes_per_s + shared / device.l2_shared_bytes_per_s,
        (read + shared) / device.sm_bytes_per_s,
    )
    store = (work.dram_write / device.dram_bytes_per_s, write / device.l2_bytes_per_s, write / device.sm_bytes_per_s)
    return np.array(load), np.array(store)


def _queue(payload: float, spill: float, device: Device) -> np.ndarray:
    return np.array(
        (
            spill * payload / device.dram_bytes_per_s,
            payload / device.l2_bytes_per_s,
            payload / device.sm_bytes_per_s,
        )
    )


def _queues(
    launch: SimLaunch, index: dict[str, int], tiles: np.ndarray, ctas: np.ndarray, device: Device
) -> tuple[Rings, Edges]:
    producer = np.array([index[q.producer] for q in launch.queues], dtype=np.int64)
    room = np.array([room_of(q, int(ctas[index[q.producer]])) for q in launch.queues], dtype=np.int64)
    hidden = 1 - device.queue_exposed
    credit = np.array([hidden * device.queue_s(1) for _ in launch.queues])
    ends = [(r, index[q.producer], index[c], q) for r, q in enumerate(launch.queues) for c in q.consumers]
    ratios = [ratio_of(q, launch.stages[p], launch.stages[c]) for _, p, c, q in ends]
    edges = Edges(
        np.array([r for r, _, _, _ in ends], dtype=np.int64),
        np.array([p for _, p, _, _ in ends], dtype=np.int64),
        np.array([c for _, _, c, _ in ends], dtype=np.int64),
        np.array([hidden * device.queue_s(q.payload / q.parts) for _, _, _, q in ends]),
        np.array([gives for gives, _ in ratios], dtype=np.int64),
        np.array([takes for _, takes in ratios], dtype=np.int64),
        np.array([gives > takes for gives, takes in ratios], dtype=np.int64),
    )
    first = _starts(tiles[producer])[:-1] if len(producer) else np.zeros(0, dtype=np.int64)
    return Rings(producer, first, room, credit), edges


def _links(rings: Rings, edges: Edges, stages: int) -> Links:
    return Links(
        *_grouped(rings.producer, stages), *_grouped(edges.producer, stages), *_grouped(edges.consumer, stages)
    )


def _grouped(owner: np.ndarray, stages: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of ``owner`` by its value, and where each value's begin."""
    order = np.argsort(owner, kind="stable").astype(np.int64)
    return _starts(np.bincount(owner, minlength=stages).astype(np.int64)), order


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)])
