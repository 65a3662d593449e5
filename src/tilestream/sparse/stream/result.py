"""What a run of a stream graph gives: its results, its cycles, and what each node did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tilestream.sparse.storage import SparseTensor
from tilestream.sparse.stream.graph import Port


@dataclass(frozen=True)
class Stream:
    """Every token of one stream, in the encoding of ``stream.tokens``.

    ``tags``: int64 [n]. ``values``: float64 [n] or [n, block, block] of a value stream (0 at control tokens), else
    None. ``times``: int64 [n], the cycle at which each token arrives (the reader sees them in order all the same).
    """

    tags: np.ndarray = field(repr=False)
    values: np.ndarray | None = field(repr=False)
    times: np.ndarray = field(repr=False)

    def __len__(self) -> int:
        return len(self.tags)


@dataclass(frozen=True)
class NodeStats:
    """What one node did. Cycles are on its own local clock; every stream's tokens count, control included.

    ``start_cycle``: when its first input came (0 for a root). ``end_cycle``: its clock at the end. ``busy``: cycles
    that it spent on tokens (its initiation intervals); with ``wait_input``, ``wait_room`` and ``wait_memory``, which
    it spent waiting for a token, for room in a channel and for memory, it sums to ``end_cycle``.
    ``flops``: operations on values; an operation on a [b, b] block counts each of its scalar operations.
    ``bytes_read`` and ``bytes_written``: tensor data moved, 4 bytes a word (value, coordinate or segment).
    """

    name: str
    kind: str
    tokens_in: int = 0
    tokens_out: int = 0
    start_cycle: int = 0
    end_cycle: int = 0
    busy: int = 0
    wait_input: int = 0
    wait_room: int = 0
    wait_memory: int = 0
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


@dataclass(frozen=True)
class Result:
    """A finished run. ``cycles``: the largest ``end_cycle``. ``streams``: every stream, where the run was traced.

    ``memory``: of a run with a memory model, its transfers, the scratchpad's hits, and the bytes that moved off chip.
    """

    outputs: dict[str, SparseTensor]
    cycles: int
    nodes: tuple[NodeStats, ...]
    flops: int
    bytes: int
    streams: Mapping[Port, Stream] = field(default_factory=dict, repr=False)
    memory: Mapping[str, int] = field(default_factory=dict)

    def node(self, name: str) -> NodeStats:
        """The figures of one node; ``KeyError`` if the graph has none of that name."""
        return {one.name: one for one in self.nodes}[name]
