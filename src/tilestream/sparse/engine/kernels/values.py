"""Nodes that compute element by element or fiber by fiber: alu, reduce, and spacc of order 0."""

from __future__ import annotations

from tilestream.sparse.engine.cells import copy_cells, ld, st
from tilestream.sparse.engine.jit import kernel
from tilestream.sparse.engine.kernels.arithmetic import binary, fold, fold_nothing, unary
from tilestream.sparse.engine.kernels.levels import MISMATCH
from tilestream.sparse.engine.layout import (
    CLOCK,
    FLOPS,
    INTERVAL,
    LATENCY,
    NODE_WIDTH,
    PENDING,
    SCRATCH,
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
from tilestream.sparse.engine.ports import (
    advance,
    fail,
    finish,
    pop,
    put,
    ready,
    seen,
    tag_at,
    taken_value,
)
from tilestream.sparse.engine.stretches_compute import binary_stretch, reduce_stretch
from tilestream.sparse.stream.tokens import DONE, EMPTY, S0


@kernel
def alu(node: int) -> None:
    """A: operation; B: address of the scalar; C: edge of a block; D: operations a step; G: whether it is unary.

    State 1: the first operand, with tag E and its value in the scratch, waits for the second.
    """
    clock = ld(node, CLOCK)
    interval, latency, width = ld(node, INTERVAL), ld(node, LATENCY), ld(node, NODE_WIDTH)
    op, scalar, edge, single = ld(node, A), ld(node, B), ld(node, C), ld(node, G) != 0
    held, first = ld(node, STATE) != 0, ld(node, E)
    scratch = ld(node, SCRATCH)
    result = scratch + 8 * width
    steps = 0
    left = scratch
    while ld(node, PENDING) == 0:
        if not held:
            if not single:
                clock = binary_stretch(node, clock)
            if not ready(node, 0):
                break
            clock = seen(node, 0, clock)
            first = tag_at(node, 0)
            pop(node, 0, clock)
            left = taken_value(node, 0)
        if not single:
            if not ready(node, 1):
                if not held:
                    copy_cells(left, scratch, width)
                    held = True
                break
            if held:
                left = scratch
                held = False
            clock = seen(node, 1, clock)
            second = tag_at(node, 1)
            pop(node, 1, clock)
            if first < EMPTY or second < EMPTY:
                if first != second:
                    fail(node, MISMATCH, first, second)
                    return
            else:
                first = 0
                binary(op, left, taken_value(node, 1), result, edge)
                steps += 1
        elif first >= EMPTY:
            first = 0
            unary(op, left, scalar, result, edge)
            steps += 1
        clock = put(node, 0, first, result if first == 0 else 0, latency, clock)
        if first == DONE:
            st(node, FLOPS, ld(node, FLOPS) + steps * ld(node, D))
            finish(node, clock)
            return
        clock = advance(node, interval, clock)
    st(node, FLOPS, ld(node, FLOPS) + steps * ld(node, D))
    st(node, STATE, 1 if held else 0)
    st(node, E, first)
    st(node, CLOCK, clock)


@kernel
def accumulate(node: int, value: int, target: int, fresh: bool) -> None:
    """Fold a value into ``target`` by the node's operation, A; the first one is taken as it is."""
    fold(ld(node, A), value, target, ld(node, NODE_WIDTH), fresh)
    st(node, FLOPS, ld(node, FLOPS) + ld(node, VALUE_WORDS))


@kernel
def reduce(node: int) -> None:
    """A: operation. C: cycles from a sum to the stop after it. F: whether the scratch holds something."""
    clock = ld(node, CLOCK)
    interval, latency, width = ld(node, INTERVAL), ld(node, LATENCY), ld(node, NODE_WIDTH)
    scratch = ld(node, SCRATCH)
    while ld(node, PENDING) == 0:
        clock = reduce_stretch(node, clock)
        if not ready(node, 0):
            break
        clock = seen(node, 0, clock)
        tag = tag_at(node, 0)
        pop(node, 0, clock)
        if tag >= EMPTY:
            accumulate(node, taken_value(node, 0), scratch, ld(node, F) == 0)
            st(node, F, 1)
            if tag == EMPTY:
                continue
        elif tag == DONE:
            clock = put(node, 0, DONE, 0, latency, clock)
            finish(node, clock)
            return
        else:
            if ld(node, F) == 0:
                fold_nothing(ld(node, A), scratch, width)
            st(node, F, 0)
            clock = put(node, 0, 0, scratch, latency, clock)
            if tag < S0:
                clock = advance(node, ld(node, C), clock)
                clock = put(node, 0, tag + 1, 0, latency, clock)
        clock = advance(node, interval, clock)
    st(node, CLOCK, clock)


_HEAD, _BARE, _FIBER, _AFTER = 0, 1, 2, 3


@kernel
def reduce_by(node: int) -> None:
    """``spacc`` of order 0. Inputs: values, then the coordinates above. A, C, F: as in ``reduce``. E: stop in hand."""
    clock = ld(node, CLOCK)
    interval, latency, width = ld(node, INTERVAL), ld(node, LATENCY), ld(node, NODE_WIDTH)
    scratch = ld(node, SCRATCH)
    state, end = ld(node, STATE), ld(node, E)
    while ld(node, PENDING) == 0:
        port = 0 if state == _BARE or state == _FIBER else 1
        if not ready(node, port):
            break
        clock = seen(node, port, clock)
        tag = tag_at(node, port)
        if state == _HEAD:
            state = _FIBER if tag >= EMPTY else _BARE
            end = tag
            continue
        pop(node, port, clock)
        if state == _BARE:  # a stop, or done, of the coordinates: the values have it too
            pop(node, 1, clock)
            if tag != (DONE if end == DONE else end - 1):
                fail(node, MISMATCH, end, tag)
                return
            state = _HEAD
            clock = put(node, 0, end, 0, latency, clock)
            if end == DONE:
                finish(node, clock)
                return
            clock = advance(node, interval, clock)
        elif state == _AFTER:
            if tag != end + 1:
                fail(node, MISMATCH, tag, end)
                return
            state = _HEAD
            clock = advance(node, ld(node, C), clock)
            clock = put(node, 0, tag, 0, latency, clock)
            clock = advance(node, interval, clock)
        elif tag == DONE:
            fail(node, MISMATCH, end, tag)
            return
        elif tag >= EMPTY:
            accumulate(node, taken_value(node, 0), scratch, ld(node, F) == 0)
            st(node, F, 1)
            if tag >= 0:
                clock = advance(node, interval, clock)
        else:
            end = tag
            pop(node, 1, clock)
            if ld(node, F) == 0:
                fold_nothing(ld(node, A), scratch, width)
            st(node, F, 0)
            clock = put(node, 0, 0, scratch, latency, clock)
            state = _AFTER
            if tag == S0:
                state = _HEAD
                clock = advance(node, interval, clock)
    st(node, STATE, state)
    st(node, E, end)
    st(node, CLOCK, clock)
