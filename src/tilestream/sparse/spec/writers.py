"""Nodes that keep results: one level's coordinates, or the values."""

from __future__ import annotations

from tilestream.sparse.spec.clock import Clock, Steps
from tilestream.sparse.spec.levels import WORD
from tilestream.sparse.stream.tokens import DONE, EMPTY, is_stop


def write_crd(node: Clock) -> Steps:
    """Coordinates and where fibers end. A stop right after a stop costs no cycle."""
    stopped = False
    while True:
        token = yield from node.take("crd")
        if token.tag == DONE:
            return
        if token.tag == EMPTY:
            raise node.mismatch(token)
        node.words.append(token.tag)
        node.bytes_written += WORD
        if not (is_stop(token.tag) and stopped):
            node.step()
        stopped = is_stop(token.tag)


def write_val(node: Clock) -> Steps:
    """Values; N is 0. Stops cost nothing, and the last cycle is for the memory."""
    while True:
        token = yield from node.take("val")
        if token.tag == DONE:
            node.step()
            return
        if token.tag >= EMPTY:
            node.values.append(token.value)
            node.bytes_written += WORD * node.block**2
            node.step()
