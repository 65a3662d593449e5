"""The rows of a graph and the arrays behind the addresses in them; rings, stores and tables that grow."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tilestream.sparse.engine import layout as at
from tilestream.sparse.engine.compiled import rehash
from tilestream.sparse.engine.scheduler import COUNT, FIRST, QUEUE_CELLS, SIZE
from tilestream.sparse.engine.table import FREE
from tilestream.sparse.stream.graph import Graph, Port

_STORE = 1024
_TABLE = 64


@dataclass
class Machine:
    """The rows of a graph, and the arrays behind their addresses (``kept``)."""

    graph: Graph
    nodes: np.ndarray
    channels: np.ndarray
    ports: list[Port]
    queue: np.ndarray = field(default_factory=lambda: np.zeros(QUEUE_CELLS, dtype=np.int64))
    kept: dict[str, np.ndarray] = field(default_factory=dict)
    bounded: frozenset[int] = frozenset()

    def node_row(self, index: int) -> int:
        return self.nodes.ctypes.data + 8 * at.NODE_CELLS * index

    def channel_row(self, index: int) -> int:
        return self.channels.ctypes.data + 8 * at.CHANNEL_CELLS * index

    def node_at(self, row: int) -> int:
        """Index of the node whose row is at an address."""
        return (row - self.nodes.ctypes.data) // (8 * at.NODE_CELLS)

    def channel_at(self, row: int) -> int:
        return (row - self.channels.ctypes.data) // (8 * at.CHANNEL_CELLS)

    def keep(self, name: str, array: np.ndarray) -> int:
        """Address of an array, which stays alive under a name; whatever had that name goes."""
        self.kept[name] = array
        return array.ctypes.data

    def resize(self, index: int, capacity: int) -> None:
        """Give a channel another number of slots. Its unread tokens move to the front."""
        row = self.channels[index]
        unread = int(row[at.TAIL] - row[at.HEAD])
        slots = (row[at.HEAD_SLOT] + np.arange(unread)) % max(1, row[at.CAPACITY])
        width = int(row[at.WIDTH])
        for cell, name, dtype, cells in (
            (at.TAGS, "tags", np.int64, 1),
            (at.TIMES, "times", np.int64, 1),
            (at.VALUES, "values", np.float64, width),
        ):
            if cells == 0:
                continue
            fresh = np.zeros((capacity, cells), dtype=dtype)
            if unread:
                fresh[:unread] = self.kept[f"channel {name} {index}"][slots]
            row[cell] = self.keep(f"channel {name} {index}", fresh)
        row[at.CAPACITY] = capacity
        row[at.HEAD_SLOT] = 0
        row[at.TAIL_SLOT] = unread % capacity

    def store(self, name: str, *columns: tuple[int, type]) -> int:
        """Address of the row of a growing array with columns of (cells an entry, dtype)."""
        row = np.zeros(at.DATA + len(columns), dtype=np.int64)
        row[at.ROOM_FOR] = _STORE
        for i, (cells, dtype) in enumerate(columns):
            row[at.DATA + i] = self.keep(f"{name} {i}", np.zeros((_STORE, cells), dtype=dtype))
        return self.keep(name, row)

    def grow_store(self, name: str, least: int = 0) -> None:
        """Make a growing array twice as large, or larger where ``least`` entries need it."""
        row = self.kept[name]
        used, room = int(row[at.USED]), max(2 * int(row[at.ROOM_FOR]), least)
        for i in range(len(row) - at.DATA):
            old = self.kept[f"{name} {i}"]
            fresh = np.empty((room, old.shape[1]), dtype=old.dtype)
            fresh[:used] = old[:used]
            row[at.DATA + i] = self.keep(f"{name} {i}", fresh)
        row[at.ROOM_FOR] = room

    def stored(self, name: str, column: int = 0) -> np.ndarray:
        """What a growing array holds: [entries, cells]."""
        return self.kept[f"{name} {column}"][: int(self.kept[name][at.USED])]

    def grow_table(self, index: int) -> None:
        """Make an accumulator's table four times as large and put its sums into their new slots."""
        row = self.nodes[index]
        old = {name: self.kept.get(f"table {name} {index}") for name in ("keys", "values", "list")}
        size = 4 * int(row[at.R] + 1) if old["keys"] is not None else _TABLE
        width, used = int(row[at.NODE_WIDTH]), int(row[at.S])
        row[at.P] = self.keep(f"table keys {index}", np.full(size, FREE, dtype=np.int64))
        row[at.Q] = self.keep(f"table values {index}", np.zeros((size, width)))
        row[at.R] = size - 1
        for cell, name in ((at.T, "list"), (at.U, "spare")):
            row[cell] = self.keep(f"table {name} {index}", np.zeros(size // 2 + 1, dtype=np.int64))
        if old["keys"] is None or old["values"] is None or old["list"] is None:
            return
        self.kept[f"table list {index}"][:used] = old["list"][:used]
        rehash(self.node_row(index), old["keys"].ctypes.data, old["values"].ctypes.data, len(old["keys"]))

    def push(self, index: int) -> None:
        """Let a node run."""
        if self.nodes[index, at.QUEUED]:
            return
        first, count, size = (int(self.queue[cell]) for cell in (FIRST, COUNT, SIZE))
        self.kept["queue"][(first + count) % size] = self.node_row(index)
        self.queue[COUNT] = count + 1
        self.nodes[index, at.QUEUED] = 1
