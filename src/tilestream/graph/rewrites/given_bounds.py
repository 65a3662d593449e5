"""Rows that lie side by side, cut into segments by bounds that a model gives: nothing is sorted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import floordiv, sub
from typing import Any

import torch
from torch import fx

from tilestream.graph.nodes import aten, tensor_of
from tilestream.graph.rewrites.busy import END, LISTED, busy_list
from tilestream.graph.rewrites.insert import call, cast, size
from tilestream.graph.rewrites.operators import LONG, LOOSE, SEGMENT_REDUCE
from tilestream.graph.sizes import hint

MOST_FEATURES = 1024
"""Of a row: as many as one launch reduces."""
MOST_ROWS = 2**31 - 1


@dataclass(frozen=True)
class Bounds:
    """Nodes are inserted where the graph of ``like`` inserts.

    Attributes:
        like: whose user's line and fake tensors' mode new nodes have.
        starts: int32 [segments + 1]: where the rows of each begin, and where those of the last end.
        busy: which segments have many rows; None where hardly any is expected to.
    """

    like: fx.Node
    starts: fx.Node
    busy: fx.Node | None = None

    @classmethod
    def joined(cls, like: fx.Node, parts: Sequence[fx.Node | None], rows: Any, whole: bool = True) -> Bounds:
        """Of integers behind each other; None is the number of ``rows``, a number or a node of the graph. What int32
        does not hold is no bound. ``whole``: whether every row is in a segment."""
        first = next(p for p in parts if p is not None)
        given = [call(like, aten.new_full.default, first, [1], rows) if p is None else p for p in parts]
        starts = given[0] if len(given) == 1 else call(like, aten.cat.default, given)
        if first.meta["val"].dtype != torch.int32:
            starts = cast(like, call(like, aten.clamp.default, starts, -1, MOST_ROWS), torch.int32)
        if not whole:
            starts.meta[LOOSE] = True
        return cls(like, starts, _busy(like, starts, rows))

    def reduced(self, rows: fx.Node, how: str = "sum") -> fx.Node:
        """[segments, *] of ``rows`` [rows, *]; ``how`` as of ``segment_reduce``."""
        return call(self.like, SEGMENT_REDUCE, None, rows, None, self.starts, self.busy, how)

    def counts(self) -> fx.Node:
        """Rows of each segment, int32 [segments]."""
        ends, firsts = (call(self.like, aten.slice.Tensor, self.starts, 0, *cut) for cut in ((1, END), (0, -1)))
        return call(self.like, aten.sub.Tensor, ends, firsts)

    def lengths(self, dims: int) -> fx.Node:
        """The same as float32 [segments, 1, ...] of so many dimensions."""
        return self.wide(cast(self.like, self.counts(), torch.float32), dims)

    def wide(self, column: fx.Node, dims: int) -> fx.Node:
        """A column with dimensions of size 1 behind its own."""
        for _ in range(dims - 1):
            column = call(self.like, aten.unsqueeze.default, column, -1)
        return column

    def divided(self, total: fx.Node, by: fx.Node) -> fx.Node:
        """In fp32, rounded once."""
        dtype = total.meta["val"].dtype
        return cast(self.like, call(self.like, aten.div.Tensor, cast(self.like, total, torch.float32), by), dtype)


def _busy(like: fx.Node, starts: fx.Node, rows: Any) -> fx.Node | None:
    fake = tensor_of(starts)
    segments, edges = fake.shape[0] - 1, rows if isinstance(rows, int) else rows.meta["val"]
    if hint(edges) < LISTED * hint(segments) or not hint(segments):
        return None
    slots = rows // LONG if isinstance(rows, int) else call(like, floordiv, rows, LONG)
    count = size(like, starts)
    last = count - 2 if isinstance(count, int) else call(like, sub, count, 2)

    def do(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return call(starts, target, *args, **kwargs)

    return busy_list(do, starts, slots, last, fake.device)
