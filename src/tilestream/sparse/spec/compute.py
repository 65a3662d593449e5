"""Nodes that compute: arithmetic, reduction, and sparse accumulation of any order."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from tilestream.errors import SparseError
from tilestream.sparse.spec.arithmetic import BINARY, REDUCE, UNARY
from tilestream.sparse.spec.clock import Clock, Steps, Token, nothing
from tilestream.sparse.stream.tokens import DONE, EMPTY, is_stop, stop, stop_level


def alu(node: Clock) -> Steps:
    """An operation on each element; N counts as 0. Two inputs have to have one structure."""
    op, block = str(node.node.attr("op")), node.block
    unary = bool(node.node.attr("unary"))
    table: dict[str, Callable[..., Any]] = UNARY if unary else BINARY
    if op not in table:
        raise SparseError(f"node {node.node.name!r} has operation {op!r}", f"use one of: {', '.join(table)}")
    apply, zero = table[op], nothing(block)
    scalar = float(node.node.attr("scalar", 0.0) or 0.0)
    cost = 2 * block**3 if op in ("matmul", "matmul_t") and block > 1 else block**2
    while True:
        tokens = []
        for port in ("a",) if unary else ("a", "b"):
            tokens.append((yield from node.take(port)))
        if all(x.tag >= EMPTY for x in tokens):
            values = [x.value if x.tag >= 0 else zero for x in tokens]
            with np.errstate(all="ignore"):
                value = apply(values[0], scalar if unary else values[1])
            node.flops += cost
            yield from node.put(("val", 0, value))
        elif tokens[0].tag == tokens[-1].tag:
            yield from node.put(("val", tokens[0].tag, zero))
            if tokens[0].tag == DONE:
                return
        else:
            raise node.mismatch(*tokens)
        node.step()


def reduce(node: Clock) -> Steps:
    """One value a fiber: at Sn, the value, then S(n-1) if n > 0, in one step (in two as SAM times it). N is 0 and
    costs no cycle.

    An empty fiber gives 0, or -inf as a maximum. A bare S1 may be an element whose fiber is empty, or no element;
    this node takes it as the former. Where the latter can be, use ``spacc`` of order 0, which is told.
    """
    fold = _Fold(node)
    while True:
        token = yield from node.take("val")
        if token.tag == EMPTY:
            fold.add((), fold.zero)
            continue
        if token.tag == DONE:
            yield from node.put(("val", DONE, fold.zero))
            return
        if token.tag >= 0:
            fold.add((), token.value)
        else:
            yield from node.put(("val", 0, fold.sums.get((), fold.none)))
            fold.sums.clear()
            if stop_level(token.tag):
                if node.timing.style == "sam":
                    node.step()
                yield from node.put(("val", stop(stop_level(token.tag) - 1), fold.zero))
        node.step()


def spacc(node: Clock) -> Steps:
    """Sums the fibers under each coordinate of the reduced level, by the coordinates below it.

    Order n: ``crdn`` is the reduced level, ``crd0`` the innermost one, of which ``val`` has the structure. When
    ``crdn``'s fiber ends in Sm, the sums come out in order of coordinates, all at one time: ``crd(n-1)`` ends in Sm,
    the next one in S(m+1), and so on. Order 0 is ``reduce`` with ``crd0`` the level above ``val``, which says how many
    fibers there are.
    """
    order = int(node.node.attr("order", 0) or 0)
    if len(node.many("crd")) != order + 1:
        raise node.wrong(f"order {order} takes {order + 1} coordinate streams, not {len(node.many('crd'))}")
    if order == 0:
        yield from _reduce_by(node)
        return
    fold = _Fold(node)
    reduced = f"crd{order}"
    while True:
        outer = yield from node.look(reduced)
        if outer.tag >= 0:
            end = yield from _gather(node, fold, order - 1, ())
            yield from node.take(reduced)
            if end == stop(0):
                continue
            outer = yield from node.look(reduced)
            if outer.tag != stop(stop_level(end) - 1):
                raise node.mismatch(outer, Token(end, 0.0, 0))
            for port in [*(f"crd{i}" for i in range(order)), "val"]:
                yield from node.look(port)  # the released code does: sums leave when the next fiber comes
        elif is_stop(outer.tag):
            yield from _bare(node, order - 1, stop_level(outer.tag) + 1)
        else:
            ends = []
            for port in [*node.many("crd"), "val"]:
                ends.append((yield from node.take(port)))
            if any(x.tag != DONE for x in ends):
                raise node.mismatch(*ends)
            ports = [f"crd{i}" for i in range(order)]
            yield from node.put(*((p, DONE, 0.0) for p in ports), ("val", DONE, fold.zero))
            return
        yield from node.take(reduced)
        yield from _emit(node, fold, stop_level(outer.tag))
        fold.sums.clear()
        node.step()


def _gather(node: Clock, fold: _Fold, depth: int, path: tuple[int, ...]) -> Generator[None, None, int]:
    """Take one fiber of ``crd<depth>`` and all below it into the sums; returns the stop that ended it."""
    port = f"crd{depth}"
    while True:
        head = yield from node.look(port)
        if depth == 0:
            value = yield from node.look("val")
            yield from node.take(port)
            yield from node.take("val")
            if head.tag >= 0 and value.tag >= EMPTY:
                fold.add((*path, head.tag), value.value if value.tag >= 0 else fold.zero)
            elif head.tag != value.tag or not is_stop(head.tag):
                raise node.mismatch(head, value)
            node.step()
            if head.tag < 0:
                return head.tag
        elif head.tag >= 0:
            end = yield from _gather(node, fold, depth - 1, (*path, head.tag))
            yield from node.take(port)
            if end == stop(0):
                continue
            after = yield from node.take(port)
            if after.tag != stop(stop_level(end) - 1):
                raise node.mismatch(after, Token(end, 0.0, 0))
            if node.timing.style != "sam":  # its points have no stops of outer levels
                node.step()
            return after.tag
        elif is_stop(head.tag):
            yield from _bare(node, depth - 1, stop_level(head.tag) + 1)
            yield from node.take(port)
            node.step()
            return head.tag
        else:
            raise node.mismatch(head)


def _bare(node: Clock, depth: int, level: int) -> Steps:
    """Take the stops that an empty fiber has at ``crd<depth>`` and below."""
    for i in range(depth, -1, -1):
        for port in (f"crd{i}", "val") if i == 0 else (f"crd{i}",):
            token = yield from node.take(port)
            if token.tag != stop(level + depth - i):
                raise node.mismatch(Token(stop(level + depth - i), 0.0, 0), token)


def _emit(node: Clock, fold: _Fold, end: int) -> Steps:
    """Put out the sums in order of coordinates, outermost first; the outermost fiber ends in S<end>."""
    last: tuple[int, ...] | None = None
    for key in sorted(fold.sums):
        order = len(key)
        first = 0
        if last is not None:
            first = next(i for i in range(order) if key[i] != last[i])
            if first < order - 1:
                yield from node.put(*_ends(fold, order, first + 1, 0))
        crds = [(f"crd{order - 1 - i}", key[i], 0.0) for i in range(first, order)]
        yield from node.put(*crds, ("val", 0, fold.sums[key]))
        last = key
    yield from node.put(*_ends(fold, int(node.node.attr("order", 0) or 0), 0, end))


def _ends(fold: _Fold, order: int, first: int, level: int) -> list[tuple[str, int, Any]]:
    """Stops of the levels from ``first`` (0: outermost) inwards, of which the first is S<level>."""
    ends: list[tuple[str, int, Any]] = [
        (f"crd{order - 1 - i}", stop(level + i - first), 0.0) for i in range(first, order)
    ]
    return [*ends, ("val", stop(level + order - 1 - first), fold.zero)]


def _reduce_by(node: Clock) -> Steps:
    fold = _Fold(node)
    while True:
        crd = yield from node.look("crd0")
        if crd.tag < EMPTY:
            value = yield from node.take("val")
            yield from node.take("crd0")
            if value.tag != (DONE if crd.tag == DONE else stop(stop_level(crd.tag) + 1)):
                raise node.mismatch(crd, value)
            yield from node.put(("val", crd.tag, fold.zero))
            if crd.tag == DONE:
                return
            node.step()
            continue
        while not is_stop((value := (yield from node.take("val"))).tag):
            if value.tag == DONE:
                raise node.mismatch(crd, value)
            fold.add((), value.value if value.tag >= 0 else fold.zero)
            if value.tag >= 0:
                node.step()
        yield from node.take("crd0")
        yield from node.put(("val", 0, fold.sums.get((), fold.none)))
        fold.sums.clear()
        if stop_level(value.tag):
            after = yield from node.take("crd0")
            if after.tag != stop(stop_level(value.tag) - 1):
                raise node.mismatch(after, value)
            if node.timing.style == "sam":
                node.step()
            yield from node.put(("val", after.tag, fold.zero))
        node.step()


class _Fold:
    """Sums (or maxima) by coordinates, in the order in which values come."""

    def __init__(self, node: Clock) -> None:
        self.op = str(node.node.attr("op", "add"))
        if self.op not in REDUCE:
            raise SparseError(f"node {node.node.name!r} reduces by {self.op!r}", f"use one of: {', '.join(REDUCE)}")
        self.node, self.zero = node, nothing(node.block)
        self.fold, none = REDUCE[self.op]
        self.none = self.zero + none
        self.sums: dict[tuple[int, ...], Any] = {}

    def add(self, key: tuple[int, ...], value: Any) -> None:
        self.sums[key] = self.fold(self.sums[key], value) if key in self.sums else value
        self.node.flops += self.node.block**2
