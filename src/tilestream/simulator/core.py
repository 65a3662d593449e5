"""The event loop of one launch. Compiled by numba; deterministic.

A CTA works on its tiles in turn: LOAD asks the memories, one tile ahead; TENSOR and SIMT take the pipes of its SM;
DONE waits for room, stores, hands on. Every memory and every pipe is a server: requests in order of time, one after
another, at its rate, so that none is ever busier than it can be. Loads of many CTAs come interleaved, in ``PARTS``
parts: work starts when the first has come, and ends no earlier than one part's work after the last.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from tilestream.simulator.heap import pop, push
from tilestream.simulator.tables import Edges, Links, Rings, Stages

PARTS = 8
BINS = 64
LOAD, TENSOR, SIMT, DONE, ONCE = range(5)
REASONS = ("launch", "weights", "queue", "dram", "l2", "pipe", "room")
ON_LAUNCH, ON_WEIGHTS, ON_QUEUE, ON_DRAM, ON_L2, ON_PIPE, ON_ROOM = range(7)
USE_TENSOR, USE_SIMT, USE_DRAM, USE_L2 = range(4)
DRAM, L2 = 0, 1


class Servers(NamedTuple):
    """When each server is free: ``memory`` [DRAM, L2], ``port``, ``tensor``, ``simt`` [SMs]; what it has done."""

    memory: np.ndarray
    port: np.ndarray
    tensor: np.ndarray
    simt: np.ndarray
    used: np.ndarray  # [4, BINS] seconds busy in each bin of time
    width: np.ndarray  # [1] seconds of a bin


class Ctas(NamedTuple):
    """State of every CTA: int64, and float64 times."""

    stage: np.ndarray
    sm: np.ndarray
    to_load: np.ndarray
    tile: np.ndarray
    awaits: np.ndarray  # 1: its next tile to load has not arrived
    busy: np.ndarray  # 1: a tile is being worked on, or about to be
    loaded: np.ndarray  # 1: the tile after that is loaded
    blocked: np.ndarray  # ring + 1 that has no room for its finished tile
    free_at: np.ndarray
    sent_at: np.ndarray  # when it came to its SM, and when its weights were there
    begin_at: np.ndarray
    issued_at: np.ndarray
    start_at: np.ndarray
    load_end: np.ndarray
    load_limit: np.ndarray
    late: np.ndarray  # load_end and load_limit of the tile in work
    late_limit: np.ndarray
    started: np.ndarray
    worked: np.ndarray
    waited: np.ndarray  # of the tile in work
    reason: np.ndarray


class Tiles(NamedTuple):
    """State of every tile of every stage, and of every slot use of every ring."""

    need: np.ndarray
    ready: np.ndarray
    last_edge: np.ndarray
    pushed: np.ndarray
    left: np.ndarray
    freed: np.ndarray


class Events(NamedTuple):
    times: np.ndarray
    keys: np.ndarray
    codes: np.ndarray
    counts: np.ndarray  # [in the heap, pushed so far, handled]


class Log(NamedTuple):
    """``waits`` [stages, reasons] in CTA seconds; ``busy``, ``end`` [stages]; spans of every tile if traced."""

    waits: np.ndarray
    busy: np.ndarray
    done: np.ndarray
    end: np.ndarray
    traced: np.ndarray  # [tiles, 2]: CTA, reason; without entries where not traced
    times: np.ndarray  # [tiles, 3]: start, end of the work, waited


@njit(cache=True)
def _add(events, time, kind, cta, ctas):
    counts = events.counts
    counts[0] = push(events.times, events.keys, events.codes, counts[0], time, counts[1], kind * ctas + cta)
    counts[1] += 1


@njit(cache=True)
def _note(servers, use, start, end):
    """Add a busy interval to the histogram; its bins double when time runs past them."""
    if end <= start:
        return
    width, used = servers.width, servers.used
    while end > width[0] * BINS:
        for row in range(used.shape[0]):
            for i in range(BINS // 2):
                used[row, i] = used[row, 2 * i] + used[row, 2 * i + 1]
            for i in range(BINS // 2, BINS):
                used[row, i] = 0.0
        width[0] *= 2
    i = min(int(start / width[0]), BINS - 1)
    while start < end:
        stop = min(end, (i + 1) * width[0]) if i < BINS - 1 else end
        if stop > start:
            used[use, i] += stop - start
            start = stop
        i += 1


@njit(cache=True)
def _serve(free, index, now, seconds):
    free[index] = max(free[index], now) + seconds
    return free[index]


@njit(cache=True)
def _move(servers, sm, now, seconds):
    """Ask DRAM, L2 and the SM's port for ``seconds``: when all is moved, and what was last."""
    end, limit = now, ON_DRAM
    for which in range(2):
        if seconds[which] > 0:
            at = _serve(servers.memory, which, now, seconds[which])
            _note(servers, USE_DRAM + which, at - seconds[which], at)
            if at > end:
                end, limit = at, ON_DRAM + which
    if seconds[2] > 0:
        at = _serve(servers.port, sm, now, seconds[2])
        if at > end:
            end, limit = at, ON_L2
    return end, limit


@njit(cache=True)
def _span(index, own, other, tiles):
    """First and last tile of the other end of an edge that share rows with tile ``index``: ``own`` of these tiles are
    as much as ``other`` of those, of which there are ``tiles``."""
    return index * other // own, min(((index + 1) * other + own - 1) // own, tiles) - 1


@njit(cache=True)
def _free(ring, tile, at, stages, rings, ctas, tiles, events):
    """An entry was taken: the last taker frees it, and wakes the CTA that waits for its room."""
    slot = rings.first[ring] + tile
    tiles.left[slot] -= 1
    tiles.freed[slot] = max(tiles.freed[slot], at)
    if tiles.left[slot] > 0:
        return
    producer = rings.producer[ring]
    after = tile + rings.room[ring]
    if after < stages.tiles[producer]:
        cta = stages.first_cta[producer] + after % stages.ctas[producer]
        if ctas.blocked[cta] == ring + 1 and ctas.tile[cta] == after:
            ctas.blocked[cta] = 0
            _add(events, tiles.freed[slot], DONE, cta, len(ctas.stage))


@njit(cache=True)
def _try_load(cta, now, stages, rings, edges, links, ctas, tiles, events):
    """Ask for the load of the CTA's next tile once its inputs are there; reductions take what has come."""
    s = ctas.stage[cta]
    j = ctas.to_load[cta]
    if j >= stages.tiles[s]:
        return
    for k in range(links.in_edge_start[s], links.in_edge_start[s + 1]):
        e = links.in_edges[k]
        if edges.many[e]:
            p = edges.producer[e]
            first, last = _span(j, edges.takes[e], edges.gives[e], stages.tiles[p])
            for t in range(first, last + 1):
                pushed = tiles.pushed[stages.first_tile[p] + t]
                if pushed >= 0:
                    at = max(now, pushed + edges.flight[e])
                    _free(edges.ring[e], t, at, stages, rings, ctas, tiles, events)
    tile = stages.first_tile[s] + j
    if tiles.need[tile] > 0:
        ctas.awaits[cta] = 1
    else:
        _add(events, max(now, tiles.ready[tile]), LOAD, cta, len(ctas.stage))


@njit(cache=True)
def _hand_on(cta, t, now, stages, rings, edges, links, ctas, tiles, events):
    """Tile ``t`` enters its queues: consumers' tiles that lacked it may be loaded."""
    s = ctas.stage[cta]
    tiles.pushed[stages.first_tile[s] + t] = now
    for k in range(links.out_edge_start[s], links.out_edge_start[s + 1]):
        e = links.out_edges[k]
        c = edges.consumer[e]
        if stages.tiles[c] == 0:
            continue
        at = now + edges.flight[e]
        first, last = _span(t, edges.gives[e], edges.takes[e], stages.tiles[c])
        for j in range(first, last + 1):
            tile = stages.first_tile[c] + j
            tiles.need[tile] -= 1
            if at >= tiles.ready[tile]:
                tiles.ready[tile] = at
                tiles.last_edge[tile] = e
            taker = stages.first_cta[c] + j % stages.ctas[c]
            if ctas.awaits[taker] == 1 and ctas.to_load[taker] == j:
                if edges.many[e]:
                    _free(edges.ring[e], t, at, stages, rings, ctas, tiles, events)
                if tiles.need[tile] == 0:
                    ctas.awaits[taker] = 0
                    _add(events, max(now, tiles.ready[tile]), LOAD, taker, len(ctas.stage))


@njit(cache=True)
def _account(cta, s, now, tile, ctas, tiles, log):
    """Say what the CTA waited for between its last tile and this one."""
    at = ctas.free_at[cta]
    total, most, reason = now - at, 0.0, -1
    stops = (ctas.sent_at[cta], ctas.begin_at[cta], ctas.issued_at[cta], now)
    whys = (ON_LAUNCH, ON_WEIGHTS, ON_QUEUE, ctas.load_limit[cta])
    for i in range(4):
        stop = min(stops[i], now)
        if stop > at:
            log.waits[s, whys[i]] += stop - at
            if stop - at > most:
                most, reason = stop - at, whys[i]
            at = stop
    ctas.waited[cta] = total
    ctas.reason[cta] = len(REASONS) + tiles.last_edge[tile] if reason == ON_QUEUE else reason


@njit(cache=True)
def _work(cta, s, now, kind, stages, servers, ctas, events, log):
    """Take the pipes: both at once, or the tensor pipe and then the SIMT pipes."""
    sm, count = ctas.sm[cta], len(ctas.stage)
    end = now
    tensor, simt = stages.tensor[s], stages.simt[s]
    part = (tensor + simt) / PARTS
    if kind == TENSOR and tensor > 0:
        at = _serve(servers.tensor, sm, now, tensor)
        _note(servers, USE_TENSOR, at - tensor, at)
        log.waits[s, ON_PIPE] += at - tensor - now
        end = at
        if simt > 0 and not stages.overlap[s]:
            _add(events, at, SIMT, cta, count)
            return
    if simt > 0:
        at = _serve(servers.simt, sm, now, simt)
        _note(servers, USE_SIMT, at - simt, at)
        if not stages.overlap[s]:
            log.waits[s, ON_PIPE] += at - simt - now
        end = max(end, at)
    late, limit = ctas.late[cta] + part, ctas.late_limit[cta]
    if late > end:
        log.waits[s, limit] += late - end
        ctas.waited[cta] += late - end
        ctas.reason[cta] = limit if ctas.reason[cta] < 0 else ctas.reason[cta]
    ctas.worked[cta] = max(end, late) + stages.latency[s]
    _add(events, ctas.worked[cta], DONE, cta, count)


@njit(cache=True)
def _room_at(s, t, rings, links, tiles):
    """When every ring has room for tile ``t``; negative if not known yet: minus (ring + 1)."""
    at = 0.0
    for k in range(links.out_ring_start[s], links.out_ring_start[s + 1]):
        r = links.out_rings[k]
        old = t - rings.room[r]
        if old >= 0:
            slot = rings.first[r] + old
            if tiles.left[slot] > 0:
                return -(r + 1.0)
            at = max(at, tiles.freed[slot] + rings.credit[r])
    return at


@njit(cache=True)
def _release(cta, s, t, now, stages, rings, edges, links, ctas, tiles, events):
    """The tile is done: entries that it read whole are free again."""
    for k in range(links.in_edge_start[s], links.in_edge_start[s + 1]):
        e = links.in_edges[k]
        if not edges.many[e] and stages.tiles[edges.producer[e]] > 0:
            first, last = _span(t, edges.takes[e], edges.gives[e], stages.tiles[edges.producer[e]])
            for old in range(first, last + 1):
                _free(edges.ring[e], old, now, stages, rings, ctas, tiles, events)


@njit(cache=True)
def prepare(stages: Stages, rings: Rings, edges: Edges, tiles: Tiles) -> None:
    """Count what each tile needs, and how often each ring entry is taken."""
    tiles.pushed[:] = -1.0
    for e in range(len(edges.ring)):
        p, c, r = edges.producer[e], edges.consumer[e], edges.ring[e]
        if stages.tiles[p] == 0 or stages.tiles[c] == 0:
            continue
        for j in range(stages.tiles[c]):
            first, last = _span(j, edges.takes[e], edges.gives[e], stages.tiles[p])
            tiles.need[stages.first_tile[c] + j] += last - first + 1
            for t in range(first, last + 1):
                tiles.left[rings.first[r] + t] += 1


@njit(cache=True)
def run(
    launch_s: float,
    stages: Stages,
    rings: Rings,
    edges: Edges,
    links: Links,
    servers: Servers,
    ctas: Ctas,
    tiles: Tiles,
    events: Events,
    log: Log,
) -> float:
    """Run to the end, or to where nothing can go on (then ``log.done`` is short). Gives the time of the end."""
    count = len(ctas.stage)
    waiting = np.zeros(len(stages.tiles), dtype=np.int64)  # the first CTA of each stage that has no SM yet
    for s in range(len(stages.tiles)):
        waiting[s] = stages.ctas[s]
        for i in range(stages.ctas[s]):
            cta = stages.first_cta[s] + i
            ctas.stage[cta] = s
            ctas.to_load[cta] = i
            if ctas.sm[cta] >= 0:
                _add(events, launch_s, ONCE, cta, count)
            elif i < waiting[s]:
                waiting[s] = i
    end = launch_s
    trace = len(log.traced) > 0
    while events.counts[0] > 0:
        events.counts[0] = pop(events.times, events.keys, events.codes, events.counts[0])
        last = events.counts[0]
        now = events.times[last]
        kind, cta = divmod(events.codes[last], count)
        events.counts[2] += 1
        s = ctas.stage[cta]
        if kind == ONCE:
            ready, _ = _move(servers, ctas.sm[cta], now, stages.once[s])
            ready += stages.once_compute[s]
            ctas.sent_at[cta], ctas.begin_at[cta] = now, ready
            end = max(end, ready)
            _try_load(cta, now, stages, rings, edges, links, ctas, tiles, events)
        elif kind == LOAD:
            ctas.awaits[cta] = 0
            ctas.to_load[cta] += stages.ctas[s]
            at, limit = _move(servers, ctas.sm[cta], now, stages.load[s])
            ctas.issued_at[cta], ctas.load_end[cta], ctas.load_limit[cta] = now, at, limit
            ctas.start_at[cta] = max(now + (at - now) / PARTS, ctas.begin_at[cta])
            if ctas.busy[cta]:
                ctas.loaded[cta] = 1
            else:
                ctas.busy[cta] = 1
                _add(events, ctas.start_at[cta], TENSOR, cta, count)
        elif kind == TENSOR:
            t = ctas.to_load[cta] - stages.ctas[s]
            ctas.tile[cta] = t
            ctas.loaded[cta] = 0
            ctas.started[cta] = now
            ctas.late[cta], ctas.late_limit[cta] = ctas.load_end[cta], ctas.load_limit[cta]
            _account(cta, s, now, stages.first_tile[s] + t, ctas, tiles, log)
            _work(cta, s, now, TENSOR, stages, servers, ctas, events, log)
            _try_load(cta, now, stages, rings, edges, links, ctas, tiles, events)
        elif kind == SIMT:
            _work(cta, s, now, SIMT, stages, servers, ctas, events, log)
        else:
            t = ctas.tile[cta]
            at = _room_at(s, t, rings, links, tiles)
            if at < 0:
                ctas.blocked[cta] = int(-at)
                ctas.reason[cta] = len(REASONS) + len(edges.ring) + ctas.blocked[cta] - 1
                continue
            if at > now:
                _add(events, at, DONE, cta, count)
                continue
            log.waits[s, ON_ROOM] += now - ctas.worked[cta]
            log.busy[s] += ctas.worked[cta] - ctas.started[cta]
            if trace:
                row = stages.first_tile[s] + t
                log.traced[row, 0], log.traced[row, 1] = cta, ctas.reason[cta]
                log.times[row, 0], log.times[row, 1] = ctas.started[cta], ctas.worked[cta]
                log.times[row, 2] = ctas.waited[cta] + now - ctas.worked[cta]
            stored, _ = _move(servers, ctas.sm[cta], now, stages.store[s])
            end = max(end, stored)
            log.end[s] = max(log.end[s], now)
            log.done[s] += 1
            ctas.free_at[cta] = now
            ctas.busy[cta] = 0
            _release(cta, s, t, now, stages, rings, edges, links, ctas, tiles, events)
            _hand_on(cta, t, now, stages, rings, edges, links, ctas, tiles, events)
            if ctas.loaded[cta]:
                ctas.busy[cta] = 1
                _add(events, max(now, ctas.start_at[cta]), TENSOR, cta, count)
            elif t + stages.ctas[s] >= stages.tiles[s] and waiting[s] < stages.ctas[s]:
                heir = stages.first_cta[s] + waiting[s]
                waiting[s] += 1
                ctas.sm[heir] = ctas.sm[cta]
                ctas.free_at[heir] = now
                _add(events, now, ONCE, heir, count)
    return end
