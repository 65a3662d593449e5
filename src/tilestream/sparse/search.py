"""Search over schedules: fusion granularity, index order, parallel factors, block size (FuseFlow section 7).

Every candidate is compiled and estimated without running it; those that another one beats by ``slack`` in both cycles
and bytes are dropped; the others are simulated, most promising first, until the budget is spent.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.table import Table

from tilestream.errors import OptionError, SparseError, StreamDeadlock
from tilestream.sparse import pareto
from tilestream.sparse.checks import compare
from tilestream.sparse.expected import estimate_program, on_chip_bytes
from tilestream.sparse.lowering.build import Region
from tilestream.sparse.orders.heuristic import Estimate
from tilestream.sparse.program import Program
from tilestream.sparse.schedule import Schedule

Compile = Callable[[Schedule], Program]
"""A schedule to the compiled program; for another block size it may pack its inputs anew."""


@dataclass(frozen=True)
class Space:
    """What may vary.

    ``orders``: how many index orders of a fusion are tried. ``factors``: parallel factors beside 1.
    ``indices``: which indices are made parallel; empty: the outermost of each region. ``blocks``: edges of the blocks.
    ``most``: candidates that are compiled and estimated at most.
    """

    orders: int = 4
    factors: tuple[int, ...] = (2, 4)
    indices: tuple[str, ...] = ()
    blocks: tuple[int, ...] = (1,)
    most: int = 200

    def __post_init__(self) -> None:
        if self.orders < 1 or self.most < 1:
            raise OptionError(f"a space of {self.orders} orders and {self.most} candidates", "use 1 or more")
        if wrong := [x for x in (*self.factors, *self.blocks) if x < 1]:
            raise OptionError(f"a factor or block of {wrong[0]}", "use 1 or more")


@dataclass(frozen=True)
class Candidate:
    """A schedule that compiles, with what is expected of it."""

    schedule: Schedule
    program: Program = field(repr=False, compare=False)
    estimate: Estimate = field(repr=False)
    on_chip_bytes: float


@dataclass(frozen=True)
class Point:
    """A simulated schedule. ``on_chip_bytes``: channels of the searched depth, and accumulators."""

    schedule: Schedule
    cycles: int
    bytes: int
    flops: int
    on_chip_bytes: int
    estimate: Estimate = field(repr=False)

    @property
    def objectives(self) -> tuple[float, ...]:
        return (self.cycles, self.bytes, self.on_chip_bytes)


@dataclass(frozen=True)
class Found:
    """What a search gave. ``refused``: why candidates did not compile or run, with how many each. ``longest``: the step
    that took most of ``seconds``, in words."""

    points: tuple[Point, ...]
    estimated: int
    pruned: int
    unsimulated: int
    refused: dict[str, int]
    seconds: float
    longest: str = ""

    @property
    def front(self) -> list[Point]:
        return pareto.front(self.points, lambda p: p.objectives)

    @property
    def best(self) -> Point:
        """Fewest cycles; of equals, fewest bytes."""
        return min(self.points, key=lambda p: p.objectives)

    def table(self) -> Table:
        made = Table(box=None, pad_edge=False)
        for column in ("cycles", "bytes", "on-chip bytes", "operations", "estimated cycles"):
            made.add_column(column, justify="right")
        made.add_column("schedule", overflow="fold")
        for p in self.front:
            counts = (p.cycles, p.bytes, p.on_chip_bytes, p.flops, round(p.estimate.cycles))
            made.add_row(*(f"{c:,}" for c in counts), str(p.schedule))
        return made

    def plot(self) -> str:
        """SVG: cycles against bytes, on-chip memory as area, the front in red."""
        front = set(map(id, self.front))
        items = [(str(p.schedule), p.cycles, p.bytes, p.on_chip_bytes, id(p) in front) for p in self.points]
        return pareto.plot(items, ("cycles", "bytes", "on-chip bytes"))

    def json(self) -> dict[str, Any]:
        front = set(map(id, self.front))
        points = [
            {
                "schedule": str(p.schedule),
                "cycles": p.cycles,
                "bytes": p.bytes,
                "flops": p.flops,
                "on_chip_bytes": p.on_chip_bytes,
                "estimated_cycles": p.estimate.cycles,
                "estimated_bytes": p.estimate.bytes,
                "pareto": id(p) in front,
            }
            for p in self.points
        ]
        counts = {"estimated": self.estimated, "pruned": self.pruned, "unsimulated": self.unsimulated}
        return {"best": str(self.best.schedule), "points": points, **counts, "refused": self.refused}


def _once(make: Compile, took: dict[str, float]) -> Compile:
    """``make`` that compiles each schedule once; ``took``: seconds of each, added to."""
    made: dict[str, Program | SparseError] = {}

    def compiled(schedule: Schedule) -> Program:
        key, began = str(schedule), time.perf_counter()
        if key not in made:
            try:
                made[key] = make(schedule)
            except SparseError as error:
                made[key] = error
            took[f"compiling {key}"] = time.perf_counter() - began
        found = made[key]
        if isinstance(found, SparseError):
            raise found
        return found

    return compiled


class _OverBudget(Exception):
    """The seconds of a search are over."""


def search(
    make: Compile,
    inputs: Sequence[Any] = (),
    space: Space | None = None,
    *,
    budget_s: float = 60.0,
    slack: float = 2.0,
    depth: int = 64,
    bounded: bool = False,
    start: Schedule | None = None,
    progress: Callable[[str], None] = lambda line: None,
    expected: Sequence[torch.Tensor] | Callable[[], Sequence[torch.Tensor] | None] | None = None,
    **run: Any,
) -> Found:
    """The schedules of ``space`` that are worth knowing, by simulation.

    Args:
        inputs: what the program runs on.
        budget_s: seconds for everything; at least one candidate is compiled and simulated. A simulation that is under
            way when they are over is given up, but for the first.
        slack: a candidate is pruned if another is expected to be this many times better in cycles and in bytes.
        depth: slots of a channel, for the on-chip memory.
        bounded: simulate with channels of that depth; what deadlocks is refused.
        start: what every candidate takes the rest of its choices from.
        expected: what PyTorch gives, or what makes it; every simulated candidate is held against it.
        run: further arguments of ``Program.run``.

    Raises:
        SparseError: no candidate compiles and runs (the commonest reason is named), or one gives wrong values.
        OptionError: a slack below 1, or an index to make parallel that the program does not have.
    """
    if slack < 1:
        raise OptionError(f"a slack of {slack}", "use 1 or more")
    space, start, began = space or Space(), start or Schedule(), time.perf_counter()
    _check_indices(make, space, start)
    refused: dict[str, int] = {}
    took: dict[str, float] = {}
    make = _once(make, took)
    found = schedules(make, space, start, refused)
    expected = expected() if callable(expected) else expected
    until_s = began + budget_s / 2

    points: list[Point] = []

    def hurry(line: str) -> None:
        progress(line)
        if points and time.perf_counter() - began > budget_s:
            raise _OverBudget

    candidates = _estimated(itertools.islice(found, space.most), make, inputs, depth, until_s, refused, progress)
    kept = prune(candidates, slack)
    left = len(kept)
    for candidate in kept:
        if points and time.perf_counter() - began > budget_s:
            break
        left -= 1
        progress(f"simulating {len(points) + 1} of {len(kept)}: {candidate.schedule}")
        last = time.perf_counter()
        try:
            ran = candidate.program.run(*inputs, depth=depth if bounded else None, progress=hurry, **run)
        except _OverBudget:
            left += 1
            break
        except (SparseError, StreamDeadlock) as error:
            refused[error.cause] = refused.get(error.cause, 0) + 1
            continue
        took[f"simulating {candidate.schedule}"] = time.perf_counter() - last
        if expected is not None and not (found := compare(ran.outputs, expected, candidate.program.bits)).ok:
            raise SparseError(
                f"{candidate.schedule} gives other values: {found}", "report the program and the schedule"
            )
        chip = round(candidate.on_chip_bytes)
        points.append(Point(candidate.schedule, ran.cycles, ran.bytes, ran.flops, chip, candidate.estimate))
    if not points:
        why = max(refused, key=lambda k: refused[k]) if refused else "the space is empty"
        raise SparseError(f"no schedule compiles and runs: {why}", "widen the space, or change the program")
    seconds = time.perf_counter() - began
    slowest = max(took, key=lambda what: took[what])
    longest = f"{slowest} took {took[slowest]:.1f} s"
    return Found(tuple(points), len(candidates), len(candidates) - len(kept), left, refused, seconds, longest)


def _estimated(
    found: Iterable[Schedule],
    make: Compile,
    inputs: Sequence[Any],
    depth: int,
    until_s: float,
    refused: dict[str, int],
    progress: Callable[[str], None],
) -> list[Candidate]:
    """Candidates of different schedules, with what they are expected to take, until the clock shows ``until_s``.

    Args:
        refused: how often schedules do not compile, by cause; added to.
    """
    candidates: list[Candidate] = []
    seen: set[str] = set()
    for schedule in found:
        if candidates and time.perf_counter() > until_s:
            break
        if str(schedule) in seen:
            continue
        seen.add(str(schedule))
        try:
            program = make(schedule)
            estimate = estimate_program(program, inputs)
        except SparseError as error:
            refused[error.cause] = refused.get(error.cause, 0) + 1
            continue
        chip = sum(on_chip_bytes(r.graph, depth, r.outputs) for r in program.regions)
        candidates.append(Candidate(schedule, program, estimate, chip))
        progress(
            f"estimated {len(candidates)} schedules; best {min(c.estimate.cycles for c in candidates):,.0f} cycles"
        )
    return candidates


def prune(candidates: Sequence[Candidate], slack: float) -> list[Candidate]:
    """Those that no other is expected to beat by ``slack`` in cycles and in bytes, fewest cycles first."""
    kept = [
        c
        for c in candidates
        if not any(
            o.estimate.cycles * slack < c.estimate.cycles and o.estimate.bytes * slack < c.estimate.bytes
            for o in candidates
        )
    ]
    return sorted(kept, key=lambda c: (c.estimate.cycles, c.estimate.bytes))


def _check_indices(make: Compile, space: Space, start: Schedule) -> None:
    if not space.indices:
        return
    known = dict.fromkeys(index for region in make(replace(start, fuse="none")).regions for index in region.order)
    for index in space.indices:
        if index not in known:
            raise OptionError(f"no index {index!r} to make parallel", f"the program has {', '.join(known)}")


def schedules(make: Compile, space: Space, start: Schedule, refused: dict[str, int]) -> Iterator[Schedule]:
    """The schedules of a space: every fusion in its default order first, then of each its orders and factors."""
    first = [replace(start, fuse=fuse, block=block) for block in space.blocks for fuse in fusions(make, start)]
    yield from first
    for schedule in first:
        try:
            regions = make(schedule).regions
        except SparseError as error:
            refused[error.cause] = refused.get(error.cause, 0) + 1
            continue
        for order in range(space.orders):
            chosen = {r.name: found[order % len(found)] for r in regions if (found := _orders(r, space.orders))}
            yield replace(schedule, order=chosen)
        indices = space.indices or tuple(dict.fromkeys(r.order[0] for r in regions if r.order))
        for index, factor in itertools.product(indices, space.factors):
            if factor > 1:
                yield replace(schedule, parallel={index: factor})


def _orders(region: Region, most: int) -> list[tuple[str, ...]]:
    """Orders that the tensors' formats admit, then others, for which tensors are read from permuted copies."""
    listed = list(region.orders[:most])
    for order in itertools.permutations(region.order):
        if len(listed) >= most:
            break
        if order not in listed:
            listed.append(order)
    return listed


def fusions(make: Compile, start: Schedule) -> list[Any]:
    """None, all, and every way to cut the program's statements once, twice if they are few."""
    names = list(dict.fromkeys(s.group for r in make(replace(start, fuse="none")).regions for s in r.einsums))
    made: list[Any] = ["none", "all"]
    for cuts in range(1, min(len(names) - 1, 3 if len(names) <= 6 else 2)):  # more cuts would be none fused
        for at in itertools.combinations(range(1, len(names)), cuts):
            edges = (0, *at, len(names))
            made.append(tuple(tuple(names[a:b]) for a, b in itertools.pairwise(edges)))
    return made[: 2 + len(names) * len(names)]
