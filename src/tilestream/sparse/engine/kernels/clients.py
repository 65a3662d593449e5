"""The nodes that read and write tensors, where memory costs something: scan, array, write_crd, write_val.

In the simple model a client waits for each batch that it asks for, and what came leaves together. With bursts it asks
for a line when it leaves the one that it has, and its elements arrive with their data, several lines being in flight.
"""

from __future__ import annotations

from tilestream.sparse.engine.cells import copy_cells, ld, st
from tilestream.sparse.engine.hbm import ask, flies, may_fly, wait_for
from tilestream.sparse.engine.jit import kernel
from tilestream.sparse.engine.kernels.levels import MISMATCH, OUTSIDE, end_fiber, put_read
from tilestream.sparse.engine.layout import (
    CLOCK,
    DATA,
    FIRST_WORD,
    INTERVAL,
    LATENCY,
    LINE_WORDS,
    MEM,
    MODE,
    NODE_WIDTH,
    NOT_BEFORE,
    PENDING,
    READ,
    REPLY,
    SECOND_WORD,
    SIMPLE,
    STATE,
    STORE,
    USED,
    VALUE_WORDS,
    WRITTEN,
    A,
    B,
    C,
    D,
    E,
    F,
    G,
    H,
    P,
    Q,
    R,
    S,
    T,
)
from tilestream.sparse.engine.ports import (
    advance,
    fail,
    finish,
    may_write,
    pop,
    put_both,
    ready,
    seen,
    tag_at,
    value_at,
)
from tilestream.sparse.stream.tokens import DONE, EMPTY, S0

_BATCH = 8
_IDLE, _BOUNDS, _FIBER, _COORDINATES, _CLOSE = 0, 1, 2, 3, 4


@kernel
def scan_from_memory(node: int) -> None:
    """As ``scan`` of a compressed level. P, Q: lines of seg and crd that it has; R: end of the coordinates it has."""
    clock = ld(node, CLOCK)
    interval, latency = ld(node, INTERVAL), ld(node, LATENCY)
    seg, crds = ld(node, B), ld(node, C)
    simple, words = ld(ld(node, MEM), MODE) == SIMPLE, ld(ld(node, MEM), LINE_WORDS)
    state = ld(node, STATE)
    while ld(node, PENDING) == 0:
        if state == _BOUNDS:
            clock = wait_for(node, ld(node, REPLY), clock)
            state = _FIBER
        elif state == _COORDINATES:
            if simple:
                clock = wait_for(node, ld(node, REPLY), clock)
            else:
                flies(node)
                st(node, NOT_BEFORE, ld(node, REPLY))
            state = _FIBER
        elif state == _FIBER:
            position, end, have = ld(node, E), ld(node, F), ld(node, R)
            if position == end:
                state = _CLOSE
                continue
            if position >= have:
                have = min(end, position + _BATCH)
                if not simple:
                    line = (ld(node, SECOND_WORD) + position) // words
                    have = min(end, (line + 1) * words - ld(node, SECOND_WORD))
                    if line == ld(node, Q):
                        st(node, R, have)
                        continue
                    st(node, Q, line)
                    clock = may_fly(node, clock)
                st(node, R, have)
                st(node, STATE, _COORDINATES)
                ask(node, ld(node, SECOND_WORD) + position, have - position, 0, clock)
                return
            clock = put_both(node, ld(crds, position), position, latency, clock)
            clock = advance(node, 0 if simple else interval, clock)
            st(node, E, position + 1)
        else:
            if not ready(node, 0):
                break
            clock = seen(node, 0, clock)
            tag = tag_at(node, 0)
            if state == _IDLE and tag >= EMPTY:
                pop(node, 0, clock)
                state = _CLOSE
                if tag >= ld(node, G):
                    fail(node, OUTSIDE, tag, ld(node, G))
                    return
                if tag >= 0:
                    begin, end = ld(seg, tag), ld(seg, tag + 1)
                    st(node, E, begin)
                    st(node, F, end)
                    st(node, R, begin)
                    st(node, READ, ld(node, READ) + 2 + end - begin)
                    state = _FIBER
                    bounds = ld(node, FIRST_WORD) + tag
                    if simple or bounds // words != ld(node, P) or (bounds + 1) // words != ld(node, P):
                        st(node, P, (bounds + 1) // words)
                        st(node, STATE, _BOUNDS)
                        ask(node, bounds, 2, 0, clock)
                        return
                continue
            clock, done = end_fiber(node, tag, state == _IDLE, clock)
            if done:
                return
            state = _IDLE
    st(node, STATE, state)
    st(node, CLOCK, clock)


_TAKE, _CAME = 0, 1


@kernel
def array_in_batches(node: int) -> None:
    """``array`` of the simple model. P: address of the references in hand, R: how many, E: how many have left."""
    clock = ld(node, CLOCK)
    interval, size, held = ld(node, INTERVAL), ld(node, D), ld(node, P)
    state = ld(node, STATE)
    if state == _CAME and ld(node, E) == 0:
        clock = wait_for(node, ld(node, REPLY), clock)
    while ld(node, PENDING) == 0:
        count = ld(node, R)
        if state == _CAME:
            index = ld(node, E)
            if index == count:
                st(node, R, 0)
                st(node, E, 0)
                state = _TAKE
                continue
            clock = put_read(node, ld(held, index), clock)
            st(node, E, index + 1)
            continue
        if count < _BATCH:
            if not ready(node, 0):
                break
            clock = seen(node, 0, clock)
            tag = tag_at(node, 0)
            if tag >= size:
                fail(node, OUTSIDE, tag, size)
                return
            if tag >= 0:
                pop(node, 0, clock)
                st(held, count, tag)
                st(node, R, count + 1)
                st(node, READ, ld(node, READ) + ld(node, VALUE_WORDS))
                clock = advance(node, interval, clock)
                continue
            if count == 0:
                pop(node, 0, clock)
                clock = put_read(node, tag, clock)
                if tag == DONE:
                    finish(node, clock)
                    return
                clock = advance(node, interval, clock)
                continue
        st(node, STATE, _CAME)
        ask(node, 0, count * ld(node, VALUE_WORDS), 0, clock)
        return
    st(node, STATE, state)
    st(node, CLOCK, clock)


@kernel
def array_by_lines(node: int) -> None:
    """``array`` with bursts. P: the line that it has, -1 at first. State 1: the lines of the next token have come."""
    clock = ld(node, CLOCK)
    interval, size, words = ld(node, INTERVAL), ld(node, D), ld(ld(node, MEM), LINE_WORDS)
    came = ld(node, STATE) != 0
    if came:
        flies(node)
        st(node, NOT_BEFORE, ld(node, REPLY))
    while ld(node, PENDING) == 0:
        if not ready(node, 0):
            break
        clock = seen(node, 0, clock)
        tag = tag_at(node, 0)
        if tag >= size:
            fail(node, OUTSIDE, tag, size)
            return
        if tag >= 0:
            size_words = ld(node, VALUE_WORDS)
            address = ld(node, FIRST_WORD) + tag * size_words
            last = (address + size_words - 1) // words
            if not came and (address // words != ld(node, P) or last != ld(node, P)):
                clock = may_fly(node, clock)
                st(node, P, last)
                st(node, STATE, 1)
                ask(node, address, size_words, 0, clock)
                return
            st(node, READ, ld(node, READ) + ld(node, VALUE_WORDS))
        came = False
        pop(node, 0, clock)
        clock = put_read(node, tag, clock)
        if tag == DONE:
            finish(node, clock)
            return
        clock = advance(node, interval, clock)
    st(node, STATE, 0)
    st(node, CLOCK, clock)


_OPEN, _WROTE, _ENDING = 0, 1, 2


@kernel
def _flush(node: int, which: int, least: int, clock: int) -> bool:
    """Ask for the words of an array that wait, if there are as many; G and H: how many, S and T: how many went."""
    waiting, done = (G, S) if which == 0 else (H, T)
    count = ld(node, waiting)
    if count == 0 or count < least:
        return False
    first = ld(node, FIRST_WORD) if which == 0 else ld(node, SECOND_WORD)
    address = first + ld(node, done)
    st(node, waiting, 0)
    st(node, done, ld(node, done) + count)
    ask(node, address, count, 1, clock)
    return True


@kernel
def _written(node: int, clock: int) -> int:
    """What was asked for was served: wait for it, or let it fly. Returns the clock."""
    if ld(ld(node, MEM), MODE) == SIMPLE:
        return wait_for(node, ld(node, REPLY), clock)
    flies(node)
    st(node, Q, max(ld(node, Q), ld(node, REPLY)))
    return clock


@kernel
def write_to_memory(node: int) -> None:
    """``write_crd`` (A is 0) and ``write_val`` (A is 1). P: words that make a request. E: the last was a stop.

    Q: when the last of what was written has arrived.
    """
    clock = ld(node, CLOCK)
    interval, store, width = ld(node, INTERVAL), ld(node, STORE), ld(node, NODE_WIDTH)
    batch, is_value = ld(node, P), ld(node, A) != 0
    simple = ld(ld(node, MEM), MODE) == SIMPLE
    state = ld(node, STATE)
    if state != _OPEN and ld(node, R) != 0:
        st(node, R, 0)
        clock = _written(node, clock)
    while True:
        if state == _ENDING:
            if not simple and (ld(node, G) > 0 or ld(node, H) > 0):
                clock = may_fly(node, clock)
            if _flush(node, 0, 1, clock) or _flush(node, 1, 1, clock):
                st(node, STATE, _ENDING)
                st(node, R, 1)
                return
            clock = wait_for(node, ld(node, Q), clock)
            if is_value:
                clock = advance(node, interval, clock)
            finish(node, clock)
            return
        if ld(node, G) >= batch or ld(node, H) >= batch:
            if not simple:
                clock = may_fly(node, clock)
            if _flush(node, 0, batch, clock) or _flush(node, 1, batch, clock):
                st(node, STATE, _WROTE)
                st(node, R, 1)
                return
        state = _OPEN
        if not may_write(node, store):
            break
        used = ld(store, USED)
        clock = seen(node, 0, clock)
        tag = tag_at(node, 0)
        if tag == EMPTY and not is_value:
            fail(node, MISMATCH, tag, tag)
            return
        value = value_at(node, 0)
        if is_value and tag >= EMPTY:
            copy_cells(value, ld(store, DATA) + 8 * width * used, width)
            st(store, USED, used + 1)
            st(node, G, ld(node, G) + ld(node, VALUE_WORDS))
            st(node, WRITTEN, ld(node, WRITTEN) + ld(node, VALUE_WORDS))
        elif not is_value and tag != DONE:
            st(ld(store, DATA), used, tag)
            st(store, USED, used + 1)
            st(node, WRITTEN, ld(node, WRITTEN) + 1)
            which = G if tag > S0 else H
            st(node, which, ld(node, which) + 1)
        pop(node, 0, clock)
        if tag == DONE:
            state = _ENDING
            continue
        stopped = tag <= S0
        if not stopped or (not is_value and ld(node, E) == 0):
            clock = advance(node, interval, clock)
        st(node, E, 1 if stopped else 0)
    st(node, STATE, state)
    st(node, CLOCK, clock)
