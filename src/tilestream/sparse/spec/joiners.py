"""Intersect and union, of any number of operands: (coordinate, payload) pairs merged by coordinate."""

from __future__ import annotations

from collections.abc import Generator

from tilestream.sparse.spec.clock import Clock, Steps, Token
from tilestream.sparse.stream.tokens import DONE, EMPTY, is_stop


def intersect(node: Clock) -> Steps:
    """Coordinates that all operands have. A step compares one of each, and drops the smallest if they differ."""
    yield from _join(node, union=False)


def union(node: Clock) -> Steps:
    """Coordinates that any operand has; N for the payload of an operand that does not have it."""
    yield from _join(node, union=True)


def _join(node: Clock, union: bool) -> Steps:
    crds, ins = node.many("crd"), node.many("in")
    outs = [f"out{i}" for i in range(len(ins))]
    while True:
        heads = yield from _look(node, crds)
        payloads = yield from _look(node, ins)
        elements = [x.tag for x in heads if x.tag >= 0]
        for head, payload in zip(heads, payloads, strict=True):
            if head.tag < 0 and head.tag != payload.tag or head.tag >= 0 and payload.tag < EMPTY:
                raise node.mismatch(head, payload)
        if not elements:
            if any(x.tag != heads[0].tag for x in heads):
                raise node.mismatch(*heads)
            for port in crds + ins:
                yield from node.take(port)
            end = heads[0].tag
            yield from node.put(("crd", end, 0.0), *((o, end, x.value) for o, x in zip(outs, payloads, strict=True)))
            if end == DONE:
                return
        else:
            if any(x.tag < 0 and not is_stop(x.tag) for x in heads):
                raise node.mismatch(*heads)
            least = min(elements)
            has = [x.tag == least for x in heads]
            for i, port in enumerate(crds):
                if has[i]:
                    yield from node.take(port)
                    yield from node.take(ins[i])
            if union or all(has):
                found = [
                    (outs[i], x.tag, x.value) if has[i] else (outs[i], EMPTY, x.value * 0.0)
                    for i, x in enumerate(payloads)
                ]
                yield from node.put(("crd", least, 0.0), *found)
        node.step()


def _look(node: Clock, ports: list[str]) -> Generator[None, None, list[Token]]:
    heads = []
    for port in ports:
        heads.append((yield from node.look(port)))
    return heads
