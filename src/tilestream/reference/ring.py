"""A bounded queue: a ring of slots, each with a sequence number, as on the GPU (docs/queues.md)."""

from __future__ import annotations

from torch import Tensor

from tilestream.ir.pipeline import Queue


class Ring:
    """Tile ``t`` lives in slot ``t % depth`` and enters it only after every consumer let go of ``t - depth``."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.depth = queue.depth
        self._turn = list(range(queue.depth))  # the tile that each slot holds, or waits for
        self._held: dict[int, Tensor] = {}
        self._unread: dict[int, set[str]] = {}

    def has_room(self, t: int) -> bool:
        return self.depth > 0 and self._turn[t % self.depth] == t and t not in self._held

    def push(self, t: int, value: Tensor) -> None:
        assert self.has_room(t), f"tile {t} would overwrite tile {t - self.depth}"
        self._held[t] = value
        self._unread[t] = set(self.queue.consumers)

    def holds(self, t: int, consumer: str) -> bool:
        return consumer in self._unread.get(t, ())

    def take(self, t: int, consumer: str) -> Tensor:
        """The tile; its slot is free for ``t + depth`` when the last consumer has taken it."""
        value = self._held[t]
        self._unread[t].remove(consumer)
        if not self._unread[t]:
            del self._held[t], self._unread[t]
            self._turn[t % self.depth] += self.depth
        return value

    @property
    def head(self) -> int:
        """The first tile that some consumer has still to take."""
        return min(self._turn, default=0)

    @property
    def tail(self) -> int:
        """The first tile that is still to be pushed."""
        return min((t + self.depth if t in self._held else t for t in self._turn), default=0)

    def describe(self) -> str:
        q = self.queue
        at = f"; {q.source}" if q.source else ""
        ends = f"{q.producer!r} -> {', '.join(repr(c) for c in q.consumers)}"
        return f"queue of {q.tile!r} {ends} (head {self.head}, tail {self.tail}, depth {self.depth}{at})"
