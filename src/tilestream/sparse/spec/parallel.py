"""Nodes that copy, deal out and gather streams."""

from __future__ import annotations

from collections.abc import Generator

from tilestream.sparse.spec.clock import Clock, Steps, Token
from tilestream.sparse.stream.tokens import DONE, EMPTY, is_stop, stop, stop_level


def broadcast(node: Clock) -> Steps:
    """One stream to several readers; no initiation interval."""
    while True:
        token = yield from node.take("in")
        yield from node.put(*((port, token.tag, token.value) for port in node.outs))
        if token.tag == DONE:
            return
        node.step()


def fork(node: Clock) -> Steps:
    """Elements dealt round-robin, going on where it was after a stop; stops and done to all."""
    if node.node.attr("level"):
        raise node.wrong("it deals elements, and cannot deal the fibers of a deeper level")
    ways = list(node.outs)
    way = 0
    while True:
        token = yield from node.take("in")
        if token.tag >= EMPTY:
            yield from node.put((ways[way], token.tag, token.value))
            way = (way + 1) % len(ways)
        else:
            yield from node.put(*((port, token.tag, token.value) for port in ways))
        if token.tag == DONE:
            return
        node.step()


def join(node: Clock) -> Steps:
    """What a fork dealt, back in order. ``level`` L (1): the streams have L levels below the element that was dealt.

    A unit is what became of one element: an element at L = 0, else all up to a stop of S(L-1) or higher, which also
    ends the parent fiber in that way. With ``ordered``, the last input is the stream that was dealt: it says how many
    units there are. Without it, every way has to have one at least in each parent fiber.
    """
    level = int(node.node.attr("level", 1) or 0)
    ways = node.many("in")
    if node.node.attr("ordered"):
        yield from _ordered(node, ways[:-1], ways[-1], level)
    elif level == 0:
        yield from _elements(node, ways)
    else:
        yield from _fibers(node, ways, level)


def _elements(node: Clock, ways: list[str]) -> Steps:
    way = 0
    while True:
        token = yield from node.take(ways[way])
        if token.tag >= EMPTY:
            yield from node.put(("out", token.tag, token.value))
            way = (way + 1) % len(ways)
        else:
            yield from _all(node, ways, ways[way], token)
            yield from node.put(("out", token.tag, token.value))
        if token.tag == DONE:
            return
        node.step()


def _all(node: Clock, ways: list[str], had: str, token: Token) -> Steps:
    """Take what every other way has to have too."""
    for port in ways:
        if port != had:
            other = yield from node.take(port)
            if other.tag != token.tag:
                raise node.mismatch(token, other)


def _fibers(node: Clock, ways: list[str], level: int) -> Steps:
    way, ended = 0, set[int]()
    while True:
        token = yield from node.take(ways[way])
        if token.tag == DONE:
            if ended:
                raise node.wrong("the ways end in different parent fibers")
            for port in ways[:way] + ways[way + 1 :]:
                node.step()  # as the released code: a cycle for each way's done
                other = yield from node.take(port)
                if other.tag != DONE:
                    raise node.mismatch(token, other)
            yield from node.put(("out", DONE, token.value))
            return
        end = token.tag
        if is_stop(end) and stop_level(end) >= level - 1:
            if stop_level(end) >= level:
                ended.add(way)
                if len(ended) < len(ways):
                    end = stop(level - 1)
                else:
                    ended.clear()
            way = (way + 1) % len(ways)
            while way in ended:
                way = (way + 1) % len(ways)
        yield from node.put(("out", end, token.value))
        node.step()


def _ordered(node: Clock, ways: list[str], order: str, level: int) -> Steps:
    way = 0
    while True:
        dealt = 0
        head = yield from node.take(order)
        while head.tag >= EMPTY:
            ended = yield from _unit(node, ways[way], level)
            way, dealt = (way + 1) % len(ways), dealt + 1
            head = yield from node.take(order)
            if head.tag >= EMPTY and level:
                # Whether the parent fiber goes on is only now known.
                yield from node.put(("out", stop(level - 1), ended.value))
                node.step()
        end = DONE if head.tag == DONE else stop(stop_level(head.tag) + level)
        busy = {ways[(way - 1 - i) % len(ways)] for i in range(min(dealt, len(ways)))} if level else set()
        for port in ways:
            if port in busy and end != DONE:
                continue  # its last unit ended with this stop
            token = yield from node.take(port)
            if token.tag != end:
                raise node.mismatch(head, token)
        yield from node.put(("out", end, head.value))
        if end == DONE:
            return
        node.step()


def _unit(node: Clock, port: str, level: int) -> Generator[None, None, Token]:
    """Pass one unit on but for the stop that ends it, which is returned."""
    while True:
        token = yield from node.take(port)
        if token.tag == DONE:
            raise node.mismatch(token)
        if level and is_stop(token.tag) and stop_level(token.tag) >= level - 1:
            return token
        yield from node.put(("out", token.tag, token.value))
        node.step()
        if not level:
            return token
