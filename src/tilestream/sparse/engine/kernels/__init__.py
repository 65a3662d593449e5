"""One compiled kernel a kind of node: each runs its node until it has to wait, as the specification says."""

from __future__ import annotations

from tilestream.sparse.engine.cells import ld, st
from tilestream.sparse.engine.jit import kernel
from tilestream.sparse.engine.kernels.accumulate import spacc
from tilestream.sparse.engine.kernels.clients import (
    array_by_lines,
    array_in_batches,
    scan_from_memory,
    write_to_memory,
)
from tilestream.sparse.engine.kernels.joiners import intersect, union
from tilestream.sparse.engine.kernels.levels import array, locate, root, scan
from tilestream.sparse.engine.kernels.parallel import broadcast, fork, join_ordered, join_unordered
from tilestream.sparse.engine.kernels.repeats import crd_drop, crd_hold, repeat, repsig, val_drop
from tilestream.sparse.engine.kernels.values import alu, reduce, reduce_by
from tilestream.sparse.engine.kernels.writers import write_crd, write_val
from tilestream.sparse.engine.layout import FINISHED, KIND, STATE, WAITING
from tilestream.sparse.engine.ports import END

KINDS: tuple[str, ...] = tuple(
    "root scan repsig repeat intersect union locate array alu reduce reduce_by spacc crd_drop crd_hold fork "
    "join_unordered join_ordered broadcast write_crd write_val "
    "scan_from_memory array_in_batches array_by_lines write_to_memory val_drop".split()
)
"""Kernels by number. A graph's ``spacc`` of order 0 is ``reduce_by``, its ``join`` one of two."""


@kernel
def call(node: int) -> None:
    """Run a node's kernel."""
    if ld(node, STATE) == END:
        st(node, WAITING, FINISHED)
        return
    kind = ld(node, KIND)
    if kind == 0:
        root(node)
    elif kind == 1:
        scan(node)
    elif kind == 2:
        repsig(node)
    elif kind == 3:
        repeat(node)
    elif kind == 4:
        intersect(node)
    elif kind == 5:
        union(node)
    elif kind == 6:
        locate(node)
    elif kind == 7:
        array(node)
    elif kind == 8:
        alu(node)
    elif kind == 9:
        reduce(node)
    elif kind == 10:
        reduce_by(node)
    elif kind == 11:
        spacc(node)
    elif kind == 12:
        crd_drop(node)
    elif kind == 13:
        crd_hold(node)
    elif kind == 14:
        fork(node)
    elif kind == 15:
        join_unordered(node)
    elif kind == 16:
        join_ordered(node)
    elif kind == 17:
        broadcast(node)
    elif kind == 18:
        write_crd(node)
    elif kind == 19:
        write_val(node)
    elif kind == 20:
        scan_from_memory(node)
    elif kind == 21:
        array_in_batches(node)
    elif kind == 22:
        array_by_lines(node)
    elif kind == 23:
        write_to_memory(node)
    else:
        val_drop(node)
