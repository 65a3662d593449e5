"""The sums of a sparse accumulator: a hash table from packed coordinates to values, and its keys in order.

The innermost coordinate is in the lowest bits of a key, so that keys sort as coordinates do. With one coordinate the
hash is the coordinate itself: a table as large as the range of coordinates is then a plain array.
"""

from __future__ import annotations

from tilestream.sparse.engine.cells import ld, st
from tilestream.sparse.engine.jit import kernel

FREE = -1
"""Key of a slot that holds nothing."""

_SPREAD = -7046029254386353131  # 2**64 / golden ratio, as int64


@kernel
def find(keys: int, mask: int, key: int, packed: bool) -> int:
    """The slot of a key, or the free one where it belongs."""
    slot = key
    if packed:
        slot = key * _SPREAD
        slot ^= slot >> 29
    slot &= mask
    while True:
        there = ld(keys, slot)
        if there == key or there == FREE:
            return slot
        slot = (slot + 1) & mask


@kernel
def _merge(source: int, target: int, begin: int, middle: int, end: int) -> None:
    left, right = begin, middle
    for at in range(begin, end):
        if right >= end or (left < middle and ld(source, left) <= ld(source, right)):
            st(target, at, ld(source, left))
            left += 1
        else:
            st(target, at, ld(source, right))
            right += 1


@kernel
def _run(keys: int, begin: int, count: int) -> int:
    """Where the ascending run that starts at ``begin`` ends."""
    end = begin + 1
    while end < count and ld(keys, end - 1) <= ld(keys, end):
        end += 1
    return min(end, count)


@kernel
def sort(keys: int, spare: int, count: int) -> int:
    """Sort by merging ascending runs, of which fibers leave few; returns which of the two arrays has the result."""
    while _run(keys, 0, count) < count:
        begin = 0
        while begin < count:
            middle = _run(keys, begin, count)
            end = _run(keys, middle, count) if middle < count else count
            _merge(keys, spare, begin, middle, end)
            begin = end
        keys, spare = spare, keys
    return keys
