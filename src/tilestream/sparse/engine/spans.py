"""Tokens and slots that lie in a row, for loops that do many steps at once (``stretches``)."""

from __future__ import annotations

from tilestream.sparse.engine.cells import ld, st
from tilestream.sparse.engine.jit import kernel
from tilestream.sparse.engine.layout import (
    BUSY,
    CAPACITY,
    HEAD,
    HEAD_SLOT,
    INTERVAL,
    PLAIN,
    ROOM,
    START,
    TAIL,
    TAIL_SLOT,
)

FEW = 4
"""Tokens below which a loop of their own does not pay."""


@kernel
def waiting(channel: int) -> int:
    """Unread tokens in a row."""
    return min(ld(channel, TAIL) - ld(channel, HEAD), ld(channel, CAPACITY) - ld(channel, HEAD_SLOT))


@kernel
def room(channel: int) -> int:
    """Free slots in a row."""
    free = ld(channel, CAPACITY) - (ld(channel, TAIL) - ld(channel, HEAD))
    return min(free, ld(channel, CAPACITY) - ld(channel, TAIL_SLOT))


@kernel
def head_of(channel: int, cell: int) -> int:
    """Address of the next token's tag or time."""
    return ld(channel, cell) + 8 * ld(channel, HEAD_SLOT)


@kernel
def tail_of(channel: int, cell: int) -> int:
    return ld(channel, cell) + 8 * ld(channel, TAIL_SLOT)


@kernel
def took(channel: int, count: int) -> None:
    st(channel, HEAD, ld(channel, HEAD) + count)
    slot = ld(channel, HEAD_SLOT) + count
    st(channel, HEAD_SLOT, 0 if slot == ld(channel, CAPACITY) else slot)


@kernel
def gave(channel: int, count: int) -> None:
    st(channel, TAIL, ld(channel, TAIL) + count)
    slot = ld(channel, TAIL_SLOT) + count
    st(channel, TAIL_SLOT, 0 if slot == ld(channel, CAPACITY) else slot)


@kernel
def was_busy(node: int, steps: int) -> None:
    st(node, BUSY, ld(node, BUSY) + steps * ld(node, INTERVAL))


@kernel
def plain(node: int) -> bool:
    return ld(node, PLAIN) != 0 and ld(node, START) >= 0


@kernel
def answer(response: int, times: int, i: int, clock: int) -> None:
    """Token ``i`` of a span was taken: leave the time at which its writer knows. ``response``: of the channel."""
    if response >= 0:
        st(times, i, clock + response)


@kernel
def came(response: int, times: int, i: int, clock: int) -> int:
    """The clock once token ``i`` of a span has come; it is taken at once, and answered."""
    clock = max(clock, ld(times, i))
    answer(response, times, i, clock)
    return clock


@kernel
def free_at(response: int, times: int, i: int, clock: int) -> int:
    """The clock once slot ``i`` of a span is known to be free: the time in the slot, where there is a bound."""
    return max(clock, ld(times, i)) if response >= 0 else clock


@kernel
def had_no_room(node: int, cycles: int) -> None:
    st(node, ROOM, ld(node, ROOM) + cycles)


@kernel
def moved(node: int, source: int, target: int, count: int, waited: int) -> None:
    """So many tokens went from one channel to another, a step each; for ``waited`` cycles in all there was no room."""
    took(source, count)
    gave(target, count)
    had_no_room(node, waited)
    was_busy(node, count)
