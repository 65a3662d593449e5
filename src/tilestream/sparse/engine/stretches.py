"""Inner loops: many steps of a node at once, where nothing can get in their way.

A kernel calls one before each ordinary step. It does as many steps as there are tokens in a row and slots in a row for
what comes out, in channels without a bound, and stops before whatever is not plain (done, a mismatch, the end of a
fiber). Tokens, times and figures are those of ordinary steps; only loads and stores are saved.
"""

from __future__ import annotations

from tilestream.sparse.engine.cells import copy_cells, ld, st
from tilestream.sparse.engine.jit import kernel
from tilestream.sparse.engine.layout import (
    CONTROL,
    DATA,
    HEAD_SLOT,
    INS,
    INTERVAL,
    LATENCY,
    NOUTS,
    OUTS,
    READ,
    RESPONSE,
    ROOM_FOR,
    STORE,
    TAGS,
    TAIL_SLOT,
    TIMES,
    USED,
    VALUE_WORDS,
    VALUES,
    WIDTH,
    A,
    B,
    C,
    D,
    E,
)
from tilestream.sparse.engine.spans import (
    FEW,
    came,
    free_at,
    gave,
    had_no_room,
    head_of,
    moved,
    plain,
    room,
    tail_of,
    took,
    waiting,
    was_busy,
)
from tilestream.sparse.stream.tokens import DONE, EMPTY, S0


@kernel
def scan_stretch(node: int, position: int, end: int, clock: int) -> tuple[int, int]:
    """Elements of a fiber. Returns the position after them and the clock."""
    if not plain(node):
        return position, clock
    crd, ref = ld(ld(node, OUTS), 0), ld(ld(node, OUTS), 1)
    count = min(end - position, min(room(crd), room(ref)))
    if count < FEW:
        return position, clock
    interval, latency = ld(node, INTERVAL), ld(node, LATENCY)
    crd_tags, crd_times, ref_tags, ref_times = (
        tail_of(crd, TAGS),
        tail_of(crd, TIMES),
        tail_of(ref, TAGS),
        tail_of(ref, TIMES),
    )
    if ld(node, A) != 0:
        copy_cells(ld(node, C) + 8 * position, crd_tags, count)
    else:
        for i in range(count):
            st(crd_tags, i, position - (end - ld(node, D)) + i)
    ref_answers, crd_answers = ld(ref, RESPONSE), ld(crd, RESPONSE)
    begin = clock
    for i in range(count):
        clock = free_at(ref_answers, ref_times, i, free_at(crd_answers, crd_times, i, clock))
        st(ref_tags, i, position + i)
        st(crd_times, i, clock + latency)
        st(ref_times, i, clock + latency)
        clock += interval
    had_no_room(node, clock - begin - count * interval)
    gave(crd, count)
    gave(ref, count)
    was_busy(node, count)
    return position + count, clock


@kernel
def array_stretch(node: int, clock: int) -> int:
    """References to values. Returns the clock."""
    if not plain(node):
        return clock
    source, target = ld(ld(node, INS), 0), ld(ld(node, OUTS), 0)
    count, width = min(waiting(source), room(target)), ld(target, WIDTH)
    if count < FEW or width > 1:
        return clock
    tags, times = head_of(source, TAGS), head_of(source, TIMES)
    out_tags, out_times = tail_of(target, TAGS), tail_of(target, TIMES)
    out = tail_of(target, VALUES)
    values, size = ld(node, B), ld(node, D)
    interval, latency, control = ld(node, INTERVAL), ld(node, LATENCY), ld(node, CONTROL)
    reads, done = 0, count
    waited = 0
    source_answers, target_answers = ld(source, RESPONSE), ld(target, RESPONSE)
    for i in range(count):
        tag = ld(tags, i)
        if tag == DONE or tag >= size:
            done = i
            break
        clock = came(source_answers, times, i, clock)
        free = free_at(target_answers, out_times, i, clock)
        waited += free - clock
        clock = free
        st(out_tags, i, tag if tag <= S0 else 0)
        st(out_times, i, clock + (control if tag <= S0 else latency))
        if tag >= 0:
            reads += 1
            if width == 1:
                st(out, i, ld(values, tag))
        elif width == 1:
            st(out, i, 0)
        clock += interval
    st(node, READ, ld(node, READ) + reads * ld(node, VALUE_WORDS))
    moved(node, source, target, done, waited)
    return clock


@kernel
def repsig_stretch(node: int, clock: int) -> int:
    """Signals. Returns the clock."""
    if not plain(node):
        return clock
    source, target = ld(ld(node, INS), 0), ld(ld(node, OUTS), 0)
    count = min(waiting(source), room(target))
    if count < FEW:
        return clock
    tags, times = head_of(source, TAGS), head_of(source, TIMES)
    out_tags, out_times = tail_of(target, TAGS), tail_of(target, TIMES)
    interval, latency, control = ld(node, INTERVAL), ld(node, LATENCY), ld(node, CONTROL)
    done = count
    waited = 0
    source_answers, target_answers = ld(source, RESPONSE), ld(target, RESPONSE)
    for i in range(count):
        tag = ld(tags, i)
        if tag == DONE:
            done = i
            break
        clock = came(source_answers, times, i, clock)
        free = free_at(target_answers, out_times, i, clock)
        waited += free - clock
        clock = free
        st(out_tags, i, S0 if tag <= S0 else 0)
        st(out_times, i, clock + (control if tag <= S0 else latency))
        clock += interval
    moved(node, source, target, done, waited)
    return clock


@kernel
def repeat_stretch(node: int, tag: int, clock: int) -> int:
    """The element in hand, which was seen, once for each signal. Returns the clock."""
    if not plain(node) or tag < EMPTY:
        return clock
    element, signal, target = ld(ld(node, INS), 0), ld(ld(node, INS), 1), ld(ld(node, OUTS), 0)
    count = min(waiting(signal), room(target))
    if count < FEW:
        return clock
    tags, times = head_of(signal, TAGS), head_of(signal, TIMES)
    out_tags, out_times, width = tail_of(target, TAGS), tail_of(target, TIMES), ld(target, WIDTH)
    interval = ld(node, INTERVAL)
    latency = ld(node, LATENCY) if tag >= 0 else ld(node, CONTROL)
    done = count
    waited = 0
    signal_answers, target_answers = ld(signal, RESPONSE), ld(target, RESPONSE)
    for i in range(count):
        if ld(tags, i) < 0:
            done = i
            break
        clock = came(signal_answers, times, i, clock)
        free = free_at(target_answers, out_times, i, clock)
        waited += free - clock
        clock = free
        st(out_tags, i, tag)
        st(out_times, i, clock + latency)
        clock += interval
    if width > 0:
        value = ld(element, VALUES) + 8 * width * ld(element, HEAD_SLOT)
        out = ld(target, VALUES) + 8 * width * ld(target, TAIL_SLOT)
        for i in range(done):
            copy_cells(value, out + 8 * width * i, width)
    moved(node, signal, target, done, waited)
    return clock


@kernel
def broadcast_stretch(node: int, clock: int) -> int:
    """The same to every reader. Returns the clock."""
    if not plain(node):
        return clock
    source, outs, ways = ld(ld(node, INS), 0), ld(node, OUTS), ld(node, NOUTS)
    count = waiting(source)
    for way in range(ways):
        count = min(count, room(ld(outs, way)))
    if count < FEW:
        return clock
    tags, times = head_of(source, TAGS), head_of(source, TIMES)
    first = ld(outs, 0)
    out_tags, out_times, width = tail_of(first, TAGS), tail_of(first, TIMES), ld(first, WIDTH)
    interval, latency, control = ld(node, INTERVAL), ld(node, LATENCY), ld(node, CONTROL)
    done = count
    response, bound, waited = ld(source, RESPONSE), False, 0
    for way in range(ways):
        bound = bound or ld(ld(outs, way), RESPONSE) >= 0
    for i in range(count):
        tag = ld(tags, i)
        if tag == DONE:
            done = i
            break
        clock = came(response, times, i, clock)
        free = clock
        if bound:
            for way in range(ways):
                free = free_at(ld(ld(outs, way), RESPONSE), tail_of(ld(outs, way), TIMES), i, free)
        waited += free - clock
        clock = free
        st(out_tags, i, tag)
        st(out_times, i, clock + (latency if tag >= 0 else control))
        clock += interval
    values = ld(source, VALUES) + 8 * width * ld(source, HEAD_SLOT)
    for way in range(ways):
        target = ld(outs, way)
        if way > 0:
            copy_cells(out_tags, tail_of(target, TAGS), done)
            copy_cells(out_times, tail_of(target, TIMES), done)
        if width > 0:
            copy_cells(values, ld(target, VALUES) + 8 * width * ld(target, TAIL_SLOT), width * done)
    for way in range(ways):
        gave(ld(outs, way), done)
    took(source, done)
    had_no_room(node, waited)
    was_busy(node, done)
    return clock


@kernel
def write_stretch(node: int, is_value: bool, clock: int) -> int:
    """Elements to a store. Returns the clock."""
    if not plain(node):
        return clock
    source, store = ld(ld(node, INS), 0), ld(node, STORE)
    used = ld(store, USED)
    count = min(waiting(source), ld(store, ROOM_FOR) - used)
    if count < FEW:
        return clock
    tags, times, width = head_of(source, TAGS), head_of(source, TIMES), ld(source, WIDTH)
    interval = ld(node, INTERVAL)
    done = count
    source_answers = ld(source, RESPONSE)
    for i in range(count):
        if ld(tags, i) < 0:
            done = i
            break
        clock = came(source_answers, times, i, clock)
        clock += interval
    if not is_value:
        copy_cells(tags, ld(store, DATA) + 8 * used, done)
        if done > 0:
            st(node, E, 0)
    elif width > 0:
        values = ld(source, VALUES) + 8 * width * ld(source, HEAD_SLOT)
        copy_cells(values, ld(store, DATA) + 8 * width * used, width * done)
    st(store, USED, used + done)
    took(source, done)
    was_busy(node, done)
    return clock
