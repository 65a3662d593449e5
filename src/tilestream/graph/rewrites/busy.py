"""Which segments have many rows, of bounds that are given: the list that ``tilestream::segments`` makes of a sort."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilestream.graph.nodes import aten
from tilestream.graph.rewrites.operators import LONG
from tilestream.kernels.segments.layout import MOST_PIECES, PIECE_EDGES

END = 2**63 - 1
LISTED = 32
"""From so many rows a segment in the mean the list is made: below, hardly any has more than ``LONG``. Assumed."""


def busy_list(do: Callable[..., Any], starts: Any, slots: Any, last: Any, device: torch.device) -> Any:
    """A count, then for each piece of a long segment its segment, and its number before how many there are.

    Args:
        do: an operator on tensors, or the node of a graph that is one.
        starts: int32 [segments + 1].
        slots: for so many pieces there is room, ``rows // LONG``.
        last: the number of the last segment.
    """
    ends = do(aten.slice.Tensor, starts, 0, 1, END)
    lengths = do(aten.sub.Tensor, ends, do(aten.slice.Tensor, starts, 0, 0, -1))
    wanted = do(aten.floor_divide.default, do(aten.add.Tensor, lengths, PIECE_EDGES - 1), PIECE_EDGES)
    many = do(aten._to_copy.default, do(aten.gt.Scalar, lengths, LONG), dtype=torch.int32)
    pieces = do(aten.mul.Tensor, do(aten.clamp.default, wanted, 0, MOST_PIECES), many)
    until = do(aten.cumsum.default, pieces, 0, dtype=torch.int32)
    slot = do(aten.arange.default, slots, dtype=torch.int32, device=device)
    found = do(aten.searchsorted.Tensor, until, slot, out_int32=True, right=True)
    segment = do(aten.clamp_max.default, found, last)
    of, behind = (do(aten.index_select.default, each, 0, segment) for each in (pieces, until))
    number = do(aten.sub.Tensor, slot, do(aten.sub.Tensor, behind, of))
    items = do(aten.stack.default, [segment, do(aten.add.Tensor, do(aten.mul.Tensor, number, 1 << 16), of)], 1)
    count = do(aten.clamp_max.default, do(aten.slice.Tensor, until, 0, -1, END), slots)
    return do(aten.cat.default, [count, do(aten.reshape.default, items, [-1])])
