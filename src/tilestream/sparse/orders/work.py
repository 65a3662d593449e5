"""A quick estimate of the work of an order of indices, without a simulation: what defaults are chosen by."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilestream.sparse.fusion import Fused, Leaf, Op, View
from tilestream.sparse.orders.pog import PartialOrder
from tilestream.sparse.table import nests

_ACCUMULATOR = 0.02
"""Share that each level of a sparse accumulator adds: it costs memory more than time."""

_CLEARLY = 0.95
"""Another order has to cost less than this share before it is taken instead of the natural one."""

_BUDGET = 400
"""Orders that ``improve`` looks at."""

_LARGE = 64
"""Views of a region from which on fewer orders are looked at, as the square of the views: an order's cost takes time in
their number, and there are as many moves as pairs of indices."""

_REST = 0.05
"""Weight of the statements beside the slowest: nodes work side by side, so that the slowest one decides."""


def extents(fused: Fused, order: tuple[str, ...]) -> dict[tuple[View, str], float]:
    """Mean number of coordinates in a fiber, by view and index."""
    rank = {index: n for n, index in enumerate(order)}
    found: dict[tuple[View, str], float] = {}
    for view in fused.views:
        if isinstance(view, Leaf):
            read = sorted(view.stored, key=rank.__getitem__)
            known = view.declared.extents
            if not known or tuple(read) == view.stored:
                counts = known or [float(fused.sizes[i]) for i in view.stored]
                found |= {(view, i): min(n, float(fused.sizes[i])) for i, n in zip(view.stored, counts, strict=True)}
            else:  # in another order the same entries are spread as evenly as they can be
                left = math.prod(known)
                for index in read:
                    found[view, index] = min(float(fused.sizes[index]), left)
                    left /= max(found[view, index], 1e-9)
            continue
        for index in (*view.indices, *view.reduced):
            size = float(fused.sizes[index])
            parts = [found[v, index] for v in view.operands if (v, index) in found]
            if not parts or view.complete:
                n = size
            elif view.statement.op in ("mul", "keep", "mask"):
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
    """About the steps of the slowest statement in this order; what is computed again is counted again.

    A loop costs a step an element, and a fiber a step more for its stop.
    """
    rank = {index: n for n, index in enumerate(order)}
    sizes, loops = extents(fused, order), nests(fused, order)
    steps = [0.0]
    users: dict[View, Op] = {}
    bound: dict[tuple[Op | None, str], float] = {}
    for view in reversed(fused.views):
        if not isinstance(view, Op):
            continue
        for one in view.operands:
            users.setdefault(one, view)
        trips, most = 1.0, 0.0
        for index in loops[view]:
            most = max(most, trips * (1 + _scanned(view, index, sizes)))
            # A consumer's coordinates bound what its operands see.
            n = bound.get((users.get(view), index), float(fused.sizes[index]))
            if (view, index) in sizes:
                raw = [sizes[v, index] for v in view.operands if (v, index) in sizes]
                n = min(n, min(raw) if raw and _narrows(view) else sizes[view, index])
            bound[view, index] = n
            trips *= max(n, 1e-3)
        order_of = max((sum(rank[i] > rank[r] for i in loops[view]) for r in view.reduced), default=0)
        steps.append(max(most, trips) * (1 + _ACCUMULATOR * order_of))
    return max(steps) + _REST * sum(steps)


def _scanned(op: Op, index: str, sizes: dict[tuple[View, str], float]) -> float:
    """Coordinates that a joiner of the statement looks at in a fiber; a dense level beside another is located."""
    having = [v for v in op.operands if (v, index) in sizes and index in v.indices]
    dense = [v for v in having if isinstance(v, Leaf) and _is_dense(v, index)]
    walked = [v for v in having if v not in dense] or dense
    return max((sizes[v, index] for v in walked), default=0.0)


def _is_dense(leaf: Leaf, index: str) -> bool:
    format = leaf.declared.format
    return format is None or format.levels[leaf.stored.index(index)] == "dense"


def ranked(fused: Fused, orders: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Orders, best first. The first one given is the natural one: it stays first unless another is clearly better."""
    orders = orders[: _fewer(len(orders), fused)]
    costs = {order: cost(fused, order) for order in dict.fromkeys((*orders, rows_first(fused)))}
    best = sorted(costs, key=lambda order: costs[order])
    start = best[0] if costs[best[0]] < costs[orders[0]] * _CLEARLY else orders[0]
    return list(dict.fromkeys((improve(fused, start), start, *best)))


def _fewer(orders: int, fused: Fused) -> int:
    """How many of so many orders are looked at."""
    return max(2, round(orders * min(1.0, (_LARGE / max(1, len(fused.views))) ** 2)))


def rows_first(fused: Fused) -> tuple[str, ...]:
    """The order that makes every product row by row (Gustavson): what is reduced before what only the right factor has.

    In a chain of layers each row then passes through all of them, and nothing is computed again.
    """
    order = PartialOrder(list(fused.order.indices), dict(fused.order.edges))
    for view in fused.views:
        if isinstance(view, Op) and view.reduced and len(view.operands) == 2:
            left, right = view.operands
            for inner in (i for i in right.indices if i in view.indices and i not in left.indices):
                for outer in (r for r in view.reduced if not order.reaches(inner, r)):
                    order.edge(outer, inner, "rows")
    return next(order.orders(1))


def improve(fused: Fused, order: tuple[str, ...]) -> tuple[str, ...]:
    """Move one index at a time to another place for as long as that clearly lowers the cost."""
    best, low, tried = order, cost(fused, order), {order}
    budget = _fewer(_BUDGET, fused)
    while True:
        moves = [_moved(best, a, b) for a in range(len(best)) for b in range(len(best)) if a != b]
        fresh = [o for o in dict.fromkeys(moves) if o not in tried and fused.order.admits(o)]
        fresh = fresh[: max(0, budget - len(tried))]
        tried.update(fresh)
        found = min(((cost(fused, o), o) for o in fresh), default=(low, best))
        if found[0] >= low * _CLEARLY:
            return best
        low, best = found


def _moved(order: tuple[str, ...], start: int, end: int) -> tuple[str, ...]:
    rest = [*order[:start], *order[start + 1 :]]
    return (*rest[:end], order[start], *rest[end:])


def _narrows(op: Op) -> bool:
    return op.statement.op in ("mul", "keep", "mask")
