"""How a node's features lie in the lanes of its team, and how many edges are on their way at once."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tilestream.errors import VerifyError
from tilestream.ir.pipeline import DTYPE_BYTES
from tilestream.kernels.segments.model import Pass, Place, Program, Read

WARP, THREADS = 32, 128
LANE_BYTES = 16
"""What a lane loads at once, at most."""
NARROW_WORDS, FEW_SUMS = 4, 16
"""Registers of a lane for an edge's rows, an edge's weight aside, and for sums, up to which four edges are on their way
at once. GIN's sum of 64 bf16 on 1,000,000 edges took 28 us with one, 27 with two, 23 with four and 29 with eight
(H200)."""
RESIDENT = ((30, 12), (44, 10), (60, 8), (80, 5))
"""Registers of a lane for sums and edges on their way, and CTAs that an SM should hold then: other warps hide more than
further edges of the same do, and busy nodes alone spill. GAT's 4 x 64: 121 us with 12, 142 with 8."""
MOST_REGISTERS = 150
"""Of sums, values of the node and of an edge: wider programs spill."""
LONG, PIECE_EDGES, MOST_PIECES = 64, 256, 1024
"""Edges of nodes that are whole CTAs', as `busy` lists them (sorted_keys.cuh), and of each of such a node's pieces."""
SLOTS = 4096
"""Pieces of nodes that several CTAs share, at most: their partial sums have room."""


def piece_edges(edges: int) -> int:
    """Edges of each piece of a busy node, where all nodes have so many."""
    return max(PIECE_EDGES, ceil(edges / (SLOTS // 2)))


@dataclass(frozen=True)
class Layout:
    """Slot ``s = lane + r lanes`` has ``vector`` neighbouring elements of run ``s / per_run``.

    Attributes:
        p: the program whose features they are.
        vector: elements of a vector.
        per_run: slots of a run, of which the first ``run / vector`` have elements.
        lanes: of a team that share the features.
        vectors: slots of a lane.
        at_once: edges of a node side by side, where one's features take few lanes.
    """

    p: Program
    vector: int
    per_run: int
    lanes: int
    vectors: int
    at_once: int

    @property
    def team(self) -> int:
        """Lanes of a team."""
        return self.lanes * self.at_once

    @property
    def elements(self) -> int:
        """Of a lane, those that are not there included."""
        return self.vector * self.vectors

    def count(self, axes: tuple[str, ...]) -> int:
        """Registers of a value along ``axes``: one; one a vector, where all elements of a run are alike; one each."""
        if not axes:
            return 1
        return self.vectors if set(axes) <= set(self.p.space.prefix) else self.elements

    def row_words(self, each: Pass) -> int:
        """Registers of what one edge's rows are loaded to."""
        total = 0
        for r in (self.p.reads[name] for name in each.reads):
            n = self.count(r.axes)
            total += n if DTYPE_BYTES[r.tensor.dtype] == 4 or n < self.elements else ceil(n / 2)
        return total

    def in_flight(self, each: Pass) -> int:
        """Edges of a pass whose rows are loaded before any is used."""
        words = self.row_words(each)
        is_softmax = any(s.op.combine == "softmax" for s in each.sums)
        # One a batch's row more.
        weights = 0 if is_softmax else sum(not self.p.reads[name].axes for name in each.reads)
        if words - weights <= NARROW_WORDS and self.sum_registers(each) <= FEW_SUMS:
            return 4
        return 2 if words <= LANE_BYTES else 1

    @property
    def resident(self) -> int:
        """CTAs that an SM should hold: registers are shared out so."""
        nodes = [r for r in self.p.reads.values() if r.place is Place.NODE]
        own = sum(self.count(r.axes) * DTYPE_BYTES[r.tensor.dtype] // 4 for r in nodes)
        passes = self.p.passes
        held = (own + self.sum_registers(x) + (self.row_words(x) + 4) * self.in_flight(x) for x in passes)
        most = max(held, default=0)
        return next((ctas for registers, ctas in RESIDENT if most <= registers), 3)

    def sum_registers(self, each: Pass) -> int:
        """Registers of a lane for what a pass sums: of a softmax also maxima and sums of weights."""
        scores = sum(self.count(self.p.axes(s.operands[0])) for s in each.sums if s.op.combine == "softmax")
        return 2 * scores + sum(self.count(s.taken) for s in each.sums)

    @property
    def registers(self) -> int:
        """An estimate of what a lane holds: sums of the largest pass, values of the node that live on, an edge's
        rows."""
        p = self.p
        sums = max(map(self.sum_registers, p.passes), default=0)
        rows = max(map(self.row_words, p.passes), default=0)
        used = {name for each in p.passes for s in (*each.steps, *each.sums) for name in s.operands}
        nodes = sum(self.count(p.axes(name)) for name in used if p.value(name).place is not Place.EDGE)
        return 24 + sums + rows + nodes


def layout(p: Program) -> Layout:
    """The layout of a program.

    Raises:
        VerifyError: a lane would hold more than it has registers for.
    """
    space = p.space
    widest = min((DTYPE_BYTES[r.tensor.dtype] for r in _wide(p)), default=4)
    vector = _power_in(space.run, LANE_BYTES // widest)
    per_run = space.run // vector
    if any(s.axes == space.prefix != s.taken for s in p.steps.values() if s.op.kind == "product"):
        per_run = _power_above(per_run)  # lanes of a run are summed by halves
    slots = per_run * space.runs
    lanes = min(WARP, _power_above(slots))
    made = Layout(p, vector, per_run, lanes, ceil(slots / lanes), 1)
    if made.registers > MOST_REGISTERS:
        raise VerifyError(
            f"pipeline {p.pipeline.name!r}: {made.elements} elements of each value a lane take about {made.registers}"
            f" registers > {MOST_REGISTERS}",
            "cut it along the features",
        )
    return made


def _wide(p: Program) -> list[Read]:
    """What is read of every edge along the features, else all that is read and written along them."""
    inner = p.space.axes[-1:]
    every = [r for r in (*p.reads.values(), *(s.write for s in p.stores if s.write)) if r.axes[-1:] == inner]
    return [r for r in every if r.place is Place.EDGE] or every


def _power_in(n: int, most: int) -> int:
    """The largest power of two that divides ``n``, up to ``most``."""
    return min(n & -n, most)


def _power_above(n: int) -> int:
    return 1 << (n - 1).bit_length()
