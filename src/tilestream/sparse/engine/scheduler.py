"""The loop that lets nodes run: compiled, and indifferent to order.

A node reads and writes in a fixed order and blocks, so tokens and their times do not depend on which node runs when
(a Kahn network, whose writes wait too). A node therefore runs as long as it can, and is called again when the one
channel that it waits for has moved. Memory is different: who comes first at a channel of it matters. So a request
waits until nothing else can run; then the earliest goes, since whatever it sets free happens later than it does.
(Nodes that a ring's size has stopped, not a channel's depth, would be an exception: those that lag behind get room.)
"""

from __future__ import annotations

from tilestream.sparse.engine.cells import copy_cells, ld, st
from tilestream.sparse.engine.hbm import earliest, serve
from tilestream.sparse.engine.jit import kernel
from tilestream.sparse.engine.kernels import call
from tilestream.sparse.engine.layout import (
    CAPACITY,
    CLOCK,
    DATA,
    FAILED,
    FINISHED,
    HEAD,
    INS,
    NINS,
    NODE_CELLS,
    NOUTS,
    ON_INPUT,
    ON_ROOM,
    ON_STORE,
    OUTS,
    PENDING,
    QUEUED,
    READER,
    RESPONSE,
    ROOM_FOR,
    RUNNABLE,
    SEEN_HEAD,
    SEEN_TAIL,
    TAGS,
    TAIL,
    TAIL_SLOT,
    TIMES,
    TRACE,
    USED,
    VALUES,
    WAIT_CHANNEL,
    WAITERS,
    WAITING,
    WAITING_COUNT,
    WIDTH,
    WRITER,
)
from tilestream.sparse.engine.ports import resume

# The row of the queue of runnable nodes; NODES is the address of all nodes' rows, MEMORY_ROW 0 where there is none.
FIRST, COUNT, SIZE, SLOTS, NODES, MEMORY_ROW = 0, 1, 2, 3, 4, 5
QUEUE_CELLS = 6
QUIET, PAUSED, NEEDS_STORE, NEEDS_TRACE, NEEDS_ROOM = 0, 1, 2, 3, 4
"""Why the loop returned: nothing can run; its calls are used up; a growing array is full; a ring is."""


@kernel
def push(queue: int, node: int) -> None:
    """Let a node run, if it is not about to."""
    if ld(node, QUEUED) != 0:
        return
    st(node, QUEUED, 1)
    size = ld(queue, SIZE)
    slot = ld(queue, FIRST) + ld(queue, COUNT)
    st(ld(queue, SLOTS), slot - size if slot >= size else slot, node)
    st(queue, COUNT, ld(queue, COUNT) + 1)


@kernel
def _take(queue: int) -> int:
    first = ld(queue, FIRST)
    node = ld(ld(queue, SLOTS), first)
    first += 1
    st(queue, FIRST, 0 if first == ld(queue, SIZE) else first)
    st(queue, COUNT, ld(queue, COUNT) - 1)
    st(node, QUEUED, 0)
    return node


@kernel
def _wake(queue: int, node: int, why: int, channel: int) -> None:
    if ld(node, WAITING) == why and ld(node, WAIT_CHANNEL) == channel:
        push(queue, node)


@kernel
def _record(channel: int, trace: int) -> bool:
    """Append the tokens written since the last look; False if there is no room for them."""
    seen, tail = ld(channel, SEEN_TAIL), ld(channel, TAIL)
    used = ld(trace, USED)
    if used + tail - seen > ld(trace, ROOM_FOR):
        return False
    width = ld(channel, WIDTH)
    capacity = ld(channel, CAPACITY)
    slot = ld(channel, TAIL_SLOT) - (tail - seen)
    if slot < 0:
        slot += capacity
    for _ in range(tail - seen):
        st(ld(trace, DATA), used, ld(ld(channel, TAGS), slot))
        st(ld(trace, DATA + 1), used, ld(ld(channel, TIMES), slot))
        if ld(channel, VALUES) != 0:
            copy_cells(ld(channel, VALUES) + 8 * width * slot, ld(trace, DATA + 2) + 8 * width * used, width)
        used += 1
        slot += 1
        if slot == capacity:
            slot = 0
    st(trace, USED, used)
    return True


@kernel
def settle(queue: int, node: int) -> bool:
    """Wake those that wait for what this node wrote or read; False if a trace is full."""
    whole = True
    for i in range(ld(node, NOUTS)):
        channel = ld(ld(node, OUTS), i)
        if channel == 0 or ld(channel, TAIL) == ld(channel, SEEN_TAIL):
            continue
        if ld(channel, TRACE) != 0 and not _record(channel, ld(channel, TRACE)):
            whole = False
            continue
        st(channel, SEEN_TAIL, ld(channel, TAIL))
        _wake(queue, ld(channel, READER), ON_INPUT, channel)
    for i in range(ld(node, NINS)):
        channel = ld(ld(node, INS), i)
        if ld(channel, HEAD) != ld(channel, SEEN_HEAD):
            st(channel, SEEN_HEAD, ld(channel, HEAD))
            _wake(queue, ld(channel, WRITER), ON_ROOM, channel)
    return whole


@kernel
def _held_up(queue: int, time: int) -> int:
    """A node whose clock is not past ``time`` and that only the size of an unbounded channel's ring stops; else 0."""
    for i in range(ld(queue, SIZE)):
        node = ld(queue, NODES) + 8 * NODE_CELLS * i
        if ld(node, WAITING) == ON_ROOM and ld(node, CLOCK) <= time and ld(ld(node, WAIT_CHANNEL), RESPONSE) < 0:
            return node
    return 0


@kernel
def run_until_quiet(queue: int, calls: int) -> tuple[int, int]:
    """Let nodes run; returns (why it stopped, the node that needs something).

    ``calls``: how many nodes may be called before it returns with ``PAUSED``, so that the caller can show progress
    and be interrupted.
    """
    memory = ld(queue, MEMORY_ROW)
    while True:
        while ld(queue, COUNT) > 0:
            if calls == 0:
                return PAUSED, 0
            calls -= 1
            node = _take(queue)
            if ld(node, WAITING) == FINISHED:
                continue
            st(node, WAITING, RUNNABLE)
            if ld(node, PENDING) == 0 or resume(node):
                call(node)
            whole = settle(queue, node)
            if ld(node, WAITING) == FAILED:
                return QUIET, node
            if ld(node, WAITING) == ON_STORE:
                return NEEDS_STORE, node
            if not whole:
                return NEEDS_TRACE, node
        if memory == 0 or ld(memory, WAITING_COUNT) == 0:
            return QUIET, 0
        place = earliest(memory)
        held_up = _held_up(queue, ld(ld(ld(memory, WAITERS), place), CLOCK))
        if held_up != 0:
            return NEEDS_ROOM, held_up
        push(queue, serve(memory, place))
