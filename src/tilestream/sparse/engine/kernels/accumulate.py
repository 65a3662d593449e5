"""The sparse accumulator, of any order from 1. ``sparse.spec.compute`` says what it means.

Inputs: values, then crd0 .. crdn; outputs: values, then crd0 .. crd(n-1). Its cells hold: A: operation; D: order n;
B: bits a coordinate; C: cycles of the end of a fiber above the innermost one; P: addresses of the table's keys, Q: of
its values, R: its size - 1, S: keys in it, T and U: lists of them; V: the packed coordinates above each depth. State:
E: depth, F: stop in hand, G: depth at which a bare stop was met, H: next token of it to take, or next key to put out,
W: sorted keys.
"""

from __future__ import annotations

from tilestream.sparse.engine.cells import ld, st
from tilestream.sparse.engine.jit import kernel
from tilestream.sparse.engine.kernels.levels import MISMATCH, OUTSIDE
from tilestream.sparse.engine.kernels.values import accumulate
from tilestream.sparse.engine.layout import (
    CLOCK,
    INTERVAL,
    LATENCY,
    NODE_WIDTH,
    ON_STORE,
    PENDING,
    STATE,
    WAITING,
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
    U,
    V,
    W,
)
from tilestream.sparse.engine.ports import advance, emit, fail, finish, pop, ready, reserve, seen, tag_at, value_at
from tilestream.sparse.engine.stretches_compute import gather_stretch
from tilestream.sparse.engine.table import FREE, find, sort
from tilestream.sparse.stream.tokens import DONE, EMPTY, S0

_OUTER, _GATHER, _BARE, _LEAVE, _AFTER, _EMIT, _ENDS = 0, 1, 2, 3, 4, 5, 6


@kernel
def spacc(node: int) -> None:
    """One small step at a time: which one is in the state."""
    while ld(node, PENDING) == 0:
        state = ld(node, STATE)
        if state == _GATHER:
            moved = _gather(node)
        elif state == _EMIT:
            moved = _emit(node)
        elif state == _OUTER:
            moved = _outer(node)
        elif state == _LEAVE:
            moved = _leave(node)
        elif state == _AFTER:
            moved = _after(node)
        elif state == _BARE:
            moved = _bare(node)
        else:
            moved = _ends(node)
        if not moved:
            return


@kernel
def _outer(node: int) -> bool:
    """Look at the reduced level: an element has fibers below, a stop puts the sums out, done ends."""
    order = ld(node, D)
    if not ready(node, order + 1):
        return False
    st(node, CLOCK, seen(node, order + 1, ld(node, CLOCK)))
    tag = tag_at(node, order + 1)
    if tag >= 0:
        st(node, E, order - 1)
        st(node, STATE, _GATHER)
    elif tag <= S0:
        _meet_bare(node, order, tag)
    elif tag == DONE:
        st(node, H, 0)
        st(node, STATE, _ENDS)
    else:
        fail(node, MISMATCH, tag, tag)
        return False
    return True


@kernel
def _meet_bare(node: int, depth: int, tag: int) -> None:
    """A stop at ``depth`` in place of an element: every stream below has one too."""
    st(node, G, depth)
    st(node, F, tag)
    st(node, H, depth)
    st(node, STATE, _BARE)


@kernel
def _gather(node: int) -> bool:
    """Go through a fiber: at depth 0 its values, else down into each of its elements."""
    depth = ld(node, E)
    clock = ld(node, CLOCK)
    if depth > 0:
        if not ready(node, depth + 1):
            return False
        st(node, CLOCK, seen(node, depth + 1, clock))
        tag = tag_at(node, depth + 1)
        bits = ld(node, B)
        if tag >= 0:
            if tag >> bits != 0:
                fail(node, OUTSIDE, tag, 1 << bits)
                return False
            paths = ld(node, V)
            st(paths, depth, ld(paths, depth + 1) | (tag << (bits * depth)))
            st(node, E, depth - 1)
        elif tag <= S0:
            _meet_bare(node, depth, tag)
        else:
            fail(node, MISMATCH, tag, tag)
            return False
        return True
    order, interval, width = ld(node, D), ld(node, INTERVAL), ld(node, NODE_WIDTH)
    path, bits = ld(ld(node, V), 1), ld(node, B)
    keys, mask, count = ld(node, P), ld(node, R), ld(node, S)
    while True:
        st(node, S, count)
        clock = gather_stretch(node, path, clock)
        count = ld(node, S)
        if not (ready(node, 1) and ready(node, 0)):
            break
        if count * 2 > mask:
            st(node, WAITING, ON_STORE)
            break
        clock = seen(node, 0, seen(node, 1, clock))
        tag, value = tag_at(node, 1), tag_at(node, 0)
        if tag >= 0 and value >= EMPTY:
            if tag >> bits != 0:
                fail(node, OUTSIDE, tag, 1 << bits)
                break
            slot = find(keys, mask, path | tag, order > 1)
            fresh = ld(keys, slot) == FREE
            if fresh:
                st(keys, slot, path | tag)
                st(ld(node, T), count, path | tag)
                count += 1
            accumulate(node, value_at(node, 0), ld(node, Q) + 8 * width * slot, fresh)
        elif tag != value or tag > S0:
            fail(node, MISMATCH, tag, value)
            break
        pop(node, 1, clock)
        pop(node, 0, clock)
        clock = advance(node, interval, clock)
        if tag <= S0:
            st(node, F, tag)
            st(node, E, 1)
            st(node, STATE, _LEAVE)
            st(node, CLOCK, clock)
            st(node, S, count)
            return True
    st(node, CLOCK, clock)
    st(node, S, count)
    return False


@kernel
def _bare(node: int) -> bool:
    """Take the stops of an empty fiber, from the outer levels to the values; then the one that was met."""
    met = ld(node, G)
    port = ld(node, H)  # the depth to take is port - 1; port 0 is the values
    clock = ld(node, CLOCK)
    if not ready(node, port):
        return False
    clock = seen(node, port, clock)
    below = met - port + 1 if port > 0 else met  # levels below the one at which the stop was met
    if tag_at(node, port) != ld(node, F) - below:
        fail(node, MISMATCH, ld(node, F) - below, tag_at(node, port))
        return False
    pop(node, port, clock)
    st(node, H, port - 1)
    if port == 0:
        pop(node, met + 1, clock)
        if met == ld(node, D):
            _start_emitting(node)
        else:
            clock = advance(node, ld(node, INTERVAL), clock)
            st(node, E, met + 1)
            st(node, STATE, _LEAVE)
    st(node, CLOCK, clock)
    return True


@kernel
def _leave(node: int) -> bool:
    """A fiber has ended: take the element above it, and go on there or end too."""
    depth = ld(node, E)
    if not ready(node, depth + 1):
        return False
    clock = seen(node, depth + 1, ld(node, CLOCK))
    pop(node, depth + 1, clock)
    st(node, CLOCK, clock)
    if ld(node, F) != S0:
        st(node, STATE, _AFTER)
    else:
        st(node, STATE, _OUTER if depth == ld(node, D) else _GATHER)
    return True


@kernel
def _after(node: int) -> bool:
    """The stop that goes with a higher one below."""
    depth = ld(node, E)
    if not ready(node, depth + 1):
        return False
    clock = seen(node, depth + 1, ld(node, CLOCK))
    tag = tag_at(node, depth + 1)
    if tag != ld(node, F) + 1:
        fail(node, MISMATCH, tag, ld(node, F))
        return False
    if depth == ld(node, D):  # the released code looks at what comes next before the sums leave
        for port in range(1, depth + 1):
            if not ready(node, port):
                return False
            clock = seen(node, port, clock)
        if not ready(node, 0):
            return False
        clock = seen(node, 0, clock)
    pop(node, depth + 1, clock)
    st(node, F, tag)
    if depth == ld(node, D):
        _start_emitting(node)
    else:
        clock = advance(node, ld(node, C), clock)
        st(node, E, depth + 1)
        st(node, STATE, _LEAVE)
    st(node, CLOCK, clock)
    return True


@kernel
def _start_emitting(node: int) -> None:
    st(node, W, sort(ld(node, T), ld(node, U), ld(node, S)))
    st(node, H, 0)
    st(node, STATE, _EMIT)


@kernel
def _emit(node: int) -> bool:
    """Put out the next sum, with the stops before it; after the last, the stops of all levels. All at one time."""
    order, bits, width = ld(node, D), ld(node, B), ld(node, NODE_WIDTH)
    keys, mask, count, ordered = ld(node, P), ld(node, R), ld(node, S), ld(node, W)
    latency, clock = ld(node, LATENCY), ld(node, CLOCK)
    index = ld(node, H)
    while index < count and ld(node, PENDING) == 0:
        key = ld(ordered, index)
        changed = order - 1  # the outermost coordinate that is another than before
        if index > 0:
            changed = 0
            differ = (key ^ ld(ordered, index - 1)) >> bits
            while differ != 0:
                changed += 1
                differ >>= bits
            if changed > 0:
                clock = reserve(node, 0, changed + 1, clock)
                for depth in range(changed - 1, -1, -1):
                    emit(node, depth + 1, S0 - (changed - 1 - depth), 0, latency, clock)
                emit(node, 0, S0 - (changed - 1), 0, latency, clock)
        clock = reserve(node, 0, changed + 2, clock)
        for depth in range(changed, -1, -1):
            emit(node, depth + 1, (key >> (bits * depth)) & ((1 << bits) - 1), 0, latency, clock)
        emit(node, 0, 0, ld(node, Q) + 8 * width * find(keys, mask, key, order > 1), latency, clock)
        index += 1
    st(node, H, index)
    if ld(node, PENDING) == 0:
        end = ld(node, F)
        clock = reserve(node, 0, order + 1, clock)
        for depth in range(order - 1, -1, -1):
            emit(node, depth + 1, end - (order - 1 - depth), 0, latency, clock)
        emit(node, 0, end - (order - 1), 0, latency, clock)
        clock = advance(node, ld(node, INTERVAL), clock)
        for i in range(count):
            st(node, H, find(keys, mask, ld(ordered, i), order > 1))
            st(ld(node, U) if ordered == ld(node, T) else ld(node, T), i, ld(node, H))
        slots = ld(node, U) if ordered == ld(node, T) else ld(node, T)
        for i in range(count):
            st(keys, ld(slots, i), FREE)
        st(node, S, 0)
        st(node, STATE, _OUTER)
    st(node, CLOCK, clock)
    return True


@kernel
def _ends(node: int) -> bool:
    """Done of every input, the values' last."""
    order, index = ld(node, D), ld(node, H)
    port = index + 1 if index <= order else 0
    if not ready(node, port):
        return False
    clock = seen(node, port, ld(node, CLOCK))
    if tag_at(node, port) != DONE:
        fail(node, MISMATCH, DONE, tag_at(node, port))
        return False
    pop(node, port, clock)
    st(node, CLOCK, clock)
    st(node, H, index + 1)
    if port > 0:
        return True
    clock = reserve(node, 0, order + 1, clock)
    for way in range(order + 1):
        emit(node, way, DONE, 0, ld(node, LATENCY), clock)
    finish(node, clock)
    return False
