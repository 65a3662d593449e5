"""``fuse="auto"`` for the loops: products of dense matrices alone, as calls of a library; loops with what follows them.

A processor has no nodes side by side. What fusing saves is a pass over a result and a call; what it must not do is make
a view again, or keep a product from the library. So an operator on elements joins the region that makes what it reads
at its own coordinates. ``(A X) W`` becomes ``A (X W)`` where that takes fewer operations: rows of ``X W`` are narrower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tilestream.errors import SparseError
from tilestream.sparse.choice import Choice, Fusion
from tilestream.sparse.cpu.distributing import distributed, needed, uses
from tilestream.sparse.einsum import MASKS, Access, EinsumProgram, Move, Statement, fresh_name
from tilestream.sparse.lowering.build import plan
from tilestream.sparse.lowering.partition import groups, sequence
from tilestream.sparse.program import Program
from tilestream.sparse.region import Region
from tilestream.sparse.schedule import Schedule

CALL_US = 8.0
"""Microseconds that a region costs beside its work."""
BYTES_PER_US = 1e4
"""Bytes of dense memory that two cores read or write in a microsecond."""
OPERATIONS_PER_US = 5e4
"""Operations of a product of dense matrices in a microsecond; of loops a tenth of them."""


def fused(program: Program) -> Program:
    """The program with the regions that are expected to take least as loops; ``choice`` has the alternatives.

    Raises:
        SparseError: not even an unfused program can be had.
    """
    found: dict[str, tuple[float, Program, Fusion]] = {}
    expected: dict[str, float | str] = {}
    turned, turns = reassociated(distributed(program.einsums))
    options: list[tuple[str, EinsumProgram, Fusion]] = [("none", program.einsums, "none")]
    options.append(("joined", program.einsums, joined(program.einsums)))
    if turns:
        options.append(("joined, " + ", ".join(turns), turned, joined(turned)))
    for name, einsums, fuse in options:
        schedule = replace(program.asked, fuse=fuse)
        try:
            made = program.planned(einsums, schedule, plan(einsums, schedule))
        except SparseError as error:
            if name == "none":
                raise
            expected[name] = error.cause
            continue
        found[name] = _microseconds(einsums, made.steps), made, fuse
        expected[name] = found[name][0]
    best = min(found, key=lambda name: found[name][0])
    _, made, fuse = found[best]
    made.choice = Choice(best, fuse, expected, "us")
    return made


def _microseconds(program: EinsumProgram, steps: Sequence[Region | Move]) -> float:
    """About what steps take: a call each, what they read and write, and their products."""
    total = 0.0
    for step in steps:
        if isinstance(step, Move):
            total += CALL_US / 2
            continue
        read = {a.tensor for s in step.einsums for a in s.operands} - {s.name for s in step.einsums}
        words = sum(_entries(program, name) for name in (*read, *step.outputs))
        total += CALL_US + 4 * words / BYTES_PER_US
        for statement in step.einsums:
            speed = 1.0 if is_matmul(program, statement) else 0.1
            total += operations(program, statement) / (OPERATIONS_PER_US * speed)
    return total


def _entries(program: EinsumProgram, name: str) -> float:
    """Numbers that a tensor stores."""
    declared = program.inputs.get(name)
    if declared is not None and declared.extents:
        return math.prod(declared.extents)
    return math.prod(program.shapes[name])


def operations(program: EinsumProgram, statement: Statement) -> float:
    """Multiplications and additions of a statement, of a sparse operand for its entries only."""
    sizes = _sizes(program, statement)
    every = math.prod(sizes.values())
    for access in statement.operands:
        whole = math.prod(sizes[i] for i in access.indices)
        every *= min(1.0, _entries(program, access.tensor) / max(1, whole))
    return 2 * every


def _sizes(program: EinsumProgram, statement: Statement) -> dict[str, int]:
    return {i: n for a in statement.operands for i, n in zip(a.indices, program.shapes[a.tensor], strict=True)}


def _is_sparse(program: EinsumProgram, name: str) -> bool:
    declared = program.inputs.get(name)
    if declared is not None:
        return declared.format is not None and "compressed" in declared.format.levels
    move = next((s for s in program.steps if s.name == name and isinstance(s, Move)), None)
    if move is None:
        return False
    return move.kind in (*MASKS, "adjacency") or any(_is_sparse(program, one) for one in move.operands)


def is_matmul(program: EinsumProgram, statement: Statement) -> bool:
    """Whether a statement sums products of two dense tensors over an index that both have."""
    product = statement.op == "mul" and len(statement.operands) == 2 and statement.scalar is None
    if not product or len(statement.reduced) != 1 or statement.reduction != "add":
        return False
    both = all(statement.reduced[0] in a.indices for a in statement.operands)
    return both and not any(_is_sparse(program, a.tensor) for a in statement.operands)


def joined(program: EinsumProgram) -> Fusion:
    """Operators by region: one that works element by element with what makes an operand of it, at its coordinates."""
    members: dict[str, list[Statement]] = {}
    for statement in program.statements:
        members.setdefault(statement.group, []).append(statement)
    region = {name: name for name in members}
    makers = {s.name: s for s in program.statements}

    def parts() -> list[tuple[str, ...]]:
        made: dict[str, list[str]] = {}
        for name in members:
            made.setdefault(region[name], []).append(name)
        return [tuple(names) for names in made.values()]

    for group, statements in members.items():
        for access in _reads_in_place(statements):
            maker = makers.get(access.tensor)
            if maker is None or region[maker.group] == region[group] or is_matmul(program, maker):
                continue
            before, kept = region[group], dict(region)
            region.update({n: region[maker.group] for n, r in kept.items() if r == before})
            if _runs(program, tuple(parts())):
                break
            region.update(kept)
    return tuple(parts())


def _reads_in_place(statements: Sequence[Statement]) -> list[Access]:
    """Operands that an operator of one statement reads element by element, each once."""
    if len(statements) != 1 or statements[0].reduced:
        return []
    (one,) = statements
    return [a for a in one.operands if sorted(a.indices) == sorted(one.indices) and one.indices]


def _runs(program: EinsumProgram, fuse: tuple[tuple[str, ...], ...]) -> bool:
    """Whether regions can run one after the other."""
    try:
        return bool(list(sequence(program, groups(program, Schedule(fuse=fuse)))))
    except SparseError:
        return False


def reassociated(program: EinsumProgram) -> tuple[EinsumProgram, list[str]]:
    """The program with ``(A X) W`` as ``A (X W)``, where A is sparse and that takes fewer operations; what turned."""
    turned: list[str] = []
    while (found := _turn(program)) is not None:
        program, name = found
        turned.append(name)
    return needed(program), turned


def _turn(program: EinsumProgram) -> tuple[EinsumProgram, str] | None:
    makers = {s.name: s for s in program.statements}
    for last in program.statements:
        if not is_matmul(program, last):
            continue
        for n, access in enumerate(last.operands):
            first = makers.get(access.tensor)
            pair = None
            if first is not None and _sums_rows(program, first):
                pair = _swapped(program, first, last, n)
            if first is None or pair is None:
                continue
            shapes = {**program.shapes, pair[0].name: _shape(program, pair[0])}
            steps = [x for step in program.steps for x in (pair if step is last else (step,))]
            made = replace(program, steps=tuple(steps), shapes=shapes)
            before = operations(program, last) + (operations(program, first) if uses(program, first.name) == 1 else 0)
            if sum(operations(made, one) for one in pair) < before:
                return made, f"{first.name} after {last.name}"
    return None


def _sums_rows(program: EinsumProgram, statement: Statement) -> bool:
    product = statement.op == "mul" and len(statement.operands) == 2 and statement.scalar is None
    sparse = [_is_sparse(program, a.tensor) for a in statement.operands]
    return product and len(statement.reduced) == 1 and statement.reduction == "add" and sum(sparse) == 1


def _shape(program: EinsumProgram, statement: Statement) -> tuple[int, ...]:
    sizes = _sizes(program, statement)
    return tuple(sizes[i] for i in statement.indices)


def _swapped(program: EinsumProgram, first: Statement, last: Statement, at: int) -> tuple[Statement, Statement] | None:
    """``T_ij = sum_k A_ik X_kj; U_il = sum_j T_ij W_jl`` as ``V_kl = sum_j X_kj W_jl; U_il = sum_k A_ik V_kl``."""
    own, weight = last.operands[at], last.operands[1 - at]
    names = dict(zip(first.indices, own.indices, strict=True))
    inner = first.reduced[0]
    if inner in {*last.indices, *last.reduced, *names.values()} or len(set(names.values())) != len(names):
        names[inner] = next(x for x in "zyxwvutsrq" if x not in {*last.indices, *last.reduced, *names.values()})
    else:
        names[inner] = inner
    a, x = sorted(first.operands, key=lambda one: not _is_sparse(program, one.tensor))
    a, x = (Access(one.tensor, tuple(names[i] for i in one.indices)) for one in (a, x))
    column = last.reduced[0]
    if column in a.indices or column not in x.indices or set(weight.indices) & set(a.indices):
        return None
    kept = tuple(i for i in dict.fromkeys((*x.indices, *weight.indices)) if i != column)
    name = fresh_name(f"{last.name}_first", set(program.shapes))
    product = replace(last, name=name, indices=kept, operands=(x, weight), reduced=(column,), group=name)
    rows = replace(last, operands=(a, Access(name, kept)), reduced=(names[inner],))
    if set(rows.indices) | set(rows.reduced) != set(a.indices) | set(kept):
        return None
    return product, rows
