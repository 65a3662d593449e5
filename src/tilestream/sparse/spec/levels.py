"""Nodes that read tensors: where iteration begins, level scanners, locate, and arrays of values."""

from __future__ import annotations

from tilestream.sparse.spec.clock import Clock, Steps, nothing
from tilestream.sparse.stream.tokens import DONE, EMPTY, is_stop, stop, stop_level

WORD = 4
"""Bytes of a value, a coordinate or a segment bound."""


def root(node: Clock) -> Steps:
    """``0, D``."""
    for tag in (0, DONE):
        yield from node.put(("ref", tag, 0.0))
        node.step()


def scan(node: Clock) -> Steps:
    """The coordinates of each fiber, and where their children are.

    A reference gives its fiber and a stop: S0, or S(n+1) where Sn follows, which it takes too. N is an operand that
    a union does not have: an empty fiber. A bare Sn (an outer fiber that is empty) gives S(n+1).
    """
    level = node.level
    while True:
        ref = yield from node.take("ref")
        if ref.tag == DONE:
            yield from node.put(("crd", DONE, 0.0), ("ref", DONE, 0.0))
            return
        end = ref.tag
        if ref.tag >= 0 or ref.tag == EMPTY:
            for crd, child in _fiber(node, level, ref.tag):
                yield from node.put(("crd", crd, 0.0), ("ref", child, 0.0))
                node.step()
            end = (yield from node.look("ref")).tag
            if is_stop(end):
                yield from node.take("ref")
        after = stop(stop_level(end) + 1) if is_stop(end) else stop(0)
        yield from node.put(("crd", after, 0.0), ("ref", after, 0.0))
        node.step()


def _fiber(node: Clock, level, ref: int) -> list[tuple[int, int]]:
    if ref == EMPTY:
        return []
    if level.seg is None:
        return [(crd, ref * level.size + crd) for crd in range(level.size)]
    begin, end = int(level.seg[ref]), int(level.seg[ref + 1])
    node.bytes_read += WORD * (2 + end - begin)
    return [(int(level.crd[at]), at) for at in range(begin, end)]


def locate(node: Clock) -> Steps:
    """The child of coordinate ``crd`` in the dense fiber ``ref``; both streams have one shape. N where either is."""
    size = node.level.size
    if node.level.compressed:
        raise node.wrong("it works on a dense level, and this one is compressed")
    while True:
        crd = yield from node.take("crd")
        ref = yield from node.take("ref")
        if crd.tag >= 0 and ref.tag >= 0:
            if crd.tag >= size:
                raise node.wrong(f"coordinate {crd.tag} in a level of {size}")
            child = ref.tag * size + crd.tag
        elif EMPTY in (crd.tag, ref.tag) and min(crd.tag, ref.tag) >= EMPTY:
            child = EMPTY
        elif crd.tag == ref.tag:
            child = crd.tag
        else:
            raise node.mismatch(crd, ref)
        yield from node.put(("crd", crd.tag, 0.0), ("ref", child, 0.0))
        if child == DONE:
            return
        node.step()


def array(node: Clock) -> Steps:
    """Values by reference; 0 for N."""
    assert node.tensor is not None
    values, zero = node.tensor.values, nothing(node.block)
    while True:
        ref = yield from node.take("ref")
        if ref.tag >= 0:
            node.bytes_read += WORD * node.block**2
            value = values[ref.tag] if node.block > 1 else float(values[ref.tag])
            yield from node.put(("val", 0, value))
        elif ref.tag == EMPTY:
            yield from node.put(("val", 0, zero))
        else:
            yield from node.put(("val", ref.tag, zero))
        if ref.tag == DONE:
            return
        node.step()
