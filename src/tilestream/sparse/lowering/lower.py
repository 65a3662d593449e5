"""Lowering: a fused region and an order of its indices to a stream graph, with its fusion table.

Each statement is lowered loop by loop, outermost first. A view whose reduction lies outside the consumer's next loop
ends there: its remaining loops are lowered by themselves (factored iteration), and its result joins the consumer as
streams. Operands that have an index are joined there; the others are repeated.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilestream.sparse.fusion import Fused, Leaf, NotFusible, Op, View
from tilestream.sparse.lowering.blocks import Blocks
from tilestream.sparse.lowering.joins import Joins
from tilestream.sparse.lowering.states import (
    LeafState,
    Level,
    Loop,
    Loops,
    OpState,
    State,
    StreamLevel,
    StreamState,
)
from tilestream.sparse.lowering.tiles import edge_name
from tilestream.sparse.schedule import Schedule
from tilestream.sparse.storage import Format
from tilestream.sparse.stream.builder import Builder
from tilestream.sparse.stream.graph import Port


class Lowering:
    """State of one lowering. ``views``: the name in the graph of each leaf, and its format there."""

    def __init__(
        self,
        fused: Fused,
        order: tuple[str, ...],
        views: Mapping[Leaf, tuple[str, Format]],
        parallel: Mapping[str, int],
        locate: bool = True,
        blocks: Blocks | None = None,
    ) -> None:
        self.fused, self.order, self.views = fused, order, views
        self.locate, self.blocks = locate, blocks
        self.rank = {index: n for n, index in enumerate(order)}
        self.parallel = {index: ways for index, ways in parallel.items() if ways > 1}
        self.build = Builder()
        self.joins = Joins(self)
        self._closed: dict[tuple[State, Loops], StreamState] = {}
        self._started: dict[View, State] = {}
        self._prepared: dict[tuple[State, str, Loops], OpState] = {}
        self._values: dict[tuple[State, Loops], Port] = {}

    def start(self, view: View) -> State:
        """A view before its first loop."""
        if view not in self._started:
            if isinstance(view, Leaf):
                left = tuple(sorted(view.indices, key=self.rank.__getitem__))
                state: State = LeafState(view, self.build.root(self.views[view][0]), 0, left)
            else:
                state = OpState(view, tuple(self.start(v) for v in view.operands), view.indices)
            self._started[view] = state
        return self._started[view]

    # -- loops --------------------------------------------------------------------------------------------------------

    def close(self, state: State, outer: Loops) -> StreamState:
        """Lower what is left of a statement under the loops ``outer``: its own loops, its value, its reduction."""
        if isinstance(state, StreamState):
            return state
        assert isinstance(state, OpState)
        key = (state, outer)
        if key not in self._closed:
            self._closed[key] = self._lower(state, outer)
        return self._closed[key]

    def _lower(self, state: OpState, outer: Loops) -> StreamState:
        op, loops, levels = state.op, outer, []
        own = sorted({*state.left, *op.reduced}, key=self.rank.__getitem__)
        for index in own:
            state = self._prepare(state, index, loops)
            level, state = self.joins.step(state, index, loops)
            signal = level.crd
            if index in self.parallel:
                signal, state = self._fork(state, level, index, loops)
            lanes = tuple(x.index for x in loops[len(outer) :] if x.index in self.parallel)
            levels.append(StreamLevel(index, level.crd, level.full, level.nonempty, lanes))
            loops = (*loops, Loop(index, level.crd, signal, level.nonempty))
        lanes = tuple(x.index for x in loops[len(outer) :] if x.index in self.parallel)
        value = self.compute(state, loops)
        for reduced in sorted(op.reduced, key=self.rank.__getitem__, reverse=True):
            levels, value, lanes = self._reduce(op, reduced, levels, value, lanes, outer)
        return self._leave_lanes(StreamState(op, tuple(levels), value, len(outer)), lanes)

    def _reduce(
        self, op: Op, index: str, levels: list[StreamLevel], value: Port, lanes: tuple[str, ...], outer: Loops
    ) -> tuple[list[StreamLevel], Port, tuple[str, ...]]:
        """Take one index away: a reduce if it is innermost, else a sparse accumulator over the levels inside it."""
        at = next(n for n, level in enumerate(levels) if level.index == index)
        kind, name, source = op.statement.reduction, f"{op.name}_{index}", op.statement.source
        inner = {level.index for level in levels[at:]}
        crossing = tuple(lane for lane in lanes if lane in inner)
        for lane in reversed(crossing):
            levels, value = self._gathered(lane, levels, value)
        above, own, below = levels[:at], levels[at], levels[at + 1 :]
        lanes = tuple(lane for lane in lanes if lane not in crossing)
        if not below:
            # A lane's share of a fiber may be empty, and a reduce would make a value of it.
            around = [*outer, *above]
            if all(x.nonempty and x.index not in self.parallel for x in around):
                return above, self.build.reduce(kind, value, name, source), lanes
            last = around[-1]
            dealt = last.index in lanes if above else last.index in self.parallel
            crd = self.scatter(last.index, last.crd) if dealt else last.crd
            _, value = self.build.spacc(kind, [crd], value, name, source)
            return above, value, lanes
        crds = [x.crd for x in reversed(below)] + [own.crd]
        made, value = self.build.spacc(kind, crds, value, name, source)
        filled, out = own.full and own.nonempty, []
        for x, crd in zip(reversed(below), made, strict=True):
            full = x.full and filled
            out.append(StreamLevel(x.index, crd, full, full and x.nonempty, x.lanes))
            filled = filled and x.nonempty  # sums are kept by all their coordinates: no fiber comes out empty
        return above + out[::-1], value, lanes

    def _prepare(self, state: OpState, index: str, loops: Loops) -> OpState:
        """End the operands that cannot take part in the loop over ``index``, or have nothing left to iterate."""
        key = (state, index, loops)
        if key not in self._prepared:
            self._prepared[key] = self._ready(state, index, loops)
        return self._prepared[key]

    def _ready(self, state: OpState, index: str, loops: Loops) -> OpState:
        kids = []
        for kid in state.kids:
            if isinstance(kid, OpState):
                early = any(self.rank[r] < self.rank[index] for r in kid.op.reduced)
                kid = self.close(kid, loops) if early or not kid.left else self._prepare(kid, index, loops)
            kids.append(kid)
        if all(a is b for a, b in zip(kids, state.kids, strict=True)):
            return state
        return OpState(state.op, tuple(kids), state.left)

    def step(self, state: State, index: str, loops: Loops) -> tuple[Level, State]:
        """The coordinates of a view at one loop, and the view after it."""
        if isinstance(state, LeafState):
            tensor, at = self.views[state.leaf][0], len(state.leaf.indices) - len(state.left)
            assert state.left[0] == index
            port = self.lift(state.port, state.at, loops, tensor)
            crd, ref = self.build.scan(tensor, at, index, port, str(state.leaf.tensor))
            is_dense = self.dense_level(state.leaf, at)
            there = is_dense and not state.missing and self.fused.sizes[index] > 0
            found = LeafState(state.leaf, ref, len(loops) + 1, state.left[1:], state.missing)
            before = LeafState(state.leaf, port, len(loops), state.left, state.missing)
            return Level(crd, (ref,), is_dense and not state.missing, there, before if is_dense else None), found
        if isinstance(state, StreamState):
            if state.at < len(loops):
                raise NotFusible(state.op.name, f"its fibers would have to be repeated for every {loops[-1].index}")
            first, *rest = state.levels
            after = StreamState(state.op, tuple(rest), state.port, len(loops) + 1)
            slots = () if rest else (state.port,)
            rigid = state.op.name if rest else ""
            return Level(first.crd, slots, first.full, first.nonempty, rigid=rigid), after
        return self.joins.step(state, index, loops)

    def dense_level(self, leaf: Leaf, at: int) -> bool:
        return self.views[leaf][1].levels[at] == "dense"

    # -- values -------------------------------------------------------------------------------------------------------

    def compute(self, state: OpState, loops: Loops) -> Port:
        """The values of a statement before its reduction, once all its loops are open."""
        statement = state.op.statement
        kids = state.kids[:1] if statement.op == "mask" else state.kids
        values = [self.value(kid, loops) for kid in kids]
        if self.blocks is not None:
            return self.blocks.compute(self.build, state.op, values, lambda index: self.edge(index, loops))
        if statement.op in ("mask", "copy"):
            first = state.kids[0]
            if isinstance(first, StreamState) and first.missing:  # a reduction would pass over N, which stands for 0
                return self.build.alu("identity", values, None, state.op.name, statement.source)
            return values[0]
        scalar = statement.scalar
        return self.build.alu(statement.op, values, scalar, state.op.name, statement.source)

    def value(self, state: State, loops: Loops) -> Port:
        """The values of an operand, one an element of the innermost loop."""
        key = (state, loops)
        if key not in self._values:
            self._values[key] = self._value(state, loops)
        return self._values[key]

    def _value(self, state: State, loops: Loops) -> Port:
        if isinstance(state, LeafState):
            tensor = self.views[state.leaf][0]
            port = self.lift(state.port, state.at, loops, tensor)
            return self.build.array(tensor, port, state.leaf.tensor)
        if isinstance(state, StreamState):
            return self.lift(state.port, state.at, loops, state.op.name)
        if state.op.reduced:
            return self.close(state, loops).port
        return self.compute(state, loops)

    def lift(self, port: Port, at: int, loops: Loops, what: str) -> Port:
        """Repeat a stream that lies under the first ``at`` loops over the others."""
        for loop in loops[at:]:
            port = self.build.repeat(port, loop.signal, loop.index, what)
        return port

    def edge(self, index: str, loops: Loops) -> Port:
        """Tiles that say what is inside a ragged index, one an element of the innermost loop."""
        at = next(n for n, loop in enumerate(loops) if loop.index == index)
        crd = self.scatter(index, loops[at].crd) if index in self.parallel else loops[at].crd
        return self.build.array(edge_name(index), self.lift(crd, at + 1, loops, index), f"the edge of {index}")

    # -- lanes --------------------------------------------------------------------------------------------------------

    def _fork(self, state: OpState, level: Level, index: str, loops: Loops) -> tuple[Port, OpState]:
        """Deal what is below the loop over lanes: mark every stream that goes down."""
        if level.rigid:
            raise NotFusible(level.rigid, f"its fibers would have to be dealt over lanes of {index}")
        moved = {port: self.scatter(index, port) for port in level.slots}
        state = self.joins.moved_op(state, moved, len(loops) + 1)
        signal = moved[level.slots[0]] if level.slots else self.scatter(index, level.crd)
        return signal, state

    def _leave_lanes(self, state: StreamState, lanes: tuple[str, ...]) -> StreamState:
        """The result with its levels and values gathered from the lanes of its own loops."""
        levels, value = list(state.levels), state.port
        for lane in reversed(lanes):
            levels, value = self._gathered(lane, levels, value)
        return StreamState(state.op, tuple(levels), value, state.at)

    def _gathered(self, lane: str, levels: list[StreamLevel], value: Port) -> tuple[list[StreamLevel], Port]:
        """Levels and values with those that are in a lane's copies in one stream again."""
        depth = next(n for n, x in enumerate(levels) if x.index == lane)
        crd = levels[depth].crd
        out = []
        for n, x in enumerate(levels):
            if lane in x.lanes:
                left = tuple(a for a in x.lanes if a != lane)
                x = StreamLevel(x.index, self.gather(lane, x.crd, n - depth, crd), x.full, x.nonempty, left)
            out.append(x)
        return out, self.gather(lane, value, len(levels) - 1 - depth, crd)

    def scatter(self, index: str, port: Port) -> Port:
        attrs = (("index", index), ("ways", self.parallel[index]))
        return Port(self.build.add(f"fork_{index}", "lanes_in", (("in", port),), attrs), "out")

    def gather(self, index: str, port: Port, level: int, crd: Port) -> Port:
        """What the lanes of ``index`` make, in one stream again; ``crd``: the coordinates that were dealt."""
        attrs = (("index", index), ("level", level), ("ways", self.parallel[index]))
        ins = (("in", port), ("crd", crd))
        return Port(self.build.add(f"join_{index}", "lanes_out", ins, attrs), "out")


def lower(
    fused: Fused,
    order: tuple[str, ...],
    views: Mapping[Leaf, tuple[str, Format]],
    parallel: Mapping[str, int],
    schedule: Schedule,
    blocks: Blocks | None = None,
) -> tuple[Builder, dict[str, StreamState]]:
    """Streams of every output of a region, in one graph.

    Raises:
        NotFusible: naming the statement whose result has to go through memory in this order.
    """
    lowering = Lowering(fused, order, views, parallel, schedule.locate, blocks)
    made = {}
    for name, op in fused.roots.items():
        state = lowering.close(lowering.start(op), ())
        made[name] = blocks.stored(lowering.build, op, state) if blocks else state
    return lowering.build, made
