"""Products of what was put side by side or added, as sums of products: ``(X, Y) W`` is ``X W1 + Y W2``.

It pays where the parts were gathered: a gather of a product has narrower rows than a product of what was gathered.
"""

from __future__ import annotations

from dataclasses import replace

from tilestream.sparse.einsum import Access, EinsumProgram, Move, Statement, fresh_name


def uses(program: EinsumProgram, name: str) -> int:
    """How often a tensor is read, as an output too."""
    read = [a for s in program.steps for a in (s.operands if isinstance(s, Move) else [x.tensor for x in s.operands])]
    return read.count(name) + program.outputs.count(name)


def needed(program: EinsumProgram) -> EinsumProgram:
    """The program without steps that nothing reads."""
    while True:
        kept = tuple(step for step in program.steps if uses(program, step.name))
        if len(kept) == len(program.steps):
            return program
        program = replace(program, steps=kept)


def distributed(program: EinsumProgram) -> EinsumProgram:
    """The program with every product of a concatenation, a sum or a difference that only it reads as several."""
    while (made := _apart(program)) is not None:
        program = needed(made)
    return program


def _apart(program: EinsumProgram) -> EinsumProgram | None:
    makers = {step.name: step for step in program.steps}
    for last in program.statements:
        product = last.op == "mul" and len(last.operands) == 2 and last.scalar is None and len(last.reduced) == 1
        if not product or last.reduction != "add" or any(last.reduced[0] not in a.indices for a in last.operands):
            continue
        for n, access in enumerate(last.operands):
            maker = makers.get(access.tensor)
            if maker is None or uses(program, maker.name) != 1:
                continue
            found = _of_parts(program, last, n, maker) if isinstance(maker, Move) else _of_sum(last, n, maker)
            if found:
                return _replaced(program, last, *found)
    return None


Parts = tuple[str, list[Access], list[tuple[Access, Move | None]]]
"""How the products of the parts are joined, the parts, and the other factor of each: as it is, or cut by a move."""


def _of_parts(program: EinsumProgram, last: Statement, at: int, maker: Move) -> Parts | None:
    own, weight = last.operands[at], last.operands[1 - at]
    column = last.reduced[0]
    if maker.kind != "cat" or len(maker.operands) != 2 or own.indices.index(column) != maker.args[0]:
        return None
    taken, dim, start = set(program.shapes), weight.indices.index(column), 0
    cuts: list[tuple[Access, Move | None]] = []
    for part in maker.operands:
        size = program.shapes[part][maker.args[0]]
        shape = tuple(size if d == dim else n for d, n in enumerate(program.shapes[weight.tensor]))
        name = fresh_name(f"{weight.tensor}_part", taken)
        cuts.append((Access(name, weight.indices), Move(name, "slice", (weight.tensor,), shape, (dim, start, 1))))
        start += size
    return "add", [Access(part, own.indices) for part in maker.operands], cuts


def _of_sum(last: Statement, at: int, maker: Statement) -> Parts | None:
    own, weight = last.operands[at], last.operands[1 - at]
    plain = maker.op in ("add", "sub") and len(maker.operands) == 2 and not maker.reduced
    if not plain or any(sorted(a.indices) != sorted(maker.indices) for a in maker.operands):
        return None
    names = dict(zip(maker.indices, own.indices, strict=True))
    parts = [Access(a.tensor, tuple(names[i] for i in a.indices)) for a in maker.operands]
    return maker.op, parts, [(weight, None), (weight, None)]


def _replaced(
    program: EinsumProgram, last: Statement, op: str, parts: list[Access], others: list[tuple[Access, Move | None]]
) -> EinsumProgram:
    taken, shapes = set(program.shapes), dict(program.shapes)
    made: list[Statement | Move] = []
    products: list[Access] = []
    for part, (other, move) in zip(parts, others, strict=True):
        if move is not None:
            made.append(move)
            shapes[move.name] = move.shape
            taken.add(move.name)
        name = fresh_name(f"{last.name}_part", taken)
        made.append(replace(last, name=name, operands=(part, other), group=name))
        shapes[name] = program.shapes[last.name]
        products.append(Access(name, last.indices))
    made.append(replace(last, op=op, operands=tuple(products), reduced=()))
    steps = [one for step in program.steps for one in (made if step is last else [step])]
    return replace(program, steps=tuple(steps), shapes=shapes)
