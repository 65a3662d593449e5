"""Inner loops of the nodes that compute and merge: as ``stretches``."""

from __future__ import annotations

from tilestream.sparse.engine.cells import ld, ldf, st, stf
from tilestream.sparse.engine.jit import kernel
from tilestream.sparse.engine.kernels.arithmetic import fold, scalar_binary
from tilestream.sparse.engine.layout import (
    CONTROL,
    FLOPS,
    INS,
    INTERVAL,
    LATENCY,
    NODE_WIDTH,
    OUTS,
    RESPONSE,
    SCRATCH,
    TAGS,
    TIMES,
    VALUE_WORDS,
    VALUES,
    A,
    B,
    D,
    F,
    P,
    Q,
    R,
    S,
    T,
)
from tilestream.sparse.engine.spans import (
    FEW,
    answer,
    came,
    free_at,
    head_of,
    moved,
    plain,
    room,
    tail_of,
    took,
    waiting,
    was_busy,
)
from tilestream.sparse.engine.table import FREE, find
from tilestream.sparse.stream.tokens import DONE, EMPTY

_LAST = 1 << 62


@kernel
def binary_stretch(node: int, clock: int) -> int:
    """An operation on two streams of scalars. Returns the clock."""
    if not plain(node) or ld(node, NODE_WIDTH) > 1:
        return clock
    left, right, target = ld(ld(node, INS), 0), ld(ld(node, INS), 1), ld(ld(node, OUTS), 0)
    count = min(min(waiting(left), waiting(right)), room(target))
    if count < FEW:
        return clock
    left_tags, left_times, left_values = head_of(left, TAGS), head_of(left, TIMES), head_of(left, VALUES)
    right_tags, right_times, right_values = head_of(right, TAGS), head_of(right, TIMES), head_of(right, VALUES)
    out_tags, out_times, out = tail_of(target, TAGS), tail_of(target, TIMES), tail_of(target, VALUES)
    interval, latency, control = ld(node, INTERVAL), ld(node, LATENCY), ld(node, CONTROL)
    op, scalars = ld(node, A), ld(node, NODE_WIDTH) == 1
    steps, waited, done = 0, 0, count
    left_answers, right_answers, target_answers = ld(left, RESPONSE), ld(right, RESPONSE), ld(target, RESPONSE)
    for i in range(count):
        a, b = ld(left_tags, i), ld(right_tags, i)
        element = a >= EMPTY and b >= EMPTY
        if a == DONE or (not element and a != b):
            done = i
            break
        clock = came(left_answers, left_times, i, clock)
        clock = came(right_answers, right_times, i, clock)
        free = free_at(target_answers, out_times, i, clock)
        waited += free - clock
        clock = free
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
    took(left, done)
    moved(node, right, target, done, waited)
    return clock


@kernel
def skip_stretch(node: int, clock: int) -> int:
    """Coordinates of one of two intersected operands that the other does not have. Returns the clock."""
    if not plain(node):
        return clock
    ins = ld(node, INS)
    left, right, left_in, right_in = ld(ins, 0), ld(ins, 1), ld(ins, 2), ld(ins, 3)
    lefts, rights = min(waiting(left), waiting(left_in)), min(waiting(right), waiting(right_in))
    if lefts < 1 or rights < 1:
        return clock
    left_tags, left_times = head_of(left, TAGS), head_of(left, TIMES)
    right_tags, right_times = head_of(right, TAGS), head_of(right, TIMES)
    left_in_tags, left_in_times = head_of(left_in, TAGS), head_of(left_in, TIMES)
    right_in_tags, right_in_times = head_of(right_in, TAGS), head_of(right_in, TIMES)
    interval = ld(node, INTERVAL)
    bound = max(max(ld(left, RESPONSE), ld(right, RESPONSE)), max(ld(left_in, RESPONSE), ld(right_in, RESPONSE))) >= 0
    i, j = 0, 0
    while i < lefts and j < rights:
        a, b = ld(left_tags, i), ld(right_tags, j)
        p, q = ld(left_in_tags, i), ld(right_in_tags, j)
        if a == b or max(a, b) < 0 or min(a, b) == DONE or min(a, b) == EMPTY:
            break
        if (p != a if a < 0 else p < EMPTY) or (q != b if b < 0 else q < EMPTY):
            break
        clock = max(clock, max(ld(left_times, i), ld(right_times, j)))
        clock = max(clock, max(ld(left_in_times, i), ld(right_in_times, j)))
        # A stop comes after every coordinate. Which side goes is hard to predict: no branch on it.
        goes = 1 if (a if a >= 0 else _LAST) < (b if b >= 0 else _LAST) else 0
        if bound:
            if goes != 0:
                answer(ld(left, RESPONSE), left_times, i, clock)
                answer(ld(left_in, RESPONSE), left_in_times, i, clock)
            else:
                answer(ld(right, RESPONSE), right_times, j, clock)
                answer(ld(right_in, RESPONSE), right_in_times, j, clock)
        clock += interval
        i += goes
        j += 1 - goes
    took(left, i)
    took(left_in, i)
    took(right, j)
    took(right_in, j)
    was_busy(node, i + j)
    return clock


@kernel
def gather_stretch(node: int, path: int, clock: int) -> int:
    """Scalars of a fiber into an accumulator's table; ``path``: the packed coordinates above. Returns the clock."""
    if not plain(node) or ld(node, NODE_WIDTH) > 1:
        return clock
    values, crds = ld(ld(node, INS), 0), ld(ld(node, INS), 1)
    count = min(waiting(values), waiting(crds))
    if count < FEW:
        return clock
    tags, times = head_of(crds, TAGS), head_of(crds, TIMES)
    value_tags, value_times, numbers = head_of(values, TAGS), head_of(values, TIMES), head_of(values, VALUES)
    keys, sums, mask, known = ld(node, P), ld(node, Q), ld(node, R), ld(node, S)
    interval, op, packed, scalars = ld(node, INTERVAL), ld(node, A), ld(node, D) > 1, ld(node, NODE_WIDTH) == 1
    bits = ld(node, B)
    done = count
    crds_answers, values_answers = ld(crds, RESPONSE), ld(values, RESPONSE)
    for i in range(count):
        tag = ld(tags, i)
        if tag < 0 or tag >> bits != 0 or ld(value_tags, i) < EMPTY or known * 2 > mask:
            done = i
            break
        clock = max(clock, max(ld(times, i), ld(value_times, i)))
        answer(crds_answers, times, i, clock)
        answer(values_answers, value_times, i, clock)
        clock += interval
        slot = find(keys, mask, path | tag, packed)
        if ld(keys, slot) == FREE:
            st(keys, slot, path | tag)
            st(ld(node, T), known, path | tag)
            known += 1
            if scalars:
                st(sums, slot, ld(numbers, i))
        elif scalars:
            fold(op, numbers + 8 * i, sums + 8 * slot, 1, False)
    st(node, S, known)
    st(node, FLOPS, ld(node, FLOPS) + done * ld(node, VALUE_WORDS))
    took(values, done)
    took(crds, done)
    was_busy(node, done)
    return clock


@kernel
def reduce_stretch(node: int, clock: int) -> int:
    """Scalars of a fiber into the scratch, which already holds something. Returns the clock."""
    if not plain(node) or ld(node, NODE_WIDTH) > 1 or ld(node, F) == 0:
        return clock
    source = ld(ld(node, INS), 0)
    count = waiting(source)
    if count < FEW:
        return clock
    tags, times, numbers = head_of(source, TAGS), head_of(source, TIMES), head_of(source, VALUES)
    interval, op, scalars, scratch = ld(node, INTERVAL), ld(node, A), ld(node, NODE_WIDTH) == 1, ld(node, SCRATCH)
    done = count
    source_answers = ld(source, RESPONSE)
    for i in range(count):
        if ld(tags, i) < 0:
            done = i
            break
        clock = came(source_answers, times, i, clock)
        clock += interval
        if scalars:
            fold(op, numbers + 8 * i, scratch, 1, False)
    st(node, FLOPS, ld(node, FLOPS) + done * ld(node, VALUE_WORDS))
    took(source, done)
    was_busy(node, done)
    return clock
