"""The event loop of one launch. Compiled by numba; deterministic.

A CTA works on its tiles in turn: LOAD asks the memories, one tile ahead; TENSOR and SIMT take the pipes of its SM;
DONE waits for room, stores, hands on. Every memory and every pipe is a server: requests in order of time, one after
another, at its rate, so that none is ever busier than it can be. Loads of many CTAs come interleaved, in ``PARTS``
parts: work starts when the first has come, and ends no earlier than one part's work after the last.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from tilestream.simulator.heap import pop, push

PARTS = 8
BINS = 64
LEAST_BIN_S = 1e-7
LOAD, TENSOR, SIMT, DONE, ONCE = range(5)
REASONS = ("launch", "weights", "queue", "dram", "l2", "pipe", "room")
ON_LAUNCH, ON_WEIGHTS, ON_QUEUE, ON_DRAM, ON_L2, ON_PIPE, ON_ROOM = range(7)
USE_TENSOR, USE_SIMT, USE_DRAM, USE_L2 = range(4)
DRAM, L2 = 0, 1


Records = Any
"""A structured array, whose fields compiled code reads as attributes of its elements."""

PORT_OF, TENSOR_OF, SIMT_OF = 2, 3, 4
PER_SM = 3
"""Servers in one array: DRAM, L2, then the port, the tensor pipe and the SIMT pipes of each SM."""

CTA = np.dtype(
    [
        *((name, np.int64) for name in ("stage", "sm", "to_load", "tile")),
        ("awaits", np.int64),  # 1: its next tile to load has not arrived
        ("busy", np.int64),  # 1: a tile is being worked on, or about to be
        ("loaded", np.int64),  # 1: the tile after that is loaded
        ("blocked", np.int64),  # ring + 1 that has no room for its finished tile
        ("load_limit", np.int64),
        ("late_limit", np.int64),
        ("reason", np.int64),  # what the CTA waited for before the tile in work, and how long
        ("waited", np.float64),
        ("slow", np.float64),  # of its work, what it waited for its rows, which were still coming
        ("held", np.int64),  # what it waits for behind it
        ("free_at", np.float64),
        ("sent_at", np.float64),  # when it came to its SM, and when its weights were there
        ("begin_at", np.float64),
        ("issued_at", np.float64),
        ("start_at", np.float64),
        ("load_end", np.float64),
        ("late", np.float64),  # load_end and load_limit of the tile in work
        ("started", np.float64),
        ("worked", np.float64),
    ],
    align=True,
)
TILE = np.dtype(
    [
        ("need", np.int64),
        ("last_edge", np.int64),
        ("ready", np.float64),
        ("pushed", np.float64),
        ("weight", np.float64),  # of the stage's work
        ("wait", np.float64),  # and what nothing hides of it alone
    ],
    align=True,
)
SLOT = np.dtype([("left", np.int64), ("freed", np.float64)], align=True)
"""One use of a ring's entry: takers left, and when the last of them took it."""


class Servers(NamedTuple):
    """When each server is free, and the seconds that tensor, SIMT, DRAM and L2 were busy in each bin of time."""

    free: np.ndarray
    used: np.ndarray
    width: np.ndarray  # [1] seconds of a bin


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
    traced: np.ndarray  # [tiles, 4]: CTA, why it waited before, behind and inside; without entries where not traced
    times: np.ndarray  # [tiles, 5]: start and end of the work, waited before, behind and inside


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
def _move(servers, sm, now, seconds, weight):
    """Ask DRAM, L2 and the SM's port for ``weight`` times ``seconds``: when all is moved, and what was last."""
    end, limit = now, ON_DRAM
    for which in range(2):
        asked = seconds[which] * weight
        if asked > 0:
            at = _serve(servers.free, which, now, asked)
            _note(servers, USE_DRAM + which, at - asked, at)
            if at > end:
                end, limit = at, ON_DRAM + which
    if seconds[2] * weight > 0:
        at = _serve(servers.free, PORT_OF + PER_SM * sm, now, seconds[2] * weight)
        if at > end:
            end, limit = at, ON_L2
    return end, limit


@njit(cache=True)
def _span(index, own, other, tiles):
    """First and last tile of the other end of an edge that share rows with tile ``index``: ``own`` of these tiles are
    as much as ``other`` of those, of which there are ``tiles``."""
    return index * other // own, min(((index + 1) * other + own - 1) // own, tiles) - 1


@njit(cache=True)
def _free(ring, tile, at, stages, rings, ctas, slots, events):
    """An entry was taken: the last taker frees it, and wakes the CTA that waits for its room."""
    slot = rings[ring].first + tile
    slots[slot].left -= 1
    slots[slot].freed = max(slots[slot].freed, at)
    if slots[slot].left > 0:
        return
    producer = rings[ring].producer
    after = tile + rings[ring].room
    if after < stages[producer].tiles:
        cta = stages[producer].first_cta + after % stages[producer].ctas
        if ctas[cta].blocked == ring + 1 and ctas[cta].tile == after:
            ctas[cta].blocked = 0
            _add(events, slots[slot].freed, DONE, cta, len(ctas))


@njit(cache=True)
def _try_load(cta, now, stages, rings, edges, links, ctas, tiles, slots, events):
    """Ask for the load of the CTA's next tile once its inputs are there; reductions take what has come."""
    s = ctas[cta].stage
    j = ctas[cta].to_load
    if j >= stages[s].tiles:
        return
    for k in range(stages[s].in_edge_first, stages[s].in_edge_stop):
        e = links[k]
        if edges[e].many:
            p = edges[e].producer
            first, last = _span(j, edges[e].takes, edges[e].gives, stages[p].tiles)
            for t in range(first, last + 1):
                pushed = tiles[stages[p].first_tile + t].pushed
                if pushed >= 0:
                    at = max(now, pushed + edges[e].flight)
                    _free(edges[e].ring, t, at, stages, rings, ctas, slots, events)
    tile = stages[s].first_tile + j
    if tiles[tile].need > 0:
        ctas[cta].awaits = 1
    else:
        _add(events, max(now, tiles[tile].ready), LOAD, cta, len(ctas))


@njit(cache=True)
def _hand_on(cta, t, now, stages, rings, edges, links, ctas, tiles, slots, events):
    """Tile ``t`` enters its queues: consumers' tiles that lacked it may be loaded."""
    s = ctas[cta].stage
    tiles[stages[s].first_tile + t].pushed = now
    for k in range(stages[s].out_edge_first, stages[s].out_edge_stop):
        e = links[k]
        c = edges[e].consumer
        if stages[c].tiles == 0:
            continue
        at = now + edges[e].flight
        first, last = _span(t, edges[e].gives, edges[e].takes, stages[c].tiles)
        for j in range(first, last + 1):
            tile = stages[c].first_tile + j
            tiles[tile].need -= 1
            if at >= tiles[tile].ready:
                tiles[tile].ready = at
                tiles[tile].last_edge = e
            taker = stages[c].first_cta + j % stages[c].ctas
            if ctas[taker].awaits == 1 and ctas[taker].to_load == j:
                if edges[e].many:
                    _free(edges[e].ring, t, at, stages, rings, ctas, slots, events)
                if tiles[tile].need == 0:
                    ctas[taker].awaits = 0
                    _add(events, max(now, tiles[tile].ready), LOAD, taker, len(ctas))


@njit(cache=True)
def _account(cta, s, now, tile, ctas, tiles, log):
    """Say what the CTA waited for between its last tile and this one."""
    at = ctas[cta].free_at
    total, most, reason = now - at, 0.0, -1
    stops = (ctas[cta].sent_at, ctas[cta].begin_at, ctas[cta].issued_at, now)
    whys = (ON_LAUNCH, ON_WEIGHTS, ON_QUEUE, ctas[cta].load_limit)
    for i in range(4):
        stop = min(stops[i], now)
        if stop > at:
            log.waits[s, whys[i]] += stop - at
            if stop - at > most:
                most, reason = stop - at, whys[i]
            at = stop
    ctas[cta].waited, ctas[cta].slow, ctas[cta].held = total, 0.0, -1
    ctas[cta].reason = len(REASONS) + tiles[tile].last_edge if reason == ON_QUEUE else reason


@njit(cache=True)
def _work(cta, s, now, kind, stages, servers, ctas, tiles, events, log):
    """Take the pipes: both at once, or the tensor pipe and then the SIMT pipes."""
    sm, count = ctas[cta].sm, len(ctas)
    end = now
    tile = stages[s].first_tile + ctas[cta].tile
    weight = tiles[tile].weight
    tensor, simt, own = stages[s].tensor * weight, stages[s].simt * weight, stages[s].own * weight
    part = (tensor + simt + own) / PARTS
    if kind == TENSOR and tensor > 0:
        at = _serve(servers.free, TENSOR_OF + PER_SM * sm, now, tensor)
        _note(servers, USE_TENSOR, at - tensor, at)
        log.waits[s, ON_PIPE] += at - tensor - now
        end = at
        if simt > 0 and not stages[s].overlap:
            _add(events, at, SIMT, cta, count)
            return
    if simt > 0:
        at = _serve(servers.free, SIMT_OF + PER_SM * sm, now, simt)
        _note(servers, USE_SIMT, at - simt, at)
        if not stages[s].overlap:
            log.waits[s, ON_PIPE] += at - simt - now
        end = max(end, at)
    end += own
    late, limit = ctas[cta].late + part, ctas[cta].late_limit
    if late > end:
        log.waits[s, limit] += late - end
        ctas[cta].slow = late - end
    ctas[cta].worked = max(end, late) + stages[s].latency + tiles[tile].wait
    _add(events, ctas[cta].worked, DONE, cta, count)


@njit(cache=True)
def _room_at(s, t, stages, rings, links, slots):
    """When every ring has room for tile ``t``; negative if not known yet: minus (ring + 1)."""
    at = 0.0
    for k in range(stages[s].out_ring_first, stages[s].out_ring_stop):
        r = links[k]
        old = t - rings[r].room
        if old >= 0:
            slot = rings[r].first + old
            if slots[slot].left > 0:
                return -(r + 1.0)
            at = max(at, slots[slot].freed + rings[r].credit)
    return at


@njit(cache=True)
def _release(s, t, now, stages, rings, edges, links, ctas, slots, events):
    """The tile is done: entries that it read whole are free again."""
    for k in range(stages[s].in_edge_first, stages[s].in_edge_stop):
        e = links[k]
        if not edges[e].many and stages[edges[e].producer].tiles > 0:
            first, last = _span(t, edges[e].takes, edges[e].gives, stages[edges[e].producer].tiles)
            for old in range(first, last + 1):
                _free(edges[e].ring, old, now, stages, rings, ctas, slots, events)


@njit(cache=True)
def prepare(stages: Records, rings: Records, edges: Records, tiles: Records, slots: Records) -> None:
    """Count what each tile needs, and how often each ring entry is taken."""
    for e in range(len(edges)):
        p, c, r = edges[e].producer, edges[e].consumer, edges[e].ring
        if stages[p].tiles == 0 or stages[c].tiles == 0:
            continue
        for j in range(stages[c].tiles):
            first, last = _span(j, edges[e].takes, edges[e].gives, stages[p].tiles)
            tiles[stages[c].first_tile + j].need += last - first + 1
            for t in range(first, last + 1):
                slots[rings[r].first + t].left += 1


@njit(cache=True)
def run(
    launch_s: float,
    stages: Records,
    rings: Records,
    edges: Records,
    links: np.ndarray,
    servers: Servers,
    ctas: Records,
    tiles: Records,
    slots: Records,
    events: Events,
    log: Log,
) -> float:
    """Run to the end, or to where nothing can go on (then ``log.done`` is short). Gives the time of the end."""
    count = len(ctas)
    waiting = np.zeros(len(stages), dtype=np.int64)  # the first CTA of each stage that has no SM yet
    for s in range(len(stages)):
        waiting[s] = stages[s].ctas
        for i in range(stages[s].ctas):
            cta = stages[s].first_cta + i
            ctas[cta].stage = s
            ctas[cta].to_load = i
            if ctas[cta].sm >= 0:
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
        s = ctas[cta].stage
        if kind == ONCE:
            ready, _ = _move(servers, ctas[cta].sm, now, stages[s].once, 1.0)
            ready += stages[s].once_compute
            ctas[cta].sent_at, ctas[cta].begin_at = now, ready
            end = max(end, ready)
            _try_load(cta, now, stages, rings, edges, links, ctas, tiles, slots, events)
        elif kind == LOAD:
            ctas[cta].awaits = 0
            weight = tiles[stages[s].first_tile + ctas[cta].to_load].weight
            ctas[cta].to_load += stages[s].ctas
            at, limit = _move(servers, ctas[cta].sm, now, stages[s].load, weight)
            ctas[cta].issued_at, ctas[cta].load_end, ctas[cta].load_limit = now, at, limit
            ctas[cta].start_at = max(now + (at - now) / PARTS, ctas[cta].begin_at)
            if ctas[cta].busy:
                ctas[cta].loaded = 1
            else:
                ctas[cta].busy = 1
                _add(events, ctas[cta].start_at, TENSOR, cta, count)
        elif kind == TENSOR:
            t = ctas[cta].to_load - stages[s].ctas
            ctas[cta].tile = t
            ctas[cta].loaded = 0
            ctas[cta].started = now
            ctas[cta].late, ctas[cta].late_limit = ctas[cta].load_end, ctas[cta].load_limit
            _account(cta, s, now, stages[s].first_tile + t, ctas, tiles, log)
            _work(cta, s, now, TENSOR, stages, servers, ctas, tiles, events, log)
            _try_load(cta, now, stages, rings, edges, links, ctas, tiles, slots, events)
        elif kind == SIMT:
            _work(cta, s, now, SIMT, stages, servers, ctas, tiles, events, log)
        else:
            t = ctas[cta].tile
            at = _room_at(s, t, stages, rings, links, slots)
            if at < 0:
                ctas[cta].blocked = int(-at)
                ctas[cta].held = len(REASONS) + len(edges) + ctas[cta].blocked - 1
                continue
            if at > now:
                ctas[cta].held = ON_ROOM if ctas[cta].held < 0 else ctas[cta].held
                _add(events, at, DONE, cta, count)
                continue
            log.waits[s, ON_ROOM] += now - ctas[cta].worked
            log.busy[s] += ctas[cta].worked - ctas[cta].started
            if trace:
                row = stages[s].first_tile + t
                log.traced[row, 0], log.traced[row, 1], log.traced[row, 2] = cta, ctas[cta].reason, ctas[cta].held
                log.times[row, 0], log.times[row, 1] = ctas[cta].started, ctas[cta].worked
                log.traced[row, 3] = ctas[cta].late_limit
                log.times[row, 2], log.times[row, 3] = ctas[cta].waited, now - ctas[cta].worked
                log.times[row, 4] = ctas[cta].slow
            stored, _ = _move(servers, ctas[cta].sm, now, stages[s].store, tiles[stages[s].first_tile + t].weight)
            end = max(end, stored)
            log.end[s] = max(log.end[s], now)
            log.done[s] += 1
            ctas[cta].free_at = now
            ctas[cta].busy = 0
            _release(s, t, now, stages, rings, edges, links, ctas, slots, events)
            _hand_on(cta, t, now, stages, rings, edges, links, ctas, tiles, slots, events)
            if ctas[cta].loaded:
                ctas[cta].busy = 1
                _add(events, max(now, ctas[cta].start_at), TENSOR, cta, count)
            elif t + stages[s].ctas >= stages[s].tiles and waiting[s] < stages[s].ctas:
                heir = stages[s].first_cta + waiting[s]
                waiting[s] += 1
                ctas[heir].sm = ctas[cta].sm
                ctas[heir].free_at = now
                _add(events, now, ONCE, heir, count)
    return end
