"""Bounded queues (docs/queues.md), and workers that take turns until all are done or each waits for a queue."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from itertools import count
from typing import NamedTuple

from torch import Tensor

from tilestream.errors import PipelineDeadlock
from tilestream.ir.pipeline import Queue


class Ring:
    """Tiles that were pushed, by keys, and which consumers have still to take each."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.unread: dict[Hashable, set[str]] = {}

    def holds(self, key: Hashable, consumer: str) -> bool:
        return consumer in self.unread.get(key, ())

    def pushed(self, key: Hashable) -> None:
        self.unread[key] = set(self.queue.consumers)

    def taken(self, key: Hashable, consumer: str) -> bool:
        """Whether that consumer was the last, which frees the tile's place."""
        self.unread[key].remove(consumer)
        if self.unread[key]:
            return False
        del self.unread[key]
        return True

    def state(self) -> str:
        """What of it changes, as text in front of its depth."""
        return ""

    def describe(self) -> str:
        q = self.queue
        at = f"; {q.source}" if q.source else ""
        ends = f"{q.producer!r} -> {', '.join(repr(c) for c in q.consumers)}"
        return f"queue of {q.tile!r} {ends} ({self.state()}depth {q.depth}{at})"


class Slots(Ring):
    """As on the GPU: tile ``t`` lives in slot ``t % depth``, and enters it after ``t - depth`` has left it."""

    def __init__(self, queue: Queue) -> None:
        super().__init__(queue)
        self.depth = queue.depth
        self.values: dict[int, Tensor] = {}
        self.free: set[int] = set()  # tiles that every consumer has taken

    def has_room(self, t: int) -> bool:
        return self.depth > 0 and (t < self.depth or t - self.depth in self.free)

    def push(self, t: int, value: Tensor) -> None:
        assert self.has_room(t), f"tile {t} would overwrite tile {t - self.depth}"
        self.values[t] = value
        self.pushed(t)

    def take(self, t: int, consumer: str) -> Tensor:
        if not self.taken(t, consumer):
            return self.values[t]
        self.free.add(t)
        return self.values.pop(t)

    def state(self) -> str:
        """Head and tail: the first tile that some consumer has still to take, the first that is still to be pushed."""
        head = next(t for t in count() if t not in self.free)
        tail = next(t for t in count() if t not in self.free and t not in self.values)
        return f"head {head}, tail {tail}, "


class Wait(NamedTuple):
    """Why a worker cannot go on: what it waits for in which queue."""

    what: str
    ring: Ring


ENDED = object()


def take_turns(pipeline: str, workers: Mapping[str, Iterator[Wait | None]], remedy: str) -> None:
    """Let ``workers`` go on until all have ended. Each yields what it waits for, and None when it made a step.

    Raises:
        PipelineDeadlock: none can go on; says where each waits.
    """
    left, steps = dict(workers), 0
    while left:
        turns = {name: next(worker, ENDED) for name, worker in left.items()}
        steps += sum(turn is None for turn in turns.values())
        waits = [f"{name} {w.what} in the {w.ring.describe()}" for name, w in turns.items() if isinstance(w, Wait)]
        if len(waits) == len(left):
            raise PipelineDeadlock(
                f"no stage of pipeline {pipeline!r} can go on after {steps} steps: {'; '.join(waits)}", remedy
            )
        left = {name: worker for name, worker in left.items() if turns[name] is not ENDED}
