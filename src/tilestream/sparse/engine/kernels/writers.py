"""Nodes that keep results: write_crd, write_val. See ``sparse.spec.writers``."""

from __future__ import annotations

from tilestream.sparse.engine.cells import copy_cells, ld, st
from tilestream.sparse.engine.jit import kernel
from tilestream.sparse.engine.kernels.levels import MISMATCH
from tilestream.sparse.engine.layout import (
    CLOCK,
    DATA,
    INTERVAL,
    NODE_WIDTH,
    PENDING,
    STORE,
    USED,
    VALUE_WORDS,
    WRITTEN,
    E,
)
from tilestream.sparse.engine.ports import advance, fail, finish, may_write, pop, seen, tag_at, value_at
from tilestream.sparse.engine.stretches import write_stretch
from tilestream.sparse.stream.tokens import DONE, EMPTY, S0


@kernel
def write_crd(node: int) -> None:
    """E: whether the token before was a stop."""
    clock = ld(node, CLOCK)
    interval, store = ld(node, INTERVAL), ld(node, STORE)
    before = ld(store, USED)
    while ld(node, PENDING) == 0:
        clock = write_stretch(node, False, clock)
        used, stopped = ld(store, USED), ld(node, E) != 0
        if not may_write(node, store):
            break
        clock = seen(node, 0, clock)
        tag = tag_at(node, 0)
        if tag == EMPTY:
            fail(node, MISMATCH, tag, tag)
            break
        pop(node, 0, clock)
        if tag == DONE:
            finish(node, clock)
            break
        st(ld(store, DATA), used, tag)
        st(store, USED, used + 1)
        if tag > S0 or not stopped:
            clock = advance(node, interval, clock)
        st(node, E, 1 if tag <= S0 else 0)
    st(node, WRITTEN, ld(node, WRITTEN) + ld(store, USED) - before)
    st(node, CLOCK, clock)


@kernel
def write_val(node: int) -> None:
    """Values only; the last cycle is for the memory."""
    clock = ld(node, CLOCK)
    interval, store, width = ld(node, INTERVAL), ld(node, STORE), ld(node, NODE_WIDTH)
    before = ld(store, USED)
    while ld(node, PENDING) == 0:
        clock = write_stretch(node, True, clock)
        used = ld(store, USED)
        if not may_write(node, store):
            break
        clock = seen(node, 0, clock)
        tag = tag_at(node, 0)
        if tag >= EMPTY:
            copy_cells(value_at(node, 0), ld(store, DATA) + 8 * width * used, width)
            st(store, USED, used + 1)
        pop(node, 0, clock)
        if tag == DONE or tag >= EMPTY:
            clock = advance(node, interval, clock)
        if tag == DONE:
            finish(node, clock)
            break
    st(node, WRITTEN, ld(node, WRITTEN) + (ld(store, USED) - before) * ld(node, VALUE_WORDS))
    st(node, CLOCK, clock)
