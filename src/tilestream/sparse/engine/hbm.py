"""The memory: requests in order of time, channels, bursts, a scratchpad. ``sparse.memory`` says what they mean."""

from __future__ import annotations

from tilestream.sparse.engine.cells import ld, st
from tilestream.sparse.engine.jit import kernel
from tilestream.sparse.engine.layout import (
    ASK_ADDRESS,
    ASK_WORDS,
    ASK_WRITE,
    CHANNELS,
    CLOCK,
    COST,
    CYCLE,
    DELAY,
    FLIGHT,
    FLIGHTS,
    FREE_FROM,
    HIT_DELAY,
    HITS,
    IN_CYCLE,
    LAST,
    LINE_WORDS,
    LINES,
    MEM,
    MEMORY,
    MODE,
    NODE_INDEX,
    OFFSET,
    ON_MEMORY,
    OUTSTANDING,
    REPLY,
    SETS,
    SIMPLE,
    STAMPS,
    TRANSFERS,
    USES,
    WAITERS,
    WAITING,
    WAITING_COUNT,
    WAYS,
)

PART = 256
"""Times of channels are kept in this part of a cycle, so that a transfer may take a fraction of one."""


@kernel
def ask(node: int, address: int, words: int, write: int, clock: int) -> None:
    """Send a request; the kernel has to return, and finds when it was served in ``REPLY`` when it is called again."""
    memory = ld(node, MEM)
    st(node, CLOCK, clock)
    st(node, ASK_ADDRESS, address)
    st(node, ASK_WORDS, words)
    st(node, ASK_WRITE, write)
    st(node, WAITING, ON_MEMORY)
    count = ld(memory, WAITING_COUNT)
    st(ld(memory, WAITERS), count, node)
    st(memory, WAITING_COUNT, count + 1)


@kernel
def wait_for(node: int, time: int, clock: int) -> int:
    """Wait for memory until ``time``. Returns the clock."""
    if time <= clock:
        return clock
    st(node, MEMORY, ld(node, MEMORY) + time - clock)
    return time


@kernel
def may_fly(node: int, clock: int) -> int:
    """Wait until one request more may be in flight. Returns the clock."""
    most = ld(ld(node, MEM), OUTSTANDING)
    count = ld(node, FLIGHTS)
    if count < most:
        return clock
    return wait_for(node, ld(ld(node, FLIGHT), count % most), clock)


@kernel
def flies(node: int) -> None:
    """The request that was served is in flight until its reply's time."""
    count = ld(node, FLIGHTS)
    st(ld(node, FLIGHT), count % ld(ld(node, MEM), OUTSTANDING), ld(node, REPLY))
    st(node, FLIGHTS, count + 1)


@kernel
def earliest(memory: int) -> int:
    """Which waiting node is served next, as a place in the list: the one that asked first, ties in order of nodes."""
    waiters = ld(memory, WAITERS)
    best = 0
    for i in range(1, ld(memory, WAITING_COUNT)):
        node, other = ld(waiters, i), ld(waiters, best)
        time, least = ld(node, CLOCK), ld(other, CLOCK)
        if time < least or (time == least and ld(node, NODE_INDEX) < ld(other, NODE_INDEX)):
            best = i
    return best


@kernel
def serve(memory: int, place: int) -> int:
    """Serve a waiting node, which leaves the list; returns it."""
    waiters, last = ld(memory, WAITERS), ld(memory, WAITING_COUNT) - 1
    node = ld(waiters, place)
    st(waiters, place, ld(waiters, last))
    st(memory, WAITING_COUNT, last)
    clock = ld(node, CLOCK)
    reply = _simple(memory, node, clock) if ld(memory, MODE) == SIMPLE else _bursts(memory, node, clock)
    st(node, REPLY, reply)
    if reply > ld(memory, LAST):
        st(memory, LAST, reply)
    return node


@kernel
def _simple(memory: int, node: int, clock: int) -> int:
    """A cycle to the dispatcher, which deals the words of each cycle to channels; one to the channel; one back."""
    channels, free = ld(memory, CHANNELS), ld(memory, FREE_FROM)
    cycle = clock + 1
    if ld(memory, CYCLE) != cycle:
        st(memory, OFFSET, (ld(memory, OFFSET) + ld(memory, IN_CYCLE)) % channels)
        st(memory, IN_CYCLE, 0)
        st(memory, CYCLE, cycle)
    reply = clock
    for _ in range(ld(node, ASK_WORDS)):
        channel = (ld(memory, OFFSET) + ld(memory, IN_CYCLE)) % channels
        st(memory, OFFSET, channel)
        st(memory, IN_CYCLE, ld(memory, IN_CYCLE) + 1)
        start = max(ld(free, channel), PART * (cycle + 1))
        st(free, channel, start + ld(memory, COST))
        st(memory, TRANSFERS, ld(memory, TRANSFERS) + 1)
        reply = max(reply, (start + PART - 1) // PART + ld(memory, DELAY) + 1)
    return reply


@kernel
def _bursts(memory: int, node: int, clock: int) -> int:
    channels, free, words = ld(memory, CHANNELS), ld(memory, FREE_FROM), ld(memory, LINE_WORDS)
    address = ld(node, ASK_ADDRESS)
    reply = clock
    for line in range(address // words, (address + ld(node, ASK_WORDS) - 1) // words + 1):
        if ld(memory, SETS) > 0 and _in_scratchpad(memory, line, ld(node, ASK_WRITE)):
            st(memory, HITS, ld(memory, HITS) + 1)
            reply = max(reply, clock + ld(memory, HIT_DELAY))
            continue
        channel = line % channels
        end = max(ld(free, channel), PART * clock) + ld(memory, COST)
        st(free, channel, end)
        st(memory, TRANSFERS, ld(memory, TRANSFERS) + 1)
        reply = max(reply, (end + PART - 1) // PART + ld(memory, DELAY))
    return reply


@kernel
def _in_scratchpad(memory: int, line: int, write: int) -> bool:
    """Whether a line is there and serves; a line that is read is there from now on."""
    ways, lines, stamps = ld(memory, WAYS), ld(memory, LINES), ld(memory, STAMPS)
    first = (line % ld(memory, SETS)) * ways
    use = ld(memory, USES) + 1
    st(memory, USES, use)
    oldest = first
    for slot in range(first, first + ways):
        if ld(lines, slot) == line:
            st(stamps, slot, use)
            return write == 0
        if ld(stamps, slot) < ld(stamps, oldest):
            oldest = slot
    if write == 0:
        st(lines, oldest, line)
        st(stamps, oldest, use)
    return False
