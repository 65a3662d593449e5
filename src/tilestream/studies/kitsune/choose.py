"""Rows of a tile and CTAs of a stage, together: the balance (3.3) for every size of tile, and the best of them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from math import ceil

from tilestream.devices import Device
from tilestream.plan.spatial.balance import Balance, Load, balance
from tilestream.plan.spatial.operators import OperatorGraph
from tilestream.plan.spatial.traffic import launch_bytes
from tilestream.simulator.launch import LaunchResult, simulate
from tilestream.studies.kitsune.pipeline import Half, Spatial
from tilestream.studies.kitsune.tiling import TILES, Tile, Work, tiles_of, works
from tilestream.studies.kitsune.workloads import spatial

SIMULATED = 6
"""Candidates that are simulated, the best by prediction."""
REMEMBERED = 1024
"""Choices that are kept: layers of one shape come many times in a model, and models on many devices."""
_chosen: dict[Hashable, Spatial] = {}
MOST_TILES = 12_000
"""Tiles of a pipeline that are simulated one by one to choose; those of longer ones are joined in groups."""
REFINED = 3
"""Times that the best one is balanced again, while that helps."""


def choose_tiles(p: Spatial, graph: OperatorGraph, device: Device) -> Spatial:
    """The tiles and the balance that take least time: the best few by prediction, then by simulation.

    Small tiles fill a pipeline sooner and leave less to the last step; large ones hide the queue's synchronisation.
    """
    key = _key(p, graph, device)
    if key in _chosen:
        return _renamed(_chosen[key], p)
    made = _choose(p, graph, device)
    if len(_chosen) >= REMEMBERED:
        _chosen.clear()
    _chosen[key] = made
    return made


def _key(p: Spatial, graph: OperatorGraph, device: Device) -> Hashable:
    """What the choice depends on, without names: layers of one shape come many times in a model."""
    place = {s.name: i for i, s in enumerate(p.stages)}
    rings = tuple((place[q.producer], tuple(place[c] for c in q.consumers), q.bytes) for q in p.rings)
    ends = tuple(tuple(works(p, graph, device, shape).values()) for shape in (TILES[0], TILES[-1]))
    return tuple((s.engine, s.half) for s in p.stages), rings, ends, device.arbiters, repr(device)


def _renamed(made: Spatial, p: Spatial) -> Spatial:
    """``p`` with the tiles and CTAs of ``made``, whose stages are the same in the same order."""
    names = {a.name: b.name for a, b in zip(made.stages, p.stages, strict=True)}
    ctas = {names[name]: count for name, count in made.ctas.items()}
    return replace(p, ctas=ctas, rows=made.rows, columns=made.columns, limit=names.get(made.limit, made.limit))


def _choose(p: Spatial, graph: OperatorGraph, device: Device) -> Spatial:
    ranked: list[tuple[float, int, Spatial]] = []
    for i, shape in enumerate(TILES):
        made, work = balanced(p, graph, device, shape)
        ranked.append((predict(made, work, graph, device), i, made))
    ranked.sort(key=lambda found: found[:2])
    if len(p.stages) == 1:
        return ranked[0][2]
    tried = [_simulated(made, graph, device) for _, _, made in ranked[:SIMULATED]]
    tried.sort(key=lambda found: found[0])
    for _ in range(REFINED):
        again = rebalanced(tried[0][1], tried[0][2], graph, device)
        found = _simulated(again, graph, device)
        if found[0] >= tried[0][0]:
            break
        tried[0] = found
    return tried[0][1]


def _simulated(p: Spatial, graph: OperatorGraph, device: Device) -> tuple[float, Spatial, LaunchResult]:
    result = simulate(spatial(p, graph, device), device, device.arbiters, MOST_TILES)
    return result.seconds, p, result


def rebalanced(p: Spatial, result: LaunchResult, graph: OperatorGraph, device: Device) -> Spatial:
    """The balance again, with the time that each stage's tiles were seen to take: the paper's two-pass compile."""
    shape = Tile(p.rows, p.columns)
    seen = {s.name: busy for s, busy in zip(p.stages, result.stage_busy_s, strict=True)}
    found = _solve(p, works(p, graph, device, shape), graph, device, seen)
    return replace(p, ctas=found.ctas, limit=found.limit)


def balanced(p: Spatial, graph: OperatorGraph, device: Device, shape: Tile) -> tuple[Spatial, dict[str, Work]]:
    """``p`` with tiles of ``shape`` and the CTAs of ``balance``; final sums grow with the CTAs before them."""
    p = replace(p, rows=shape.rows, columns=shape.columns)
    work = works(p, graph, device, shape)
    for _ in range(2):  # a final sum adds one partial sum a CTA: its load is known once the CTAs are
        found = _solve(p, work, graph, device)
        p = replace(p, ctas=found.ctas, limit=found.limit)
        work = works(p, graph, device, shape)
    return p, work


def _solve(
    p: Spatial, work: dict[str, Work], graph: OperatorGraph, device: Device, seen: dict[str, float] | None = None
) -> Balance:
    """Balance the streaming stages. Final sums work when the others have ended, so they share those SMs: as many CTAs
    as they have tiles, and together no more than there are SMs."""
    shape = Tile(p.rows, p.columns)
    final = [s.name for s in p.stages if s.half is Half.FINAL]
    natural = {s.name: tiles_of([graph[n] for n in s.ops], shape, s.half)[0] for s in p.stages}
    loads = [
        Load(s.name, s.engine, seen[s.name] if seen else work[s.name].seconds(device), natural[s.name])
        for s in p.stages
        if s.half is not Half.FINAL
    ]
    found = balance(loads, device.sms, *memory_s(p, work, graph, device))
    late = {name: max(1, min(work[name].tiles, device.sms // len(final))) for name in final}
    return replace(found, ctas=found.ctas | late)


def memory_s(p: Spatial, work: dict[str, Work], graph: OperatorGraph, device: Device) -> tuple[float, float]:
    """Seconds that DRAM alone and the L2 alone take for one pass: Alg. 2's bandwidth limits."""
    distinct = sum((w.tile.l2_read + w.tile.l2_write + w.ring_bytes) * w.tiles for w in work.values())
    shared = sum(w.tile.l2_shared_read * w.tiles for w in work.values())
    l2 = distinct / device.l2_bytes_per_s + shared / device.l2_shared_bytes_per_s
    return launch_bytes(graph, p.node.ops) / device.dram_bytes_per_s, l2


def predict(p: Spatial, work: dict[str, Work], graph: OperatorGraph, device: Device) -> float:
    """Seconds of a pass: the slowest stage's steps, or memory, and the way of the first tile through all stages."""
    taken = {s.name: 0.0 for s in p.stages}
    arrival = {s.name: 0.0 for s in p.stages}
    for ring in p.rings:
        sync = device.queue_exposed * device.queue_s(max(1.0, ring.bytes / work[ring.producer].tiles))
        for c in ring.consumers:
            taken[c] = max(taken[c], sync)
    step = {n: w.tile_s(device) + taken[n] for n, w in work.items()}
    for _ in p.stages:
        for ring in p.rings:
            for c in ring.consumers:
                first = max(1, ceil(work[ring.producer].tiles / work[c].tiles / p.ctas[ring.producer]))
                arrival[c] = max(arrival[c], arrival[ring.producer] + first * step[ring.producer])
    steady = max(ceil(work[s.name].tiles / p.ctas[s.name]) * step[s.name] for s in p.stages)
    fill = max(arrival[s.name] + step[s.name] for s in p.stages)
    return max(steady, *memory_s(p, work, graph, device)) + fill
