"""Cut a step's epilogue into passes between row reductions, each evaluated in registers."""

from __future__ import annotations

from collections import defaultdict

from tilestream.ir.pipeline import TileOp
from tilestream.kernels.stream.model import Phase, Sink
from tilestream.kernels.stream.walk import Draft, Walk


def cut_phases(held: str, draft: Draft, sinks: list[Sink], scope: Walk) -> tuple[Phase, ...]:
    """Level by level: a value that depends on ``k`` nested reductions is computed in phase ``k``.

    Between phases the fragment keeps one value. The latest that makes the others unnecessary is
    chosen, so that each operand is read and each expression evaluated once where possible.
    """
    nodes, features = draft.nodes, draft.features
    own = {op.out.name: op for op in nodes if op.out is not None}
    own |= {n: op for n, op in scope.floating.items() if n not in own}
    reduces = [op for op in nodes if op.kind in ("sum", "max")]
    level = _levels(own, held)
    rows = {op.out.name for op in nodes if op.out is not None and op.out.name in scope.rows}
    count = 1 + max([level[s.tile] for s in sinks] + [level[op.ins[0]] for op in reduces], default=0)

    def closure(targets: list[str], leaves: set[str]) -> list[str]:
        """Values to evaluate for ``targets``, in order, stopping at leaves and at what is not this step's."""
        order: dict[str, None] = {}

        def visit(name: str) -> None:
            if name in order or name in leaves:
                return
            if name in own and name not in rows:
                for i in own[name].ins:
                    visit(i)
            order[name] = None

        for t in targets:
            visit(t)
        return list(order)

    phases = []
    current = held
    for p in range(count):
        targets = [op.ins[0] for op in reduces if level[op.ins[0]] == p] + [s.tile for s in sinks if level[s.tile] == p]
        later = [op.ins[0] for op in reduces if level[op.ins[0]] > p] + [s.tile for s in sinks if level[s.tile] > p]
        keep = ""
        if later:
            keep = _choose_keep(p, current, later, own, rows, level, closure, scope, features)
        needed = closure(targets + ([keep] if keep else []), {current} if current else set())
        evaluated = tuple(own[n] for n in needed if n in own and n not in rows)
        phases.append(
            Phase(
                nodes=evaluated,
                reduces=tuple(op for op in reduces if level[op.ins[0]] == p),
                row_nodes=tuple(
                    op
                    for op in nodes
                    if op.out is not None and op.out.name in rows and op not in reduces and level[op.out.name] == p + 1
                ),
                sinks=tuple(s for s in sinks if level[s.tile] == p),
                streams=tuple(n for n in needed if n in scope.streams),
                keep=keep,
            )
        )
        current = keep or current
    return tuple(phases)


def _levels(own: dict[str, TileOp], held: str) -> dict[str, int]:
    """Of each value, how many reductions it depends on. Those of earlier steps and streams are there from the start."""
    level = defaultdict(int, {held: 0})

    def of(name: str) -> int:
        if name not in level:
            op = own.get(name)
            below = max((of(i) for i in op.ins), default=0) if op is not None else 0
            level[name] = below + (1 if op is not None and op.kind in ("sum", "max") else 0)
        return level[name]

    for name in own:
        of(name)
    return level


def _choose_keep(p, current, later, own, rows, level, closure, scope: Walk, features: int) -> str:
    base = closure(later, {current} if current else set())
    uses_now = sum(n in scope.streams for n in base) + (current != "" and current in closure(later, set()))
    best, best_rank = "", (uses_now, 0)
    for position, name in enumerate(base):
        if name in rows or level[name] > p or scope.features[name] != features or name in scope.views:
            continue
        if name not in own and name not in scope.streams:
            continue
        after = closure(later, {name})
        if current and current in after:
            continue
        left = sum(n in scope.streams for n in after)
        rank = (left, -position)
        if rank < best_rank or (not best and left <= uses_now and name in own):
            best, best_rank = name, rank
    return best
