"""Which statements make a region: groups of them as the schedule says, in an order in which they can run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tilestream.errors import SparseError
from tilestream.sparse.einsum import EinsumProgram, Move, Statement
from tilestream.sparse.schedule import Schedule


@dataclass(frozen=True)
class Group:
    """Statements to fuse, before lowering."""

    name: str
    statements: tuple[Statement, ...]
    notes: tuple[str, ...] = ()
    whole: bool = True
    """Whether these are all statements of the region that the schedule asked for."""


def check_names(program: EinsumProgram, schedule: Schedule) -> None:
    """Raise ``SparseError`` if the schedule fuses what is not there, or one thing twice."""
    if isinstance(schedule.fuse, str):
        return
    names = {s.name for s in program.statements} | {s.group for s in program.statements}
    given = [name for group in schedule.fuse for name in group]
    if unknown := [x for x in given if x not in names]:
        raise SparseError(f"no statement or operator {unknown[0]!r} to fuse", f"use names among {', '.join(names)}")
    if twice := [x for x in given if given.count(x) > 1]:
        raise SparseError(f"{twice[0]!r} is in two fusion regions", "name it once")


def groups(program: EinsumProgram, schedule: Schedule) -> list[Group]:
    """Statements by region, as the schedule says."""
    if schedule.fuse == "all":
        stages: dict[str, int] = {}
        for step in program.steps:
            reads = step.operands if isinstance(step, Move) else [a.tensor for a in step.operands]
            stage = max((stages.get(x, 0) for x in reads), default=0)
            stages[step.name] = stage + isinstance(step, Move)
        keys = {s.name: str(stages[s.name]) for s in program.statements}
    else:
        named = {x: n for n, group in enumerate(schedule.fuse) for x in group} if schedule.fuse != "none" else {}
        keys = {}
        for s in program.statements:
            number = named.get(s.name, named.get(s.group))
            keys[s.name] = s.group if number is None else f"#{number}"
    made: dict[str, list[Statement]] = {}
    for s in program.statements:
        made.setdefault(keys[s.name], []).append(s)
    return [Group(_name(statements), tuple(statements)) for statements in made.values()]


def _name(statements: Sequence[Statement]) -> str:
    groups = list(dict.fromkeys(s.group for s in statements))
    return groups[0] if len(groups) == 1 else f"{groups[0]}..{groups[-1]}"


def sequence(program: EinsumProgram, parts: Sequence[Group]) -> Iterator[Group | Move]:
    """Groups and moves, each after what it reads."""
    moves = [step for step in program.steps if isinstance(step, Move)]
    waiting: list[Group | Move] = [*parts, *moves]
    position = {step.name: n for n, step in enumerate(program.steps)}
    waiting.sort(key=lambda x: position[x.name if isinstance(x, Move) else x.statements[0].name])
    made = set(program.inputs)
    while waiting:
        ready = next((x for x in waiting if _reads(x) <= made), None)
        if ready is None:
            names = [x.name for x in waiting if isinstance(x, Group)]
            raise SparseError(
                f"regions {', '.join(names[:4])} need each other's results", "fuse statements without a gap between"
            )
        waiting.remove(ready)
        made |= {ready.name} if isinstance(ready, Move) else {s.name for s in ready.statements}
        yield ready


def _reads(step: Group | Move) -> set[str]:
    if isinstance(step, Move):
        return set(step.operands)
    return {a.tensor for s in step.statements for a in s.operands} - {s.name for s in step.statements}


def outputs_of(program: EinsumProgram, statements: Sequence[Statement]) -> list[str]:
    """Results of the statements that something else reads."""
    own = {s.name for s in statements}
    read = set(program.outputs)
    for step in program.steps:
        if isinstance(step, Move):
            read |= set(step.operands)
        elif step.name not in own:
            read |= {a.tensor for a in step.operands}
    return [s.name for s in statements if s.name in read]


def ancestors(statements: Sequence[Statement], name: str) -> tuple[Statement, ...]:
    """The statement of that name and those that it needs, in order."""
    wanted = {name}
    for s in reversed(statements):
        if s.name in wanted:
            wanted |= {a.tensor for a in s.operands}
    return tuple(s for s in statements if s.name in wanted)
