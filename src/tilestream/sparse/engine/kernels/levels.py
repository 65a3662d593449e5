"""Nodes that read tensors: root, scan, locate, array. ``sparse.spec.levels`` says what they mean."""

from __future__ import annotations

from tilestream.sparse.engine.cells import ld, st
from tilestream.sparse.engine.jit import kernel
from tilestream.sparse.engine.layout import (
    CLOCK,
    INTERVAL,
    LATENCY,
    NODE_WIDTH,
    PENDING,
    READ,
    STATE,
    VALUE_WORDS,
    A,
    B,
    C,
    D,
    E,
    F,
    G,
)
from tilestream.sparse.engine.ports import advance, fail, finish, pop, put, put_both, ready, seen, tag_at
from tilestream.sparse.engine.stretches import array_stretch, scan_stretch
from tilestream.sparse.stream.tokens import DONE, EMPTY, S0

IDLE, FIBER, CLOSE = 0, 1, 2
MISMATCH, OUTSIDE = 1, 2


@kernel
def root(node: int) -> None:
    """Reference 0, then done."""
    clock = ld(node, CLOCK)
    for tag in (0, DONE):
        clock = put(node, 0, tag, 0, ld(node, LATENCY), clock)
        clock = advance(node, ld(node, INTERVAL), clock)
    finish(node, clock)


@kernel
def end_fiber(node: int, tag: int, idle: bool, clock: int) -> tuple[int, bool]:
    """Put out the end of the fiber in hand, or, if there is none (``idle``), a control token; ``tag``: what comes next.

    Returns the clock, and whether the node has finished.
    """
    stop = tag - 1 if tag <= S0 else S0  # the end of a fiber takes along a stop that follows its reference
    if tag <= S0 or idle:
        pop(node, 0, clock)
    if idle and tag == DONE:
        stop = DONE
    clock = put_both(node, stop, stop, ld(node, LATENCY), clock)
    if stop == DONE:
        finish(node, clock)
        return clock, True
    return advance(node, ld(node, INTERVAL), clock), False


@kernel
def scan(node: int) -> None:
    """A: if compressed; B, C: addresses of seg and crd; D: size; G: fibers. State: E: next position, F: its end."""
    clock = ld(node, CLOCK)
    interval, latency = ld(node, INTERVAL), ld(node, LATENCY)
    compressed, seg, crds, size = ld(node, A) != 0, ld(node, B), ld(node, C), ld(node, D)
    state, position, end = ld(node, STATE), ld(node, E), ld(node, F)
    while ld(node, PENDING) == 0:
        if state == FIBER:
            position, clock = scan_stretch(node, position, end, clock)
            while position < end and ld(node, PENDING) == 0:
                crd = ld(crds, position) if compressed else position - (end - size)
                clock = put_both(node, crd, position, latency, clock)
                clock = advance(node, interval, clock)
                position += 1
            if position == end:
                state = CLOSE
            continue
        if not ready(node, 0):
            break
        clock = seen(node, 0, clock)
        tag = tag_at(node, 0)
        if state == IDLE and (tag >= 0 or tag == EMPTY):
            pop(node, 0, clock)
            state = CLOSE
            if tag >= 0:
                state = FIBER
                position, end = tag * size, tag * size + size
                if compressed:
                    if tag >= ld(node, G):
                        fail(node, OUTSIDE, tag, ld(node, G))
                        return
                    position, end = ld(seg, tag), ld(seg, tag + 1)
                    st(node, READ, ld(node, READ) + 2 + end - position)
            continue
        clock, done = end_fiber(node, tag, state == IDLE, clock)
        if done:
            return
        state = IDLE
    st(node, E, position)
    st(node, F, end)
    st(node, STATE, state)
    st(node, CLOCK, clock)


@kernel
def locate(node: int) -> None:
    """D: size of the level. State 1: a coordinate was taken, E, and its reference has not come yet."""
    clock = ld(node, CLOCK)
    interval, latency, size = ld(node, INTERVAL), ld(node, LATENCY), ld(node, D)
    held, crd = ld(node, STATE) != 0, ld(node, E)
    while ld(node, PENDING) == 0:
        if not held:
            if not ready(node, 0):
                break
            clock = seen(node, 0, clock)
            crd = tag_at(node, 0)
            pop(node, 0, clock)
            held = True
        if not ready(node, 1):
            break
        clock = seen(node, 1, clock)
        ref = tag_at(node, 1)
        pop(node, 1, clock)
        held = False
        child = EMPTY
        if crd >= 0 and ref >= 0:
            if crd >= size:
                fail(node, OUTSIDE, crd, size)
                return
            child = ref * size + crd
        elif crd < EMPTY or ref < EMPTY:
            if crd != ref:
                fail(node, MISMATCH, crd, ref)
                return
            child = crd
        clock = put_both(node, crd, child, latency, clock)
        if child == DONE:
            finish(node, clock)
            return
        clock = advance(node, interval, clock)
    st(node, E, crd)
    st(node, STATE, 1 if held else 0)
    st(node, CLOCK, clock)


@kernel
def put_read(node: int, ref: int, clock: int) -> int:
    """Put out what an array has for a reference: its value, nothing but a 0 for N, or the control token. The clock."""
    value = ld(node, B) + 8 * ld(node, NODE_WIDTH) * ref if ref >= 0 else 0
    return put(node, 0, ref if ref < EMPTY else 0, value, ld(node, LATENCY), clock)


@kernel
def array(node: int) -> None:
    """B: address of the values; D: how many there are."""
    clock = ld(node, CLOCK)
    interval, size = ld(node, INTERVAL), ld(node, D)
    words = 0
    while ld(node, PENDING) == 0:
        clock = array_stretch(node, clock)
        if not ready(node, 0):
            break
        clock = seen(node, 0, clock)
        tag = tag_at(node, 0)
        if tag >= size:
            fail(node, OUTSIDE, tag, size)
            break
        pop(node, 0, clock)
        clock = put_read(node, tag, clock)
        if tag >= 0:
            words += ld(node, VALUE_WORDS)
        if tag == DONE:
            st(node, READ, ld(node, READ) + words)
            finish(node, clock)
            return
        clock = advance(node, interval, clock)
    st(node, READ, ld(node, READ) + words)
    st(node, CLOCK, clock)
