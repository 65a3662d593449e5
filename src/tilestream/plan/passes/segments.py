"""A program, cut into stages. Every splitting pass decides where; this module does the cutting.

Loads, and slices, casts and concatenations of nothing but loads, are *remade*: each stage that uses one has its own
copy, because reading an input again is cheaper than a queue. All other ops keep the program's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tilestream.errors import IRError, VerifyError
from tilestream.ir.pipeline import Pipeline, Queue, Stage, Tile, TileOp, Transport
from tilestream.ir.ways import reached

CHEAP = ("load", "slice", "cast", "cat")


@dataclass(frozen=True)
class Body:
    """The ops of a one-stage program: those with a place in the order, and those that are remade where used."""

    program: Pipeline
    ops: tuple[TileOp, ...]
    remade: dict[str, TileOp]

    def width_of(self, cut: int) -> int:
        """Bytes of one row of everything that is made before op ``cut`` and used from it on."""
        return sum(tile.row_bytes for tile in self.crossing(cut))

    def crossing(self, cut: int) -> list[Tile]:
        before = {op.out.name: op.out for op in self.ops[:cut] if op.out is not None}
        used = {n for op in self.ops[cut:] for n in self.needs(op)}
        return [tile for name, tile in before.items() if name in used]

    def needs(self, op: TileOp) -> set[str]:
        """Tiles that ``op`` uses, through what is remade for it."""
        return reached(op.ins, lambda name: self.remade[name].ins if name in self.remade else ())

    def linears(self) -> list[int]:
        return [i for i, op in enumerate(self.ops) if op.kind == "linear"]

    def narrowest_cuts(self) -> list[int]:
        """One cut between each two consecutive linears: the one that the fewest bytes cross.

        Small ops in between so go to the epilogue of the first or the prologue of the second. Among equals the
        last cut wins: what arrives can then be multiplied as it is.
        """
        at = self.linears()
        return [min(range(a + 1, b + 1), key=lambda cut: (self.width_of(cut), -cut)) for a, b in pairwise(at)]

    def pieces(self) -> list[tuple[int, int]]:
        """Where ops begin and end that ``narrowest_cuts`` lie between: a linear in each.

        Raises:
            VerifyError: there is but one.
        """
        made = list(pairwise((0, *self.narrowest_cuts(), len(self.ops))))
        if len(made) < 2:
            raise VerifyError(
                "the region has fewer than two linears: nothing to split over stages", "use strategy='vertical'"
            )
        return made


def body(program: Pipeline, cheap: Sequence[str] = CHEAP) -> Body:
    """Sort the ops of a one-stage program into ordered and remade.

    Raises:
        IRError: the program has several stages.
    """
    if len(program.stages) != 1:
        raise IRError(f"program {program.name!r} has {len(program.stages)} stages", "give all ops to one stage")
    remade: dict[str, TileOp] = {}
    ops: list[TileOp] = []
    for op in program.stages[0].ops:
        if op.kind in cheap and op.out is not None and all(n in remade for n in op.ins):
            remade[op.out.name] = op
        else:
            ops.append(op)
    return Body(program, tuple(ops), remade)


def cut(parts: Body, cuts: Sequence[int], transport: Transport, strategy: str) -> Pipeline:
    """Stages ``s0, s1, ...`` between the ``cuts`` (op indices of ``parts``, ascending), joined by queues.

    A tile that several later stages use has one queue with several consumers.
    """
    bounds = [0, *cuts, len(parts.ops)]
    stages: list[Stage] = []
    home: dict[str, str] = {}
    users: dict[str, list[str]] = {}
    made: set[str] = set()
    for index, (start, stop) in enumerate(pairwise(bounds)):
        name = f"s{index}"
        ops = _stage_ops(parts, parts.ops[start:stop], name, made)
        stages.append(Stage.of(name, ops))
        home |= {op.out.name: name for op in ops if op.out is not None}
        for tile in stages[-1].taken():
            users.setdefault(tile, []).append(name)
    sources = {op.out.name: op.source for op in parts.ops if op.out is not None}
    depth = 0 if transport is Transport.DRAM else 2
    queues = tuple(
        Queue(tile, home[tile], tuple(takers), transport, depth, sources.get(tile, ""))
        for tile, takers in users.items()
    )
    return replace(parts.program, stages=tuple(stages), queues=queues, strategy=strategy)


def _stage_ops(parts: Body, ordered: Sequence[TileOp], stage: str, made: set[str]) -> tuple[TileOp, ...]:
    """``ordered`` with everything remade put in front of its first use; copies are named after the stage."""
    out: list[TileOp] = []
    names: dict[str, str] = {}

    def provide(tile: str) -> str:
        if tile not in parts.remade:
            return tile
        if tile not in names:
            op = parts.remade[tile]
            inner = {n: provide(n) for n in op.ins}
            names[tile] = f"{tile}.{stage}" if tile in made else tile
            made.add(tile)
            out.append(replace(op.reading(inner), out=replace(op.made, name=names[tile])))
        return names[tile]

    for op in ordered:
        out.append(op.reading({n: provide(n) for n in op.ins}))
    return tuple(out)
