"""Intersect and union, of any number of operands. ``sparse.spec.joiners`` says what they mean."""

from __future__ import annotations

from tilestream.sparse.engine.cells import ld, st
from tilestream.sparse.engine.jit import kernel
from tilestream.sparse.engine.kernels.levels import MISMATCH
from tilestream.sparse.engine.layout import CLOCK, INTERVAL, LATENCY, NINS, PENDING
from tilestream.sparse.engine.ports import (
    advance,
    emit,
    fail,
    finish,
    pop,
    ready,
    reserve,
    seen,
    tag_at,
    taken_tag,
    taken_value,
)
from tilestream.sparse.engine.stretches_compute import skip_stretch
from tilestream.sparse.stream.tokens import DONE, EMPTY

_NONE = 1 << 62


@kernel
def join_operands(node: int, union: bool) -> None:
    """Inputs: the coordinates of each operand, then the payload of each."""
    clock = ld(node, CLOCK)
    interval, latency = ld(node, INTERVAL), ld(node, LATENCY)
    ways = ld(node, NINS) // 2
    while ld(node, PENDING) == 0:
        if ways == 2 and not union:
            clock = skip_stretch(node, clock)
        there = True
        for port in range(2 * ways):
            if there and not ready(node, port):
                there = False
        if not there:
            break
        for port in range(2 * ways):
            clock = seen(node, port, clock)
        least, elements = _NONE, 0
        end = 0
        for way in range(ways):
            head, payload = tag_at(node, way), tag_at(node, ways + way)
            if (head < 0 and head != payload) or (head >= 0 and payload < EMPTY):
                fail(node, MISMATCH, head, payload)
                return
            if head >= 0:
                elements += 1
                if head < least:
                    least = head
            elif head >= DONE:
                end = DONE
        if elements == 0:
            end = tag_at(node, 0)
            for way in range(1, ways):
                if tag_at(node, way) != end:
                    fail(node, MISMATCH, end, tag_at(node, way))
                    return
            for port in range(2 * ways):
                pop(node, port, clock)
            clock = reserve(node, 0, ways + 1, clock)
            for port in range(ways + 1):
                emit(node, port, end, 0, latency, clock)
            if end == DONE:
                finish(node, clock)
                return
        else:
            if end == DONE:
                fail(node, MISMATCH, least, DONE)
                return
            mine = 0  # whose coordinate it is: a bit each
            for way in range(ways):
                if tag_at(node, way) == least:
                    mine |= 1 << way
                    pop(node, way, clock)
                    pop(node, ways + way, clock)
            if union or mine == (1 << ways) - 1:
                clock = reserve(node, 0, ways + 1, clock)
                emit(node, 0, least, 0, latency, clock)
                for way in range(ways):
                    port = ways + way
                    if mine & (1 << way):
                        emit(node, way + 1, taken_tag(node, port), taken_value(node, port), latency, clock)
                    else:
                        emit(node, way + 1, EMPTY, 0, latency, clock)
        clock = advance(node, interval, clock)
    st(node, CLOCK, clock)


@kernel
def intersect(node: int) -> None:
    join_operands(node, False)


@kernel
def union(node: int) -> None:
    join_operands(node, True)
