"""Inner loops: many steps of a node at once, where nothing can get in their way.

A kernel calls one before each ordinary step. It does as many steps as there are tokens in a row and slots in a row for
what comes out, in channels without a bound, and stops before whatever is not plain (done, a mismatch, the end of a
fiber). Tokens, times and figures are those of ordinary steps; only loads and stores are saved.
"""

from __future__ import annotations

from tilestream.sparse.engine.cells import copy_cells, ld, ldf, st, stf
from tilestream.sparse.engine.jit import kernel
from tilestream.sparse.engine.kernels.arithmetic import scalar_binary
from tilestream.sparse.engine.layout import (
    BUSY,
    CAPACITY,
    CONTROL,
    DATA,
    FLOPS,
    HEAD,
    HEAD_SLOT,
    INS,
    INTERVAL,
    LATENCY,
    NODE_WIDTH,
    NOUTS,
    OUTS,
    PLAIN,
    READ,
    ROOM_FOR,
    START,
    STORE,
    TAGS,
    TAIL,
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
from tilestream.sparse.tokens import DONE, EMPTY

_S0 = -3
_LAST = 1 << 62
_FEW = 4
"""Tokens below which a loop of their own does not pay."""


@kernel
def _waiting(channel: int) -> int:
    """Unread tokens in a row."""
    return min(ld(channel, TAIL) - ld(channel, HEAD), ld(channel, CAPACITY) - ld(channel, HEAD_SLOT))


@kernel
def _room(channel: int) -> int:
    """Free slots in a row."""
    free = ld(channel, CAPACITY) - (ld(channel, TAIL) - ld(channel, HEAD))
    return min(free, ld(channel, CAPACITY) - ld(channel, TAIL_SLOT))


@kernel
def _head(channel: int, cell: int) -> int:
    """Address of the next token's tag or time."""
    return ld(channel, cell) + 8 * ld(channel, HEAD_SLOT)


@kernel
def _tail(channel: int, cell: int) -> int:
    return ld(channel, cell) + 8 * ld(channel, TAIL_SLOT)


@kernel
def _took(channel: int, count: int) -> None:
    st(channel, HEAD, ld(channel, HEAD) + count)
    slot = ld(channel, HEAD_SLOT) + count
    st(channel, HEAD_SLOT, 0 if slot == ld(channel, CAPACITY) else slot)


@kernel
def _gave(channel: int, count: int) -> None:
    st(channel, TAIL, ld(channel, TAIL) + count)
    slot = ld(channel, TAIL_SLOT) + count
    st(channel, TAIL_SLOT, 0 if slot == ld(channel, CAPACITY) else slot)


@kernel
def _busy(node: int, steps: int) -> None:
    st(node, BUSY, ld(node, BUSY) + steps * ld(node, INTERVAL))


@kernel
def _plain(node: int) -> bool:
    return ld(node, PLAIN) != 0 and ld(node, START) >= 0


@kernel
def scan_stretch(node: int, position: int, end: int, clock: int) -> int:
    """Elements of a fiber. Returns how many; each takes one interval."""
    if not _plain(node):
        return 0
    crd, ref = ld(ld(node, OUTS), 0), ld(ld(node, OUTS), 1)
    count = min(end - position, min(_room(crd), _room(ref)))
    if count < _FEW:
        return 0
    interval, latency = ld(node, INTERVAL), ld(node, LATENCY)
    crd_tags, crd_times, ref_tags, ref_times = _tail(crd, TAGS), _tail(crd, TIMES), _tail(ref, TAGS), _tail(ref, TIMES)
    if ld(node, A) != 0:
        copy_cells(ld(node, C) + 8 * position, crd_tags, count)
    else:
        for i in range(count):
            st(crd_tags, i, position - (end - ld(node, D)) + i)
    for i in range(count):
        st(ref_tags, i, position + i)
        st(crd_times, i, clock + latency + i * interval)
        st(ref_times, i, clock + latency + i * interval)
    _gave(crd, count)
    _gave(ref, count)
    _busy(node, count)
    return count


@kernel
def array_stretch(node: int, clock: int) -> int:
    """References to values. Returns the clock."""
    if not _plain(node):
        return clock
    source, target = ld(ld(node, INS), 0), ld(ld(node, OUTS), 0)
    count, width = min(_waiting(source), _room(target)), ld(target, WIDTH)
    if count < _FEW or width > 1:
        return clock
    tags, times = _head(source, TAGS), _head(source, TIMES)
    out_tags, out_times = _tail(target, TAGS), _tail(target, TIMES)
    out = ld(target, VALUES) + 8 * width * ld(target, TAIL_SLOT)
    values, size = ld(node, B), ld(node, D)
    interval, latency, control = ld(node, INTERVAL), ld(node, LATENCY), ld(node, CONTROL)
    reads, done = 0, count
    for i in range(count):
        tag = ld(tags, i)
        if tag == DONE or tag >= size:
            done = i
            break
        clock = max(clock, ld(times, i))
        st(out_tags, i, tag if tag <= _S0 else 0)
        st(out_times, i, clock + (control if tag <= _S0 else latency))
        if tag >= 0:
            reads += 1
            if width == 1:
                st(out, i, ld(values, tag))
        elif width == 1:
            st(out, i, 0)
        clock += interval
    st(node, READ, ld(node, READ) + reads * ld(node, VALUE_WORDS))
    _took(source, done)
    _gave(target, done)
    _busy(node, done)
    return clock


@kernel
def repsig_stretch(node: int, clock: int) -> int:
    """Signals. Returns the clock."""
    if not _plain(node):
        return clock
    source, target = ld(ld(node, INS), 0), ld(ld(node, OUTS), 0)
    count = min(_waiting(source), _room(target))
    if count < _FEW:
        return clock
    tags, times = _head(source, TAGS), _head(source, TIMES)
    out_tags, out_times = _tail(target, TAGS), _tail(target, TIMES)
    interval, latency, control = ld(node, INTERVAL), ld(node, LATENCY), ld(node, CONTROL)
    done = count
    for i in range(count):
        tag = ld(tags, i)
        if tag == DONE:
            done = i
            break
        clock = max(clock, ld(times, i))
        st(out_tags, i, _S0 if tag <= _S0 else 0)
        st(out_times, i, clock + (control if tag <= _S0 else latency))
        clock += interval
    _took(source, done)
    _gave(target, done)
    _busy(node, done)
    return clock


@kernel
def repeat_stretch(node: int, tag: int, clock: int) -> int:
    """The element in hand, which was seen, once for each signal. Returns the clock."""
    if not _plain(node) or tag < EMPTY:
        return clock
    element, signal, target = ld(ld(node, INS), 0), ld(ld(node, INS), 1), ld(ld(node, OUTS), 0)
    count = min(_waiting(signal), _room(target))
    if count < _FEW:
        return clock
    tags, times = _head(signal, TAGS), _head(signal, TIMES)
    out_tags, out_times, width = _tail(target, TAGS), _tail(target, TIMES), ld(target, WIDTH)
    interval = ld(node, INTERVAL)
    latency = ld(node, LATENCY) if tag >= 0 else ld(node, CONTROL)
    done = count
    for i in range(count):
        if ld(tags, i) < 0:
            done = i
            break
        clock = max(clock, ld(times, i))
        st(out_tags, i, tag)
        st(out_times, i, clock + latency)
        clock += interval
    if width > 0:
        value = ld(element, VALUES) + 8 * width * ld(element, HEAD_SLOT)
        out = ld(target, VALUES) + 8 * width * ld(target, TAIL_SLOT)
        for i in range(done):
            copy_cells(value, out + 8 * width * i, width)
    _took(signal, done)
    _gave(target, done)
    _busy(node, done)
    return clock


@kernel
def broadcast_stretch(node: int, clock: int) -> int:
    """The same to every reader. Returns the clock."""
    if not _plain(node):
        return clock
    source, outs, ways = ld(ld(node, INS), 0), ld(node, OUTS), ld(node, NOUTS)
    count = _waiting(source)
    for way in range(ways):
        count = min(count, _room(ld(outs, way)))
    if count < _FEW:
        return clock
    tags, times = _head(source, TAGS), _head(source, TIMES)
    first = ld(outs, 0)
    out_tags, out_times, width = _tail(first, TAGS), _tail(first, TIMES), ld(first, WIDTH)
    interval, latency, control = ld(node, INTERVAL), ld(node, LATENCY), ld(node, CONTROL)
    done = count
    for i in range(count):
        tag = ld(tags, i)
        if tag == DONE:
            done = i
            break
        clock = max(clock, ld(times, i))
        st(out_tags, i, tag)
        st(out_times, i, clock + (latency if tag >= 0 else control))
        clock += interval
    values = ld(source, VALUES) + 8 * width * ld(source, HEAD_SLOT)
    for way in range(ways):
        target = ld(outs, way)
        if way > 0:
            copy_cells(out_tags, _tail(target, TAGS), done)
            copy_cells(out_times, _tail(target, TIMES), done)
        if width > 0:
            copy_cells(values, ld(target, VALUES) + 8 * width * ld(target, TAIL_SLOT), width * done)
    for way in range(ways):
        _gave(ld(outs, way), done)
    _took(source, done)
    _busy(node, done)
    return clock


@kernel
def binary_stretch(node: int, clock: int) -> int:
    """An operation on two streams of scalars. Returns the clock."""
    if not _plain(node) or ld(node, NODE_WIDTH) > 1:
        return clock
    left, right, target = ld(ld(node, INS), 0), ld(ld(node, INS), 1), ld(ld(node, OUTS), 0)
    count = min(min(_waiting(left), _waiting(right)), _room(target))
    if count < _FEW:
        return clock
    left_tags, left_times, left_values = _head(left, TAGS), _head(left, TIMES), _head(left, VALUES)
    right_tags, right_times, right_values = _head(right, TAGS), _head(right, TIMES), _head(right, VALUES)
    out_tags, out_times, out = _tail(target, TAGS), _tail(target, TIMES), _tail(target, VALUES)
    interval, latency, control = ld(node, INTERVAL), ld(node, LATENCY), ld(node, CONTROL)
    op, scalars = ld(node, A), ld(node, NODE_WIDTH) == 1
    steps, done = 0, count
    for i in range(count):
        a, b = ld(left_tags, i), ld(right_tags, i)
        element = a >= EMPTY and b >= EMPTY
        if a == DONE or (not element and a != b):
            done = i
            break
        clock = max(clock, max(ld(left_times, i), ld(right_times, i)))
        st(out_tags, i, 0 if element else a)
        st(out_times, i, clock + (latency if element else control))
        if element:
            steps += 1
            if scalars:
                stf(out, i, scalar_binary(op, ldf(left_values, i), ldf(right_values, i)))
        elif scalars:
            st(out, i, 0)
        clock += interval
    st(node, FLOPS, ld(node, FLOPS) + steps * ld(node, D))
    _took(left, done)
    _took(right, done)
    _gave(target, done)
    _busy(node, done)
    return clock


@kernel
def skip_stretch(node: int, clock: int) -> int:
    """Coordinates of one of two intersected operands that the other does not have. Returns the clock."""
    if not _plain(node):
        return clock
    ins = ld(node, INS)
    left, right, left_in, right_in = ld(ins, 0), ld(ins, 1), ld(ins, 2), ld(ins, 3)
    lefts, rights = min(_waiting(left), _waiting(left_in)), min(_waiting(right), _waiting(right_in))
    if lefts < 1 or rights < 1:
        return clock
    left_tags, left_times = _head(left, TAGS), _head(left, TIMES)
    right_tags, right_times = _head(right, TAGS), _head(right, TIMES)
    left_in_tags, left_in_times = _head(left_in, TAGS), _head(left_in, TIMES)
    right_in_tags, right_in_times = _head(right_in, TAGS), _head(right_in, TIMES)
    interval = ld(node, INTERVAL)
    i, j = 0, 0
    while i < lefts and j < rights:
        a, b = ld(left_tags, i), ld(right_tags, j)
        p, q = ld(left_in_tags, i), ld(right_in_tags, j)
        if a == b or max(a, b) < 0 or min(a, b) == DONE or min(a, b) == EMPTY:
            break
        if (p != a if a < 0 else p < EMPTY) or (q != b if b < 0 else q < EMPTY):
            break
        clock = max(clock, max(ld(left_times, i), ld(right_times, j)))
        clock = max(clock, max(ld(left_in_times, i), ld(right_in_times, j))) + interval
        # A stop comes after every coordinate. Which side goes is hard to predict: no branch on it.
        goes = 1 if (a if a >= 0 else _LAST) < (b if b >= 0 else _LAST) else 0
        i += goes
        j += 1 - goes
    _took(left, i)
    _took(left_in, i)
    _took(right, j)
    _took(right_in, j)
    _busy(node, i + j)
    return clock


@kernel
def write_stretch(node: int, is_value: bool, clock: int) -> int:
    """Elements to a store. Returns the clock."""
    if not _plain(node):
        return clock
    source, store = ld(ld(node, INS), 0), ld(node, STORE)
    used = ld(store, USED)
    count = min(_waiting(source), ld(store, ROOM_FOR) - used)
    if count < _FEW:
        return clock
    tags, times, width = _head(source, TAGS), _head(source, TIMES), ld(source, WIDTH)
    interval = ld(node, INTERVAL)
    done = count
    for i in range(count):
        if ld(tags, i) < 0:
            done = i
            break
        clock = max(clock, ld(times, i)) + interval
    if not is_value:
        copy_cells(tags, ld(store, DATA) + 8 * used, done)
        if done > 0:
            st(node, E, 0)
    elif width > 0:
        values = ld(source, VALUES) + 8 * width * ld(source, HEAD_SLOT)
        copy_cells(values, ld(store, DATA) + 8 * width * used, width * done)
    st(store, USED, used + done)
    _took(source, done)
    _busy(node, done)
    return clock
