"""Rows of a tile and CTAs of a stage, together: the balance (3.3) for every size of tile, and the best of them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from math import ceil

from tilestream.devices import Device
from tilestream.plan.balance import Balance, Load, balance
from tilestream.simulator.launch import LaunchResult, simulate
from tilestream.studies.kitsune.compiler.launch import launch
from tilestream.studies.kitsune.compiler.operators import OperatorGraph
from tilestream.studies.kitsune.compiler.schedule import expressible, scheduled
from tilestream.studies.kitsune.compiler.staged import Staged
from tilestream.studies.kitsune.compiler.tiling import Tile, Work, shapes, tiles_of, works
from tilestream.studies.kitsune.compiler.traffic import launch_bytes

SIMULATED = 6
"""Candidates that are simulated, the best by prediction."""
REMEMBERED = 1024
"""Choices that are kept: layers of one shape come many times in a model, and models on many devices."""
MOST_TILES = 12_000
"""Tiles of a pipeline that are simulated one by one to choose; those of longer ones are joined in groups."""
REFINED = 3
"""Times that the best one is balanced again, while that helps."""


@dataclass(frozen=True)
class Choice:
    """A tile, and the CTAs of every stage in the pipeline's order; ``limit`` is the number of a stage, or its name."""

    tile: Tile
    ctas: tuple[int, ...]
    limit: int | str

    @staticmethod
    def of(p: Staged, tile: Tile, found: Balance) -> Choice:
        limit = p.names.index(found.limit) if found.limit in p.names else found.limit
        return Choice(tile, tuple(found.ctas[name] for name in p.names), limit)

    def by_name(self, p: Staged) -> dict[str, int]:
        return dict(zip(p.names, self.ctas, strict=True))

    def made(self, p: Staged) -> Staged:
        limit = self.limit if isinstance(self.limit, str) else p.names[self.limit]
        return scheduled(p, self.tile, self.by_name(p), limit)


_chosen: dict[Hashable, Choice] = {}


def choose_tiles(p: Staged, graph: OperatorGraph, device: Device) -> Staged:
    """The tiles and the balance that take least time: the best few by prediction, then by simulation.

    Small tiles fill a pipeline sooner and leave less to the last step; large ones hide the queue's synchronisation.
    """
    key = _key(p, graph, device)
    if key not in _chosen:
        made = _choose(p, graph, device)
        if len(_chosen) >= REMEMBERED:
            _chosen.clear()
        _chosen[key] = made
    return _chosen[key].made(p)


def _key(p: Staged, graph: OperatorGraph, device: Device) -> Hashable:
    """What the choice depends on, without names: layers of one shape come many times in a model."""
    place = {name: i for i, name in enumerate(p.names)}
    rings = tuple((place[q.producer], tuple(place[c] for c in q.consumers), size) for q, size in p.passing)
    ends = tuple(tuple(works(p, graph, device, shape).values()) for shape in (shapes(p)[0], shapes(p)[-1]))
    halves = tuple((p.engine(name), p.is_partial(name), p.is_final(name)) for name in p.names)
    return halves, rings, ends, device.arbiters, repr(device)


def _choose(p: Staged, graph: OperatorGraph, device: Device) -> Choice:
    ranked: list[tuple[float, int, Choice]] = []
    for i, shape in enumerate(shapes(p)):
        made, work = balanced(p, graph, device, shape)
        ranked.append((predict(p, made, work, graph, device), i, made))
    ranked.sort(key=lambda found: found[:2])
    if len(p.names) == 1:
        return ranked[0][2]
    tried = [_simulated(p, made, graph, device) for _, _, made in ranked[:SIMULATED]]
    tried.sort(key=lambda found: found[0])
    for _ in range(REFINED):
        again = rebalanced(p, tried[0][1], tried[0][2], graph, device)
        found = _simulated(p, again, graph, device)
        if found[0] >= tried[0][0]:
            break
        tried[0] = found
    return tried[0][1]


def _simulated(p: Staged, made: Choice, graph: OperatorGraph, device: Device) -> tuple[float, Choice, LaunchResult]:
    result = simulate(launch(made.made(p), graph, device), device, device.arbiters, MOST_TILES)
    return result.seconds, made, result


def rebalanced(p: Staged, made: Choice, result: LaunchResult, graph: OperatorGraph, device: Device) -> Choice:
    """The balance again, with the time that each stage's tiles were seen to take: the paper's two-pass compile."""
    seen = dict(zip(p.names, result.stage_busy_s, strict=True))
    work = works(p, graph, device, made.tile, made.by_name(p))
    return Choice.of(p, made.tile, _solve(p, made.tile, work, graph, device, seen))


def balanced(p: Staged, graph: OperatorGraph, device: Device, shape: Tile) -> tuple[Choice, dict[str, Work]]:
    """The CTAs of ``balance`` for tiles of ``shape``; final sums grow with the CTAs before them."""
    work = works(p, graph, device, shape)
    found = _solve(p, shape, work, graph, device)
    work = works(p, graph, device, shape, found.ctas)  # a final sum adds one partial sum a CTA
    found = _solve(p, shape, work, graph, device)
    return Choice.of(p, shape, found), works(p, graph, device, shape, found.ctas)


def _solve(
    p: Staged,
    shape: Tile,
    work: dict[str, Work],
    graph: OperatorGraph,
    device: Device,
    seen: dict[str, float] | None = None,
) -> Balance:
    """Balance the streaming stages. Final sums work when the others have ended, so they share those SMs: as many CTAs
    as they have tiles, and together no more than there are SMs. A stage's CTAs are such as a mesh can have."""
    final = [name for name in p.names if p.is_final(name)]
    loads = []
    for name in p.names:
        if not p.is_final(name):
            tiles, _ = tiles_of(p, name, shape)
            seconds = seen[name] if seen else work[name].seconds(device)
            counts = expressible(p, name, shape, min(tiles, device.sms))
            loads.append(Load(name, p.engine(name), seconds, tiles, counts))
    found = balance(loads, device.sms, *memory_s(p, work, graph, device))
    share = device.sms // len(final) if final else 0
    late = {name: expressible(p, name, shape, max(1, min(work[name].tiles, share)))[-1] for name in final}
    return replace(found, ctas={name: (found.ctas | late)[name] for name in p.names})


def memory_s(p: Staged, work: dict[str, Work], graph: OperatorGraph, device: Device) -> tuple[float, float]:
    """Seconds that DRAM alone and the L2 alone take for one pass: Alg. 2's bandwidth limits."""
    distinct = sum((w.tile.l2_read + w.tile.l2_write + w.ring_bytes) * w.tiles for w in work.values())
    shared = sum(w.tile.l2_shared_read * w.tiles for w in work.values())
    l2 = distinct / device.l2_bytes_per_s + shared / device.l2_shared_bytes_per_s
    return launch_bytes(graph, p.node.ops) / device.dram_bytes_per_s, l2


def predict(p: Staged, made: Choice, work: dict[str, Work], graph: OperatorGraph, device: Device) -> float:
    """Seconds of a pass: the slowest stage's steps, or memory, and the way of the first tile through all stages."""
    ctas = made.by_name(p)
    taken = dict.fromkeys(p.names, 0.0)
    arrival = dict.fromkeys(p.names, 0.0)
    for queue, size in p.passing:
        sync = device.queue_exposed * device.queue_s(max(1.0, size / work[queue.producer].tiles))
        for c in queue.consumers:
            taken[c] = max(taken[c], sync)
    step = {n: w.tile_s(device) + taken[n] for n, w in work.items()}
    for _ in p.names:
        for queue, _ in p.passing:
            for c in queue.consumers:
                first = max(1, ceil(work[queue.producer].tiles / work[c].tiles / ctas[queue.producer]))
                arrival[c] = max(arrival[c], arrival[queue.producer] + first * step[queue.producer])
    steady = max(ceil(work[name].tiles / ctas[name]) * step[name] for name in p.names)
    fill = max(arrival[name] + step[name] for name in p.names)
    return max(steady, *memory_s(p, work, graph, device)) + fill
