"""A quick estimate of the work of an order of indices, without a simulation: what defaults are chosen by."""

from __future__ import annotations

import math

from tilestream.sparse.fusion import Fused, Leaf, Op, View
from tilestream.sparse.table import nests

_ACCUMULATOR = 0.25
"""Share of a pass that each level of a sparse accumulator adds: a reduction that is innermost is cheaper."""


def extents(fused: Fused, order: tuple[str, ...]) -> dict[tuple[View, str], float]:
    """Mean number of coordinates in a fiber, by view and index."""
    rank = {index: n for n, index in enumerate(order)}
    found: dict[tuple[View, str], float] = {}
    for view in fused.views:
        if isinstance(view, Leaf):
            for level, index in enumerate(view.stored):
                size = float(fused.sizes[index])
                known = view.declared.extents
                found[view, index] = known[level] if known else size
            continue
        for index in (*view.indices, *view.reduced):
            size = float(fused.sizes[index])
            parts = [found[v, index] for v in view.operands if (v, index) in found]
            if not parts or view.complete:
                n = size
            elif view.statement.op in ("mul", "mask"):
                n = size * math.prod(p / size for p in parts) if size else 0.0
            elif len(parts) < len(view.operands):
                n = size
            else:
                n = min(size, sum(parts) if len(set(parts)) > 1 else parts[0])
            found[view, index] = n
        for index in view.indices:
            for r in view.reduced:
                if rank[r] < rank[index] and fused.sizes[index]:
                    size = fused.sizes[index]
                    missing = (1 - min(1.0, found[view, index] / size)) ** max(1.0, found[view, r])
                    found[view, index] = size * (1 - missing)
    return found


def cost(fused: Fused, order: tuple[str, ...]) -> float:
    """Steps of all statements in this order; factored, with what is computed again counted again."""
    rank = {index: n for n, index in enumerate(order)}
    sizes, loops = extents(fused, order), nests(fused, order)
    within: dict[View, float] = {}
    total = 0.0
    users: dict[View, Op] = {}
    for view in reversed(fused.views):
        if not isinstance(view, Op):
            continue
        for one in view.operands:
            users.setdefault(one, view)
        trips = 1.0
        for index in loops[view]:
            at: View | None = view
            n = float(fused.sizes[index])
            while at is not None:  # a consumer's coordinates bound what its operands see
                if (at, index) in sizes and index in loops.get(at, ()):
                    before = [v for v in (at.operands if isinstance(at, Op) else ()) if (v, index) in sizes]
                    raw = [sizes[v, index] for v in before]
                    n = min(n, min(raw) if raw and isinstance(at, Op) and _narrows(at) else sizes[at, index])
                at = users.get(at)
            trips *= max(n, 1e-3)
        within[view] = trips
        order_of = max((sum(rank[i] > rank[r] for i in loops[view]) for r in view.reduced), default=0)
        total += trips * (1 + _ACCUMULATOR * order_of)
    return total


def _narrows(op: Op) -> bool:
    return op.statement.op in ("mul", "mask")
