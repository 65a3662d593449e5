"""Channels and local clocks: how nodes wait for each other, and what the waiting costs (DAM)."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

import numpy as np

from tilestream.errors import SparseError
from tilestream.sparse.storage import Level, SparseTensor
from tilestream.sparse.stream.graph import Node
from tilestream.sparse.stream.result import NodeStats
from tilestream.sparse.stream.tokens import show
from tilestream.sparse.timing import CONTROL_LATENCY, Timing

Steps = Generator[None, None, None]
"""A running node: it yields whenever it has to wait for another."""


class Token(NamedTuple):
    """``tag`` as ``stream.tokens`` encodes it, the value (0.0 where there is none), and the cycle it arrives at."""

    tag: int
    value: Any
    time: int


class Channel:
    """A stream on its way from its writer to its reader: first in, first out, of ``depth`` slots (None: no bound)."""

    def __init__(self, writer: str, reader: str, depth: int | None = None, trace: bool = False) -> None:
        self.writer, self.reader, self.depth = writer, reader, depth
        self.tokens: deque[Token] = deque()
        self.free: deque[int] = deque([0] * (depth or 0))  # from which cycle each free slot may be used
        self.trace: list[Token] | None = [] if trace else None
        self.put_count = self.take_count = 0


class Clock:
    """One node at work: its ports, its local time and what it did."""

    def __init__(
        self,
        node: Node,
        ins: Mapping[str, Channel],
        outs: Mapping[str, Channel | None],
        tensor: SparseTensor | None,
        timing: Timing,
        block: int,
    ) -> None:
        self.node, self.ins, self.outs, self.tensor, self.block = node, dict(ins), dict(outs), tensor, block
        self.timing = timing
        op = "unary" if node.attr("unary") else str(node.attr("op", ""))
        kind = "reduce" if node.kind == "spacc" and not node.attr("order") else node.kind
        self.interval, self.latency = timing.of(kind, op, block)
        self.t = self.busy = self.wait_input = self.wait_room = 0
        self.flops = self.bytes_read = self.bytes_written = 0
        self.first: int | None = 0 if not ins else None
        self.blocked: tuple[str, Channel] | None = None
        self.words: list[int] = []  # of a writer: the tags that came
        self.values: list[Any] = []  # of a value writer
        self.zero = nothing(block)

    def many(self, stem: str) -> list[str]:
        """The ports ``stem0``, ``stem1``, ... that are joined to something."""
        return sorted((p for p in self.ins if p.rstrip("0123456789") == stem and p != stem), key=_number)

    def look(self, port: str) -> Generator[None, None, Token]:
        """The next token of a stream, which stays there."""
        channel = self.ins[port]
        while not channel.tokens:
            self.blocked = ("input", channel)
            yield
        self.blocked = None
        token = channel.tokens[0]
        if token.time > self.t:
            self.wait_input += token.time - self.t
            self.t = token.time
        if self.first is None:
            self.first = self.t
        return token

    def take(self, port: str) -> Generator[None, None, Token]:
        """The next token of a stream. Its slot is free again a response latency later."""
        token = yield from self.look(port)
        channel = self.ins[port]
        channel.tokens.popleft()
        channel.take_count += 1
        if channel.depth is not None:
            channel.free.append(self.t + self.timing.response_latency)
        return token

    def put(self, *tokens: tuple[str, int, Any]) -> Steps:
        """Put (port, tag, value) tokens out, at once: wait until all of their streams have room."""
        for port, _, _ in tokens:
            channel = self.outs[port]
            if channel is None or channel.depth is None:
                continue
            while not channel.free:
                self.blocked = ("room", channel)
                yield
            self.blocked = None
            at = channel.free.popleft()
            if at > self.t:
                self.wait_room += at - self.t
                self.t = at
        for port, tag, value in tokens:
            channel = self.outs[port]
            if channel is None:
                continue  # nobody reads this stream
            latency = self.latency if tag >= 0 else CONTROL_LATENCY
            kept = value if tag >= 0 else self.zero
            token = Token(tag, kept, self.t + max(latency, self.timing.channel_latency))
            channel.tokens.append(token)
            channel.put_count += 1
            if channel.trace is not None:
                channel.trace.append(token)

    def step(self) -> None:
        """The initiation interval of what was just done."""
        self.t += self.interval
        self.busy += self.interval

    @property
    def level(self) -> Level:
        """The level of a tensor that this node works on."""
        assert self.tensor is not None
        return self.tensor.levels[int(self.node.attr("level", 0) or 0)]

    def wrong(self, what: str) -> SparseError:
        """An error that names this node and the user's line."""
        where = f" ({self.node.source})" if self.node.source else ""
        return SparseError(
            f"{self.node.kind} {self.node.name!r}{where}: {what}",
            "its input streams have to have one structure; check what feeds it",
        )

    def mismatch(self, *tokens: Token) -> SparseError:
        return self.wrong(f"tokens {' and '.join(show(x.tag) for x in tokens)} met")

    def stats(self) -> NodeStats:
        """Figures of this node, once it is done."""
        return NodeStats(
            name=self.node.name,
            kind=self.node.kind,
            tokens_in=sum(c.take_count for c in self.ins.values()),
            tokens_out=sum(c.put_count for c in self.outs.values() if c),
            start_cycle=self.first or 0,
            end_cycle=self.t,
            busy=self.busy,
            wait_input=self.wait_input,
            wait_room=self.wait_room,
            flops=self.flops,
            bytes_read=self.bytes_read,
            bytes_written=self.bytes_written,
        )


def nothing(block: int) -> Any:
    """The value zero: a float, or a [block, block] tile."""
    return 0.0 if block == 1 else np.zeros((block, block))


def _number(port: str) -> int:
    return int(port[len(port.rstrip("0123456789")) :])
