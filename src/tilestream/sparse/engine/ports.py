"""What a kernel may do with its ports: look at a token, take it, put some out, let time pass.

A step puts its tokens out at once: it ``reserve``s room in all of their channels, then ``emit``s each. Where room is
lacking, that and all that follows in the step are put off, in order; the scheduler makes up for them when there is
room (``resume``), before it calls the kernel for its next step. So kernels are written as if there always were room.
"""

from __future__ import annotations

from tilestream.sparse.engine.cells import copy_cells, ld, st, zero_cells
from tilestream.sparse.engine.jit import kernel
from tilestream.sparse.engine.layout import (
    ACTION_CELLS,
    ADVANCE,
    BOX,
    BOX_VALUES,
    BUSY,
    CAPACITY,
    CLOCK,
    CONTROL,
    DONE_PENDING,
    EMIT,
    FAILED,
    FINISHED,
    HEAD,
    HEAD_SLOT,
    INS,
    NODE_WIDTH,
    NOT_BEFORE,
    ON_INPUT,
    ON_ROOM,
    ON_STORE,
    OUTS,
    PENDING,
    POP,
    RESERVE,
    RESPONSE,
    ROOM,
    ROOM_FOR,
    START,
    STATE,
    TAGS,
    TAIL,
    TAIL_SLOT,
    TIMES,
    USED,
    VALUES,
    WAIT_CHANNEL,
    WAITING,
    WIDTH,
    A,
    B,
    C,
)
from tilestream.sparse.engine.spans import answer, gave, head_of, took

END = -1
"""State of a node that has nothing left to do."""


@kernel
def ready(node: int, port: int) -> bool:
    """Whether a token is there; if not, the node waits for it."""
    channel = ld(ld(node, INS), port)
    if ld(channel, HEAD) != ld(channel, TAIL):
        return True
    st(node, WAITING, ON_INPUT)
    st(node, WAIT_CHANNEL, channel)
    return False


@kernel
def tag_at(node: int, port: int) -> int:
    """Tag of the next token, which must be there."""
    channel = ld(ld(node, INS), port)
    return ld(ld(channel, TAGS), ld(channel, HEAD_SLOT))


@kernel
def value_at(node: int, port: int) -> int:
    """Address of the next token's value, 0 in a stream without values. It holds until the kernel returns."""
    channel = ld(ld(node, INS), port)
    values = ld(channel, VALUES)
    if values == 0:
        return 0
    return values + 8 * ld(channel, WIDTH) * ld(channel, HEAD_SLOT)


@kernel
def taken_tag(node: int, port: int) -> int:
    """Tag of the token that was taken last; it holds until the kernel returns."""
    channel = ld(ld(node, INS), port)
    slot = ld(channel, HEAD_SLOT)
    return ld(ld(channel, TAGS), (ld(channel, CAPACITY) if slot == 0 else slot) - 1)


@kernel
def taken_value(node: int, port: int) -> int:
    """Address of the value of the token that was taken last, 0 in a stream without; it holds as long as the tag."""
    channel = ld(ld(node, INS), port)
    values = ld(channel, VALUES)
    if values == 0:
        return 0
    slot = ld(channel, HEAD_SLOT)
    return values + 8 * ld(channel, WIDTH) * ((ld(channel, CAPACITY) if slot == 0 else slot) - 1)


@kernel
def seen(node: int, port: int, clock: int) -> int:
    """The clock once the next token, which must be there, has come."""
    channel = ld(ld(node, INS), port)
    time = ld(ld(channel, TIMES), ld(channel, HEAD_SLOT))
    if time > clock:
        clock = time
    if ld(node, START) < 0:
        st(node, START, clock)
    return clock


@kernel
def _pop(channel: int, clock: int) -> None:
    answer(ld(channel, RESPONSE), head_of(channel, TIMES), 0, clock)
    took(channel, 1)


@kernel
def _room(node: int, first: int, count: int) -> bool:
    """Whether ``count`` outputs from ``first`` on have room; if not, the node waits for it."""
    outs = ld(node, OUTS)
    for port in range(first, first + count):
        channel = ld(outs, port)
        if channel != 0 and ld(channel, TAIL) - ld(channel, HEAD) >= ld(channel, CAPACITY):
            st(node, WAITING, ON_ROOM)
            st(node, WAIT_CHANNEL, channel)
            return False
    return True


@kernel
def _freed(node: int, first: int, count: int, clock: int) -> int:
    """The clock once the node knows that the slots that it is going to use were read."""
    outs = ld(node, OUTS)
    for port in range(first, first + count):
        channel = ld(outs, port)
        if channel != 0 and ld(channel, RESPONSE) >= 0 and ld(channel, TAIL) >= ld(channel, CAPACITY):
            free = ld(ld(channel, TIMES), ld(channel, TAIL_SLOT))
            if free > clock:
                st(node, ROOM, ld(node, ROOM) + free - clock)
                clock = free
    return clock


@kernel
def _put(channel: int, tag: int, value: int, at: int) -> None:
    slot = ld(channel, TAIL_SLOT)
    st(ld(channel, TIMES), slot, at)
    st(ld(channel, TAGS), slot, tag)
    values = ld(channel, VALUES)
    if values != 0:
        width = ld(channel, WIDTH)
        if value == 0:
            zero_cells(values + 8 * width * slot, width)
        elif width == 1:
            st(values, slot, ld(value, 0))
        else:
            copy_cells(value, values + 8 * width * slot, width)
    gave(channel, 1)


@kernel
def _put_off(node: int, what: int, which: int, tag: int, latency: int, value: int) -> None:
    count = ld(node, PENDING)
    row = ld(node, BOX) + 8 * ACTION_CELLS * count
    st(row, 0, what)
    st(row, 1, which)
    st(row, 2, tag)
    st(row, 3, latency)
    st(row, 4, ld(node, NOT_BEFORE))
    if what == EMIT:
        width = ld(node, NODE_WIDTH)
        if value == 0:
            zero_cells(ld(node, BOX_VALUES) + 8 * width * count, width)
        else:
            copy_cells(value, ld(node, BOX_VALUES) + 8 * width * count, width)
    st(node, PENDING, count + 1)


@kernel
def pop(node: int, port: int, clock: int) -> None:
    """Take the next token, which must be there and have been ``seen``."""
    if ld(node, PENDING) != 0:
        _put_off(node, POP, port, 0, 0, 0)
    else:
        _pop(ld(ld(node, INS), port), clock)


@kernel
def reserve(node: int, first: int, count: int, clock: int) -> int:
    """Wait until ``count`` outputs from ``first`` on have room. Returns the clock."""
    if ld(node, PENDING) == 0 and _room(node, first, count):
        return _freed(node, first, count, clock)
    _put_off(node, RESERVE, first, count, 0, 0)
    return clock


@kernel
def emit(node: int, port: int, tag: int, value: int, latency: int, clock: int) -> None:
    """Put a token out, for which room is reserved. ``value``: its address, or 0. Control tokens ignore ``latency``."""
    channel = ld(ld(node, OUTS), port)
    if channel == 0:
        return
    if tag < 0:
        latency = ld(node, CONTROL)
    if ld(node, PENDING) == 0:
        _put(channel, tag, value, max(clock + latency, ld(node, NOT_BEFORE)))
    else:
        _put_off(node, EMIT, port, tag, latency, value)


@kernel
def put(node: int, port: int, tag: int, value: int, latency: int, clock: int) -> int:
    """Reserve room for one token and put it out. Returns the clock."""
    clock = reserve(node, port, 1, clock)
    emit(node, port, tag, value, latency, clock)
    return clock


@kernel
def put_both(node: int, first: int, second: int, latency: int, clock: int) -> int:
    """The same for a token on output 0 and one on output 1, neither with a value, in one step."""
    clock = reserve(node, 0, 2, clock)
    emit(node, 0, first, 0, latency, clock)
    emit(node, 1, second, 0, latency, clock)
    return clock


@kernel
def may_write(node: int, store: int) -> bool:
    """Whether a token is there and the store has room for it; if not, the node waits for what is missing."""
    if not ready(node, 0):
        return False
    if ld(store, USED) == ld(store, ROOM_FOR):
        st(node, WAITING, ON_STORE)
        return False
    return True


@kernel
def advance(node: int, cycles: int, clock: int) -> int:
    """Be busy for some cycles. Returns the clock."""
    if ld(node, PENDING) != 0:
        _put_off(node, ADVANCE, cycles, 0, 0, 0)
        return clock
    st(node, BUSY, ld(node, BUSY) + cycles)
    return clock + cycles


@kernel
def finish(node: int, clock: int) -> None:
    """Nothing is left to do but what was put off."""
    st(node, STATE, END)
    st(node, CLOCK, clock)
    if ld(node, PENDING) == 0:
        st(node, WAITING, FINISHED)


@kernel
def fail(node: int, code: int, first: int, second: int) -> None:
    """Stop for good: the streams do not fit. ``run`` says what ``code`` and the two tags mean."""
    st(node, WAITING, FAILED)
    st(node, A, code)
    st(node, B, first)
    st(node, C, second)


@kernel
def resume(node: int) -> bool:
    """Make up for the actions put off, as far as there is room; True when none is left."""
    count = ld(node, PENDING)
    clock = ld(node, CLOCK)
    done = ld(node, DONE_PENDING)
    while done < count:
        row = ld(node, BOX) + 8 * ACTION_CELLS * done
        what = ld(row, 0)
        if what == RESERVE:
            if not _room(node, ld(row, 1), ld(row, 2)):
                break
            clock = _freed(node, ld(row, 1), ld(row, 2), clock)
        elif what == EMIT:
            value = ld(node, BOX_VALUES) + 8 * ld(node, NODE_WIDTH) * done
            _put(ld(ld(node, OUTS), ld(row, 1)), ld(row, 2), value, max(clock + ld(row, 3), ld(row, 4)))
        elif what == POP:
            _pop(ld(ld(node, INS), ld(row, 1)), clock)
        else:
            st(node, BUSY, ld(node, BUSY) + ld(row, 1))
            clock += ld(row, 1)
        done += 1
    st(node, CLOCK, clock)
    if done < count:
        st(node, DONE_PENDING, done)
        return False
    st(node, PENDING, 0)
    st(node, DONE_PENDING, 0)
    return True
