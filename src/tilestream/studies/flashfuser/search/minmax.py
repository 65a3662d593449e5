"""FlashFuser's own choice: the least of the slowest memory level, over all candidates that its rules leave."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from tilestream.devices import Device
from tilestream.kernels.coefficients.shared_tile import dsm_bytes_per_s
from tilestream.studies.flashfuser.dataflow.chain import Chain, Gate
from tilestream.studies.flashfuser.dataflow.schedule import AXES, SCHEDULES, Cluster, Dataflow, Schedule, Tiles
from tilestream.studies.flashfuser.dataflow.volumes import Candidates, Counts, dram, volumes
from tilestream.studies.flashfuser.search.rules import (
    CLUSTER_SIZES,
    cluster_agrees,
    consumers_can_meet,
    fits,
    spaces,
    sums_before_activation,
    tiles_of,
)

TOP = 11
"""Candidates that the paper compiles and times."""


@dataclass(frozen=True)
class Ranked:
    """A dataflow, seconds of its slowest level, which that is, and bytes at each level."""

    flow: Dataflow
    seconds: float
    limit: str
    volumes: dict[str, float]


@dataclass(frozen=True)
class Found:
    """The best few; ``legal`` candidates that the rules leave, ``tied`` of them within 1 % of the best cost."""

    top: tuple[Ranked, ...]
    legal: int
    tied: int


def level_seconds(chain: Chain, at: Candidates, device: Device) -> dict[str, Counts]:
    """C_l = V_l / B_l of DSM, the L2 and DRAM. DSM's rate is that of the cluster's size, which the device has."""
    made = volumes(chain, at)
    sizes = at.cluster["m"] * at.cluster["n"] * at.cluster["k"]
    rate = np.ones_like(np.asarray(sizes), dtype=float)
    for size in CLUSTER_SIZES[1:]:
        if size <= device.largest_cluster:
            rate = np.where(np.asarray(sizes) == size, dsm_bytes_per_s(device, size), rate)
    return {
        "dsm": made.dsm / rate,
        "l2": made.l2 / device.l2_bytes_per_s,
        "dram": dram(chain, at, device.l2_bytes) / device.dram_bytes_per_s,
    }


def best(chain: Chain, device: Device, most_blocks: int = 16, count: int = TOP) -> Found:
    """The ``count`` best by the paper's cost, best first; ties go to more blocks, then to the sum over all levels.

    Args:
        most_blocks: of a cluster; 1 means without DSM.
    """
    most_blocks = most_blocks if device.clusters else 1
    clusters = [
        c for c in (Cluster(*sizes) for sizes in product(CLUSTER_SIZES, repeat=4)) if _allowed(c, chain, most_blocks)
    ]
    schedules = [s for s in SCHEDULES if sums_before_activation(s) and consumers_can_meet(s) and _gates(s, chain)]
    tiles = {a: tiles_of(chain, a) or [chain.size(a)] for a in AXES}
    found: list[tuple[float, float, float, Schedule, tuple[int, ...]]] = []
    costs: list[np.ndarray] = []
    for at in spaces(chain, schedules, clusters, tiles):
        seconds = level_seconds(chain, at, device)
        shape = np.broadcast_shapes(*(np.shape(s) for s in (*seconds.values(), *at.trips.values())))
        slowest = np.broadcast_to(np.maximum.reduce(np.broadcast_arrays(*seconds.values())), shape)
        legal = np.broadcast_to(fits(chain, at, device) & _even(chain, at), shape)
        cost = np.where(legal, slowest, np.inf).ravel()
        costs.append(cost[np.isfinite(cost)])
        blocks = np.minimum(np.broadcast_to(at.blocks, shape).ravel(), device.sms)
        total = np.broadcast_to(sum(seconds.values()), shape).ravel()
        order = np.lexsort((total, -blocks, np.round(cost * 1e9)))[:count]
        where = zip(*np.unravel_index(order, shape), strict=True)
        found += [
            (float(cost[i]), -float(blocks[i]), float(total[i]), at.schedule, tuple(map(int, w)))
            for i, w in zip(order, where, strict=True)
            if np.isfinite(cost[i])
        ]
    found.sort(key=lambda f: (round(f[0] * 1e9), *f[1:3]))
    top = tuple(_ranked(chain, schedule, w, clusters, tiles, device) for *_, schedule, w in found[:count])
    tied = sum(int((c <= 1.01 * found[0][0]).sum()) for c in costs) if found else 0
    return Found(top, sum(map(len, costs)), tied)


def ranked(chain: Chain, flow: Dataflow, device: Device) -> Ranked:
    """One dataflow with its cost."""
    at = Candidates.of(chain, flow)
    seconds = {level: float(s) for level, s in level_seconds(chain, at, device).items()}
    limit = max(seconds, key=lambda level: seconds[level])
    made = volumes(chain, at)
    moved = {"dsm": made.dsm, "l2": made.l2, "dram": dram(chain, at, device.l2_bytes)}
    return Ranked(flow, seconds[limit], limit, {level: float(v) for level, v in moved.items()})


def _ranked(
    chain: Chain,
    schedule: Schedule,
    at: tuple[int, ...],
    clusters: list[Cluster],
    tiles: dict[str, list[int]],
    device: Device,
) -> Ranked:
    cluster, *block = at
    sizes = Tiles(*(tiles[a][i] for a, i in zip(AXES, block, strict=True)))
    return ranked(chain, Dataflow(schedule, clusters[cluster], sizes), device)


def _allowed(c: Cluster, chain: Chain, most_blocks: int) -> bool:
    gate = chain.gate is not Gate.SPATIAL or c.k == 2
    return gate and c.blocks <= most_blocks and cluster_agrees(c)


def _gates(s: Schedule, chain: Chain) -> bool:
    return chain.gate is not Gate.SPATIAL or "k" not in s.spatial


def _even(chain: Chain, at: Candidates) -> np.ndarray:
    """Groups take the same along each axis: ``Dataflow.check``, on arrays."""
    even = np.asarray(at.tiles["l"] % at.reduce == 0)
    for axis in AXES:
        over = 1 if axis == "k" and chain.gate is Gate.SPATIAL else at.cluster[axis]
        even = even & (chain.size(axis) % (over * at.tiles[axis]) == 0)
    return even
