"""Joining the operands of a statement at one loop: intersection, union, location in dense levels, completion.

What is not stored is 0 (or minus infinity under a mask), so that a product needs the coordinates of both operands and
a sum those of either. Where a result must hold every coordinate, the operand is united with the index's full range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from tilestream.errors import SparseError
from tilestream.sparse.fusion import Fused, Leaf, NotFusible, Op
from tilestream.sparse.lowering.states import LeafState, Level, Loops, OpState, State, StreamState
from tilestream.sparse.storage import Format
from tilestream.sparse.stream.builder import Builder
from tilestream.sparse.stream.graph import Port

Moves = dict[Port, Port]


class Lowering(Protocol):
    """What a join needs of the lowering that it is part of."""

    fused: Fused
    rank: dict[str, int]
    views: Mapping[Leaf, tuple[str, Format]]
    locate: bool
    build: Builder

    def step(self, state: State, index: str, loops: Loops) -> tuple[Level, State]: ...

    def lift(self, port: Port, at: int, loops: Loops, what: str) -> Port: ...


class Joins:
    """Joins of one lowering; ``ranges`` are the indices of which the full range is read (a tensor each)."""

    def __init__(self, lowering: Lowering) -> None:
        self.lowering, self.build = lowering, lowering.build
        self.ranges: set[str] = set()
        self._stepped: dict[tuple[State, str, Loops], tuple[Level, OpState]] = {}
        self._moved: dict[tuple[State, frozenset[tuple[Port, Port]], bool, int], State] = {}

    def step(self, state: OpState, index: str, loops: Loops) -> tuple[Level, OpState]:
        """The coordinates of a statement at one loop, from its operands that have the index."""
        key = (state, index, loops)
        if key not in self._stepped:
            self._stepped[key] = self._step(state, index, loops)
        return self._stepped[key]

    def _step(self, state: OpState, index: str, loops: Loops) -> tuple[Level, OpState]:
        op, kids, parts = state.op, list(state.kids), []
        for n, kid in enumerate(kids):
            if index in kid.left:
                part, kids[n] = self.lowering.step(kid, index, loops)
                parts.append((n, part))
        level, moves, lost = self._join(op, index, loops, parts, len(parts) == len(kids))
        for (n, _), move, missing in zip(parts, moves, lost, strict=True):
            kids[n] = self.moved(kids[n], move, missing, len(loops) + 1)
        made = OpState(op, tuple(kids), tuple(i for i in state.left if i != index))
        gone = [kids[n] for (n, _), missing in zip(parts, lost, strict=True) if missing]
        factor = op.statement.op in ("mul", "keep", "mask")  # nothing, if one factor is
        if gone and not (factor and vanishes(made, len(loops) + 1)):
            for kid in gone:
                if not isinstance(kid, LeafState) and not vanishes(kid, len(loops) + 1):
                    raise NotFusible(kid.op.name, f"it is not 0 where a union has no {index} of it")
        return level, made

    def _join(
        self, op: Op, index: str, loops: Loops, parts: list[tuple[int, Level]], everywhere: bool
    ) -> tuple[Level, list[Moves], list[bool]]:
        """The joined level, where each part's streams went, and whether some of them are N now."""
        levels = [part for _, part in parts]
        if not levels:
            return self._range(index, loops), [], []
        kind, whole = self._rule(op, index, parts, everywhere)
        if kind in ("lead", "follow"):  # the first or the last operand says where; the others must be there
            says = levels[0 if kind == "lead" else -1]
            lost = [x is not says and not x.full and x.crd != says.crd for x in levels]
            made = [self._complete(x, index, loops) if gone else (x, {}) for x, gone in zip(levels, lost, strict=True)]
            joined, moves = self._meet("intersect", [x for x, _ in made], index, loops)
            moves = [_then(first, second) for (_, first), second in zip(made, moves, strict=True)]
        elif kind == "intersect":
            joined, moves = self._meet("intersect", levels, index, loops)
            lost = [False] * len(levels)
        else:
            full = [x.full for x in levels]
            if all(full):
                joined, moves = self._meet("intersect", levels, index, loops)
            else:
                joined, moves = self._meet("union", levels, index, loops)
            same = len({x.crd for x in levels}) == 1
            lost = [not same and not x.full for x in levels]
        if whole and not joined.full:
            joined, more = self._complete(joined, index, loops)
            moves = [_then(move, more) for move in moves]
            lost = [True] * len(levels)
        return joined, moves, lost

    def _rule(self, op: Op, index: str, parts: list[tuple[int, Level]], everywhere: bool) -> tuple[str, bool]:
        """How operands meet, and whether the result must hold every coordinate."""
        statement, rank = op.statement, self.lowering.rank
        whole = op.complete
        if statement.reduction == "max" and op.reduced and op.fill == 0:
            whole = whole or rank[index] >= min(rank[r] for r in op.reduced)
        if statement.op == "mask" and statement.fill and op.operands[0].fill == 0:
            # What the value does not store is 0 where the mask is, not the fill.
            only_value = len(parts) == 1 and parts[0][0] == 0
            return ("follow" if len(parts) == 2 else "intersect"), whole or only_value
        if statement.op in ("mul", "keep", "mask"):
            return "intersect", whole
        if op.operands[0].fill == -math.inf:
            return ("lead", whole) if not parts[0][0] else ("union", True)
        if statement.op == "div":
            return "union", True
        if statement.op == "share":
            if parts[0][0] == 1:  # only the divisor has the index
                return "union", True
            if len(parts) == 1 or parts[1][1].full or parts[1][1].crd == parts[0][1].crd:
                return "lead", whole
            return "union", True
        return "union", whole or not everywhere

    def _range(self, index: str, loops: Loops) -> Level:
        """Every coordinate of an index."""
        tensor, size = range_name(index), self.lowering.fused.sizes[index]
        self.ranges.add(index)
        port = self.lowering.lift(self.build.root(tensor), 0, loops, tensor)
        crd, _ = self.build.scan(tensor, 0, index, port, f"all of {index}")
        return Level(crd, (), True, size > 0)

    def _complete(self, level: Level, index: str, loops: Loops) -> tuple[Level, Moves]:
        joined, moves = self._meet("union", [level, self._range(index, loops)], index, loops)
        return joined, moves[0]

    def _meet(self, kind: str, levels: list[Level], index: str, loops: Loops) -> tuple[Level, list[Moves]]:
        """Join levels: equal streams count once, dense levels are located where coordinates must be in all."""
        groups: dict[Port, list[int]] = {}
        for n, level in enumerate(levels):
            groups.setdefault(level.crd, []).append(n)
        heads = list(groups)
        moves: list[Moves] = [{} for _ in levels]
        located: list[Port] = []
        if kind == "intersect" and len(heads) > 1 and self.lowering.locate:
            can = [crd for crd in heads if all(levels[n].located for n in groups[crd])]
            located = can if len(can) < len(heads) else can[1:]
        merged = [crd for crd in heads if crd not in located]
        crd = merged[0]
        if len(merged) > 1:
            if rigid := next((levels[n].rigid for c in merged for n in groups[c] if levels[n].rigid), ""):
                raise NotFusible(rigid, f"its fibers of {index} would have to be joined with other coordinates")
            slots = [list(dict.fromkeys(s for n in groups[c] for s in levels[n].slots)) or [c] for c in merged]
            crd = self._emit(kind, index, merged, slots, groups, moves)
        for one in located:
            for n in groups[one]:
                moves[n] = self._locate(levels[n], one, crd, index, loops)
        chosen = [levels[groups[c][0]] for c in merged]
        full = (all if kind == "intersect" else any)(x.full for x in chosen)
        some = all(x.nonempty for x in chosen) and (full or len(merged) == 1)
        nonempty = any(x.nonempty for x in chosen) if kind == "union" else some
        streams = [m.get(s, s) for level, m in zip(levels, moves, strict=True) for s in level.slots]
        rigid = next((levels[n].rigid for c in merged for n in groups[c] if levels[n].rigid), "")
        only = levels[0] if len(levels) == 1 else None
        dense = only.located if only else None
        return Level(crd, tuple(dict.fromkeys(streams)), full, nonempty, dense, rigid), moves

    def _emit(
        self,
        kind: str,
        index: str,
        merged: list[Port],
        slots: list[list[Port]],
        groups: dict[Port, list[int]],
        moves: list[Moves],
    ) -> Port:
        """Joiners for every stream that goes with the coordinates: each takes one an operand."""
        out: Port | None = None
        for turn in range(max(len(s) for s in slots)):
            picked = [s[min(turn, len(s) - 1)] for s in slots]
            crd, made = self.build.joiner(kind, index, list(zip(merged, picked, strict=True)), index)
            out = out or crd
            for head, old, new in zip(merged, picked, made, strict=True):
                for n in groups[head]:
                    moves[n].setdefault(old, new)
        assert out is not None
        return out

    def _locate(self, level: Level, own: Port, crd: Port, index: str, loops: Loops) -> Moves:
        """References into a dense level for coordinates that others gave."""
        before = level.located
        if before is None:  # shares its coordinates with a dense level: nothing of its own to find
            raise SparseError(f"index {index!r} cannot be located in {own}", "report the program")
        tensor = self.lowering.views[before.leaf][0]
        ref = self.build.repeat(before.port, crd, index, tensor)
        found = self.build.locate(tensor, len(before.leaf.indices) - len(before.left), index, crd, ref, tensor)
        return dict.fromkeys(level.slots, found)

    def moved(self, state: State, moves: Moves, missing: bool, at: int) -> State:
        """The view with its streams of this loop replaced; ``missing``: some are N now."""
        if not moves and not missing:
            return state
        key = (state, frozenset(moves.items()), missing, at)
        if key not in self._moved:
            self._moved[key] = self._move(state, moves, missing, at)
        return self._moved[key]

    def moved_op(self, state: OpState, moves: Moves, at: int) -> OpState:
        """``moved`` of a statement that is iterating."""
        made = self.moved(state, moves, False, at)
        assert isinstance(made, OpState)
        return made

    def _move(self, state: State, moves: Moves, missing: bool, at: int) -> State:
        if isinstance(state, LeafState):
            if state.at != at:
                return state
            port = moves.get(state.port, state.port)
            return LeafState(state.leaf, port, at, state.left, state.missing or missing)
        if isinstance(state, StreamState):
            if state.at != at or state.levels:
                return state
            return StreamState(state.op, (), moves.get(state.port, state.port), at, state.missing or missing)
        kids = tuple(self.moved(kid, moves, missing, at) for kid in state.kids)
        return state if kids == state.kids else OpState(state.op, kids, state.left)


def vanishes(state: State, at: int, known: dict[State, bool] | None = None) -> bool:
    """Whether a view's value is 0 where its streams of the loop before ``at`` are N (which counts as 0)."""
    known = {} if known is None else known
    if state not in known:
        known[state] = _vanishes(state, at, known)
    return known[state]


def _vanishes(state: State, at: int, known: dict[State, bool]) -> bool:
    if isinstance(state, LeafState):
        return state.at == at and state.leaf.fill == 0
    if isinstance(state, StreamState):
        return state.at == at and state.op.fill == 0
    kids, op = state.kids, state.op.statement.op
    if state.op.complete or (len(kids) == 1 and state.op.operands[0].fill != 0):
        return False
    if len(kids) == 1:
        return vanishes(kids[0], at, known)
    if op == "keep":
        return any(vanishes(kid, at, known) for kid in kids)
    if op == "mul":  # 0 times what is not finite is no 0
        return any(vanishes(kid, at, known) for kid in kids) and all(_finite(kid, at) for kid in kids)
    if op == "mask":
        return vanishes(kids[0], at, known)
    if op == "share":
        return vanishes(kids[0], at, known) and not _touched(kids[1], at)
    return all(vanishes(kid, at, known) for kid in kids)


_POLES = ("log", "rsqrt", "reciprocal", "rdiv")


def _finite(state: State, at: int) -> bool:
    """Whether a view stays finite where its streams of the loop before ``at`` are N (which counts as 0)."""
    if not isinstance(state, OpState):
        return True
    op, kids = state.op.statement.op, state.kids
    pole = op in _POLES and _touched(kids[0], at)
    pole = pole or (op in ("div", "share") and len(kids) == 2 and _touched(kids[1], at))
    return not pole and all(_finite(kid, at) for kid in kids)


def _touched(state: State, at: int) -> bool:
    if isinstance(state, OpState):
        return any(_touched(kid, at) for kid in state.kids)
    return state.at == at


def _then(first: Moves, second: Moves) -> Moves:
    return {old: second.get(new, new) for old, new in first.items()} | {
        o: n for o, n in second.items() if o not in first
    }


def range_name(index: str) -> str:
    """Tensor that stands for every coordinate of an index."""
    return f"range_{index}"
