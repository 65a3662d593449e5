"""Nodes that line up streams: repsig, repeat, crd_hold, crd_drop, val_drop: see ``sparse.spec.repeats``."""

from __future__ import annotations

from tilestream.sparse.engine.cells import ld, ldf, st
from tilestream.sparse.engine.jit import kernel
from tilestream.sparse.engine.kernels.levels import MISMATCH
from tilestream.sparse.engine.layout import CLOCK, INTERVAL, LATENCY, NODE_WIDTH, PENDING, STATE, E, F, G
from tilestream.sparse.engine.ports import (
    advance,
    emit,
    fail,
    finish,
    pop,
    put,
    put_both,
    ready,
    reserve,
    seen,
    tag_at,
    taken_value,
    value_at,
)
from tilestream.sparse.engine.stretches import repeat_stretch, repsig_stretch
from tilestream.sparse.stream.tokens import DONE, EMPTY, S0


@kernel
def repsig(node: int) -> None:
    """0 for an element or N, S0 for a stop of any level."""
    clock = ld(node, CLOCK)
    interval, latency = ld(node, INTERVAL), ld(node, LATENCY)
    while ld(node, PENDING) == 0:
        clock = repsig_stretch(node, clock)
        if not ready(node, 0):
            break
        clock = seen(node, 0, clock)
        tag = tag_at(node, 0)
        pop(node, 0, clock)
        signal = DONE if tag == DONE else S0 if tag <= S0 else 0
        clock = put(node, 0, signal, 0, latency, clock)
        if tag == DONE:
            finish(node, clock)
            return
        clock = advance(node, interval, clock)
    st(node, CLOCK, clock)


@kernel
def repeat(node: int) -> None:
    """State 1: an element was taken at an S, and it is not known yet whether a stop follows it."""
    clock = ld(node, CLOCK)
    interval, latency = ld(node, INTERVAL), ld(node, LATENCY)
    closing = ld(node, STATE) != 0
    while ld(node, PENDING) == 0:
        if not ready(node, 0):
            break
        clock = seen(node, 0, clock)
        tag = tag_at(node, 0)
        if not closing:
            clock = repeat_stretch(node, tag, clock)
            if not ready(node, 1):
                break
            clock = seen(node, 1, clock)
            signal = tag_at(node, 1)
            pop(node, 1, clock)
            if signal >= 0:
                if tag < EMPTY:
                    fail(node, MISMATCH, tag, signal)
                    break
                clock = put(node, 0, tag, value_at(node, 0), latency, clock)
                clock = advance(node, interval, clock)
                continue
            if (signal == DONE) != (tag == DONE):
                fail(node, MISMATCH, tag, signal)
                break
            pop(node, 0, clock)
            if tag == DONE:
                clock = put(node, 0, DONE, 0, latency, clock)
                finish(node, clock)
                return
            if tag >= EMPTY:
                closing = True
                continue
        elif tag <= S0:
            pop(node, 0, clock)
        closing = False
        clock = put(node, 0, tag - 1 if tag <= S0 else S0, 0, latency, clock)
        clock = advance(node, interval, clock)
    st(node, STATE, 1 if closing else 0)
    st(node, CLOCK, clock)


@kernel
def crd_hold(node: int) -> None:
    """State 1: the stop that goes with the inner stop E has not come yet."""
    clock = ld(node, CLOCK)
    interval, latency = ld(node, INTERVAL), ld(node, LATENCY)
    state, inner = ld(node, STATE), ld(node, E)
    while ld(node, PENDING) == 0:
        if not ready(node, 0):
            break
        clock = seen(node, 0, clock)
        outer = tag_at(node, 0)
        out = inner
        if state != 0:
            if outer > S0:
                fail(node, MISMATCH, outer, inner)
                return
            pop(node, 0, clock)
            state = 0
        else:
            if not ready(node, 1):
                break
            clock = seen(node, 1, clock)
            inner = tag_at(node, 1)
            pop(node, 1, clock)
            if (inner == DONE) != (outer == DONE) or (inner > S0 and outer <= S0):
                fail(node, MISMATCH, outer, inner)
                return
            out = inner
            if inner == DONE:
                pop(node, 0, clock)
                clock = put(node, 0, DONE, 0, latency, clock)
                finish(node, clock)
                return
            if inner > S0:
                out = outer
            else:
                pop(node, 0, clock)
                if outer > S0 and inner < S0:
                    state = 1
                    continue
        clock = put(node, 0, out, 0, latency, clock)
        clock = advance(node, interval, clock)
    st(node, E, inner)
    st(node, STATE, state)
    st(node, CLOCK, clock)


@kernel
def val_drop(node: int) -> None:
    """Inputs and outputs: coordinates, then values."""
    clock = ld(node, CLOCK)
    interval, latency, width = ld(node, INTERVAL), ld(node, LATENCY), ld(node, NODE_WIDTH)
    while ld(node, PENDING) == 0:
        if not (ready(node, 0) and ready(node, 1)):
            break
        clock = seen(node, 1, seen(node, 0, clock))
        crd, val, value = tag_at(node, 0), tag_at(node, 1), value_at(node, 1)
        pop(node, 0, clock)
        pop(node, 1, clock)
        if crd >= 0 and val >= EMPTY:
            kept = False
            for i in range(width if val >= 0 else 0):
                kept = kept or ldf(value, i) != 0.0
            if kept:
                clock = reserve(node, 0, 2, clock)
                emit(node, 0, crd, 0, latency, clock)
                emit(node, 1, 0, value, latency, clock)
        elif crd != val or crd == EMPTY:
            fail(node, MISMATCH, crd, val)
            return
        else:
            clock = put_both(node, crd, crd, latency, clock)
        if crd == DONE:
            finish(node, clock)
            return
        clock = advance(node, interval, clock)
    st(node, CLOCK, clock)


_OUTER, _FIBER, _BOTH = 0, 1, 2


@kernel
def crd_drop(node: int) -> None:
    """E: the outer token in hand. F: its fiber holds something. G: a fiber was put out, but not its end."""
    clock = ld(node, CLOCK)
    interval, latency = ld(node, INTERVAL), ld(node, LATENCY)
    state, outer, kept, open_ = ld(node, STATE), ld(node, E), ld(node, F) != 0, ld(node, G) != 0
    while ld(node, PENDING) == 0:
        port = 0 if state == _OUTER else 1
        if not ready(node, port):
            break
        clock = seen(node, port, clock)
        tag = tag_at(node, port)
        if state == _OUTER:
            pop(node, 0, clock)
            outer, kept = tag, False
            state = _FIBER if outer >= EMPTY else _BOTH
        elif state == _BOTH:  # a stop, or done: the inner stream has it too
            if tag != (DONE if outer == DONE else outer - 1):
                fail(node, MISMATCH, outer, tag)
                return
            pop(node, 1, clock)
            clock = put_both(node, outer, tag, latency, clock)
            if outer == DONE:
                finish(node, clock)
                return
            open_ = False
            state = _OUTER
            clock = advance(node, interval, clock)
        elif tag <= S0:
            if tag == S0:
                pop(node, 1, clock)
            state = _OUTER
            clock = advance(node, interval, clock)
        elif tag == DONE:
            fail(node, MISMATCH, outer, tag)
            return
        else:
            pop(node, 1, clock)
            value = taken_value(node, 1)
            if not kept:
                if open_:
                    clock = put(node, 1, S0, 0, latency, clock)
                clock = put(node, 0, outer, 0, latency, clock)
                kept = open_ = True
            clock = put(node, 1, tag, value, latency, clock)
    st(node, E, outer)
    st(node, F, 1 if kept else 0)
    st(node, G, 1 if open_ else 0)
    st(node, STATE, state)
    st(node, CLOCK, clock)
