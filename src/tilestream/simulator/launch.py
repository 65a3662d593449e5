"""One launch through the event loop: coarsened where it is long, remembered where it comes again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from tilestream.devices import Device
from tilestream.errors import WorkloadError
from tilestream.simulator.placement import per_sm, place
from tilestream.simulator.tables import Bytes, Tables, build, compute_s, moved
from tilestream.simulator.workload import SimLaunch, SimStage

if TYPE_CHECKING:  # numba takes half a second to import, and the planner, which reads ``library``, runs no event loop
    from tilestream.simulator import core

MOST_TILES = 40_000  # tiles of one launch that are simulated one by one
LEAST_ROUNDS = 64  # a CTA has at least as many tiles after coarsening

Series = tuple[tuple[float, float, dict[str, float]], ...]


@dataclass(frozen=True)
class LaunchResult:
    """What the event loop found, in seconds from the start of the launch. ``traced`` rows are one a tile."""

    seconds: float
    bytes: Bytes
    busy_s: dict[str, float]
    """Seconds at full rate of each resource: tensor and simt are means over the SMs."""
    stage_busy_s: tuple[float, ...]
    stage_end_s: tuple[float, ...]
    waits: tuple[dict[str, float], ...]
    bins: Series
    events: int
    tiles: int
    coarse: int
    launch: SimLaunch
    traced: np.ndarray
    times: np.ndarray


def trimmed(stage: SimStage) -> SimStage:
    """A CTA without tiles does nothing: there are as many as have work."""
    return replace(stage, ctas=max(1, min(stage.ctas, stage.tiles)))


def coarsened(launch: SimLaunch, device: Device, most: int) -> tuple[SimLaunch, int]:
    """Join tiles of a long launch in groups, so that about ``most`` are left; never so that its pipeline gets short.

    All work is kept: a group is the sum of its tiles. What a group loses is the grain at the start and the end.
    """
    total = sum(s.tiles for s in launch.stages)
    rounds = []
    for s in launch.stages:
        slots = min(s.ctas, per_sm(s, device) * device.sms) if len(launch.stages) == 1 else s.ctas
        rounds.append(s.tiles / slots)
    factor = int(min(total / most, min(rounds) / LEAST_ROUNDS)) if total > most else 1
    if factor <= 1:
        return launch, 1
    stages = []
    for s in launch.stages:
        tiles = ceil(s.tiles / factor)
        ctas = min(s.ctas, tiles) if len(launch.stages) > 1 or s.ctas < s.tiles else tiles
        scale = s.tiles / tiles
        once = s.once.scaled(s.ctas / ctas)
        weights, waits = _joined(s.weights, tiles, scale), _joined(s.waits_s, tiles, 1.0)
        work = s.work.scaled(scale)
        stages.append(replace(s, tiles=tiles, ctas=ctas, work=work, once=once, weights=weights, waits_s=waits))
    return replace(launch, stages=tuple(stages)), factor


def _joined(weights: tuple[float, ...], tiles: int, scale: float) -> tuple[float, ...]:
    """Sums of groups of neighbours, ``tiles`` of them, over ``scale``."""
    group = np.arange(len(weights)) * tiles // max(1, len(weights))
    return tuple((np.bincount(group, np.array(weights), tiles) / scale).tolist()) if weights else ()


def simulate(
    launch: SimLaunch, device: Device, arbiters: int, most: int = MOST_TILES, trace: bool = False
) -> LaunchResult:
    """Run one launch.

    Raises:
        WorkloadError: it cannot be resident, or its queues hold too little for it to end: says which stages wait.
    """
    from tilestream.simulator import core

    launch = replace(launch, stages=tuple(trimmed(s) for s in launch.stages))
    counted = moved(launch, device)
    whole = launch
    launch, factor = (launch, 1) if trace else coarsened(launch, device, most)
    tables = build(launch, device, place(launch, device, arbiters), whole)
    servers, log, events, end = _run(tables, trace)
    _check(launch, log)
    stages = tables.stages
    busy = {
        "tensor": float((stages["tensor"] * stages["tiles"]).sum()) / device.sms,
        "simt": float((stages["simt"] * stages["tiles"]).sum()) / device.sms,
    }
    moving = (stages["load"] + stages["store"]) * stages["tiles"][:, None]
    per_level = moving + stages["once"] * stages["ctas"][:, None]
    busy |= {"dram": float(per_level[:, core.DRAM].sum()), "l2": float(per_level[:, core.L2].sum())}
    for stage in launch.stages:
        tensor, simt = compute_s(stage.once, device)
        busy["tensor"] += tensor * stage.ctas / device.sms
        busy["simt"] += simt * stage.ctas / device.sms
    return LaunchResult(
        end,
        counted,
        busy,
        tuple(log.busy.tolist()),
        tuple(log.end.tolist()),
        tuple({why: float(s) for why, s in zip(core.REASONS, row, strict=True)} for row in log.waits),
        _series(servers, device.sms, end),
        events,
        int(stages["tiles"].sum()),
        factor,
        launch,
        log.traced,
        log.times,
    )


def _run(tables: Tables, trace: bool) -> tuple[core.Servers, core.Log, int, float]:
    from tilestream.simulator import core

    stages, rings, edges, links, sm_of, sms, launch_s, weights, waits = tables
    count, total = len(sm_of), int(stages["tiles"].sum())
    servers = core.Servers(
        np.zeros(core.PORT_OF + core.PER_SM * sms), np.zeros((4, core.BINS)), np.array([core.LEAST_BIN_S])
    )
    ctas = np.zeros(count, dtype=core.CTA)
    ctas["sm"] = sm_of
    tiles = np.zeros(total, dtype=core.TILE)
    tiles["pushed"], tiles["weight"], tiles["wait"] = -1.0, weights, waits
    slots = np.zeros(int(stages["tiles"][rings["producer"]].sum()), dtype=core.SLOT)
    most = 4 * count + 16
    events = core.Events(
        np.zeros(most), np.zeros(most, dtype=np.int64), np.zeros(most, dtype=np.int64), np.zeros(3, dtype=np.int64)
    )
    kept = total if trace else 0
    log = core.Log(
        np.zeros((len(stages), len(core.REASONS))),
        np.zeros(len(stages)),
        np.zeros(len(stages), dtype=np.int64),
        np.zeros(len(stages)),
        np.zeros((kept, 4), dtype=np.int64),
        np.zeros((kept, 5)),
    )
    core.prepare(stages, rings, edges, tiles, slots)
    end = core.run(launch_s, stages, rings, edges, links, servers, ctas, tiles, slots, events, log)
    return servers, log, int(events.counts[2]), end


def _check(launch: SimLaunch, log: core.Log) -> None:
    short = [
        f"{s.name!r} at tile {d} of {s.tiles}" for s, d in zip(launch.stages, log.done, strict=True) if d < s.tiles
    ]
    if short:
        raise WorkloadError(
            f"launch {launch.name!r} cannot go on: {', '.join(short)} wait for each other's queues",
            "make the queues deeper, so that the shorter of two paths holds what the longer one needs",
        )


def _series(servers: core.Servers, sms: int, end: float) -> Series:
    from tilestream.simulator.core import BINS

    width = float(servers.width[0])
    full = (sms, sms, 1, 1)
    made = []
    for i in range(BINS):
        start, stop = i * width, min((i + 1) * width, end)
        if stop <= start:
            break
        shares = {
            name: float(servers.used[row, i]) / (full[row] * (stop - start))
            for row, name in enumerate(("tensor", "simt", "dram", "l2"))
        }
        made.append((start, stop, shares))
    return tuple(made)
