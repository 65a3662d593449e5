"""Nodes that copy, deal out and gather streams: broadcast, fork, join. See ``sparse.spec.parallel``."""

from __future__ import annotations

from tilestream.sparse.engine.cells import ld, st
from tilestream.sparse.engine.jit import kernel
from tilestream.sparse.engine.kernels.levels import MISMATCH
from tilestream.sparse.engine.layout import (
    CLOCK,
    INTERVAL,
    LATENCY,
    NINS,
    NOUTS,
    PENDING,
    STATE,
    A,
    B,
    C,
    E,
    F,
    G,
    H,
)
from tilestream.sparse.engine.ports import (
    advance,
    emit,
    fail,
    finish,
    pop,
    put,
    ready,
    reserve,
    seen,
    tag_at,
    taken_value,
)
from tilestream.sparse.engine.stretches import broadcast_stretch
from tilestream.sparse.stream.tokens import DONE, EMPTY, S0

UNEVEN = 3


@kernel
def broadcast(node: int) -> None:
    """Every token to every output."""
    clock = ld(node, CLOCK)
    interval, latency, ways = ld(node, INTERVAL), ld(node, LATENCY), ld(node, NOUTS)
    while ld(node, PENDING) == 0:
        clock = broadcast_stretch(node, clock)
        if not ready(node, 0):
            break
        clock = seen(node, 0, clock)
        tag = tag_at(node, 0)
        pop(node, 0, clock)
        value = taken_value(node, 0) if tag >= 0 else 0
        clock = reserve(node, 0, ways, clock)
        for way in range(ways):
            emit(node, way, tag, value, latency, clock)
        if tag == DONE:
            finish(node, clock)
            return
        clock = advance(node, interval, clock)
    st(node, CLOCK, clock)


@kernel
def fork(node: int) -> None:
    """E: which output is next."""
    clock = ld(node, CLOCK)
    interval, latency, ways = ld(node, INTERVAL), ld(node, LATENCY), ld(node, NOUTS)
    while ld(node, PENDING) == 0:
        if not ready(node, 0):
            break
        clock = seen(node, 0, clock)
        tag = tag_at(node, 0)
        pop(node, 0, clock)
        if tag >= EMPTY:
            way = ld(node, E)
            clock = put(node, way, tag, taken_value(node, 0), latency, clock)
            st(node, E, way + 1 if way + 1 < ways else 0)
        else:
            clock = reserve(node, 0, ways, clock)
            for way in range(ways):
                emit(node, way, tag, 0, latency, clock)
            if tag == DONE:
                finish(node, clock)
                return
        clock = advance(node, interval, clock)
    st(node, CLOCK, clock)


_TAKE, _REST = 0, 1


@kernel
def join_unordered(node: int) -> None:
    """A: levels below what was dealt. E: the way in turn; F: how many ways' parent fibers have ended; C: flags, a way.

    State 1: a token B that every way has to have is taken from the others, H being the next of them.
    """
    clock = ld(node, CLOCK)
    interval, latency, ways = ld(node, INTERVAL), ld(node, LATENCY), ld(node, NINS)
    level, flags = ld(node, A), ld(node, C)
    state, way = ld(node, STATE), ld(node, E)
    while ld(node, PENDING) == 0:
        if state == _REST:
            port = ld(node, H)
            if port == way:
                port += 1
            if port < ways:
                if not ready(node, port):
                    break
                if level > 0:  # as the released code: a cycle for each way's done
                    clock = advance(node, interval, clock)
                clock = seen(node, port, clock)
                if tag_at(node, port) != ld(node, B):
                    fail(node, MISMATCH, ld(node, B), tag_at(node, port))
                    return
                pop(node, port, clock)
                st(node, H, port + 1)
                continue
            state = _TAKE
            clock = put(node, 0, ld(node, B), 0, latency, clock)
            if ld(node, B) == DONE:
                finish(node, clock)
                return
            clock = advance(node, interval, clock)
            continue
        if not ready(node, way):
            break
        clock = seen(node, way, clock)
        tag = tag_at(node, way)
        pop(node, way, clock)
        value = taken_value(node, way) if tag >= 0 else 0
        if tag == DONE or (level == 0 and tag < EMPTY):
            if ld(node, F) != 0:
                fail(node, UNEVEN, tag, tag)
                return
            st(node, B, tag)
            st(node, H, 0)
            state = _REST
            continue
        end = tag
        if level == 0:
            way = way + 1 if way + 1 < ways else 0
        elif tag <= S0 and S0 - tag >= level - 1:
            if S0 - tag >= level:
                st(flags, way, 1)
                st(node, F, ld(node, F) + 1)
                if ld(node, F) < ways:
                    end = S0 - (level - 1)
                else:
                    st(node, F, 0)
                    for i in range(ways):
                        st(flags, i, 0)
            way = way + 1 if way + 1 < ways else 0
            while ld(flags, way) != 0:
                way = way + 1 if way + 1 < ways else 0
        clock = put(node, 0, end, value, latency, clock)
        clock = advance(node, interval, clock)
    st(node, E, way)
    st(node, STATE, state)
    st(node, CLOCK, clock)


_FIRST, _UNIT, _NEXT, _CLOSE = 0, 1, 2, 3


@kernel
def join_ordered(node: int) -> None:
    """As above, by the stream that was dealt, the last input. F: units dealt in the parent fiber; G: stop to close."""
    clock = ld(node, CLOCK)
    interval, latency, ways = ld(node, INTERVAL), ld(node, LATENCY), ld(node, NINS) - 1
    level = ld(node, A)
    state, way, dealt = ld(node, STATE), ld(node, E), ld(node, F)
    while ld(node, PENDING) == 0:
        if state == _CLOSE:
            port = ld(node, H)
            end = S0 - (S0 - ld(node, G) + level) if ld(node, G) != DONE else DONE
            if port < ways:
                before = (way - 1 - port) % ways  # how long ago this way was in turn
                if end != DONE and level > 0 and before < min(dealt, ways):
                    st(node, H, port + 1)  # its last unit ended with this stop
                    continue
                if not ready(node, port):
                    break
                clock = seen(node, port, clock)
                if tag_at(node, port) != end:
                    fail(node, MISMATCH, ld(node, G), tag_at(node, port))
                    return
                pop(node, port, clock)
                st(node, H, port + 1)
                continue
            clock = put(node, 0, end, 0, latency, clock)
            if end == DONE:
                finish(node, clock)
                return
            clock = advance(node, interval, clock)
            state, dealt = _FIRST, 0
            continue
        port = way if state == _UNIT else ways
        if not ready(node, port):
            break
        clock = seen(node, port, clock)
        tag = tag_at(node, port)
        pop(node, port, clock)
        if state == _UNIT:
            if tag == DONE:
                fail(node, MISMATCH, tag, tag)
                return
            ends = level > 0 and tag <= S0 and S0 - tag >= level - 1
            if not ends:
                value = taken_value(node, port) if tag >= 0 else 0
                clock = put(node, 0, tag, value, latency, clock)
                clock = advance(node, interval, clock)
            if ends or level == 0:
                way = way + 1 if way + 1 < ways else 0
                dealt += 1
                state = _NEXT
        elif tag >= EMPTY:
            if state == _NEXT and level > 0:  # that the parent fiber goes on is only now known
                clock = put(node, 0, S0 - (level - 1), 0, latency, clock)
                clock = advance(node, interval, clock)
            state = _UNIT
        else:
            st(node, G, tag)
            st(node, H, 0)
            state = _CLOSE
    st(node, E, way)
    st(node, F, dealt)
    st(node, STATE, state)
    st(node, CLOCK, clock)
