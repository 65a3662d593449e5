"""Which operators take an index below zero for one from the end, as Python does, and which refuse it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from tilestream.graph.nodes import aten, behind, packet
from tilestream.ir.ways import reached

REFUSE = {
    *(aten.index_select, aten.gather, aten.embedding, aten.embedding_dense_backward, aten.index_add, aten.index_reduce),
    *(aten.scatter, aten.scatter_add, aten.scatter_reduce),
}
"""Eager ends with an error where one of these reads an index below zero. Advanced indexing (``index``, ``index_put``)
counts it from the end."""
SAME_NUMBERS = {
    *(aten.view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.expand, aten.detach, aten.alias),
    *(aten.clone, aten._to_copy),
}
"""What has all numbers of what it reads, and no others."""


def wraps(index: fx.Node, same: Mapping[fx.Node, fx.Node]) -> bool:
    """Whether everybody who reads an index of a graph counts those below zero from the end.

    Args:
        same: of each integer tensor the first that is computed alike (``first_alike``).
    """
    index = behind(index, lambda n: packet(n) in SAME_NUMBERS)
    alike = [n for n in index.graph.nodes if same.get(n, n) is same.get(index, index)]
    shown = reached(alike, lambda n: [user for user in n.users if packet(user) in SAME_NUMBERS])
    return not any(packet(user) in REFUSE for n in shown for user in n.users)
