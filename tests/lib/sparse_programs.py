"""Random einsum programs with their inputs, and what NumPy makes of them: the oracle of the sparse compiler."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from tilestream.sparse.einsum import Access, Declared, EinsumProgram, Statement
from tilestream.sparse.program import declare
from tilestream.sparse.storage import Format, SparseTensor, dense, pack

SIZES = {"i": 4, "j": 3, "k": 4, "l": 3}
EVEN_SIZES = {"i": 4, "j": 2, "k": 4, "l": 2}
"""For blocks of 2. ``i`` and ``k``, and ``j`` and ``l``, have one size, so that one can be read as the other."""
UNARY = {
    "relu": lambda a: np.maximum(a, 0),
    "exp": np.exp,
    "neg": lambda a: -a,
    "abs": np.abs,
    "sigmoid": lambda a: 1 / (1 + np.exp(-a)),
    "square": lambda a: a * a,
    "tanh": np.tanh,
    "cos": np.cos,
    "copy": lambda a: a,
}
BINARY = {
    "mul": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "max": np.maximum,
    "min": np.minimum,
}


@dataclass
class Case:
    """A program, its inputs as stored, and every tensor's value."""

    program: EinsumProgram
    inputs: dict[str, SparseTensor]
    values: dict[str, np.ndarray]


def evaluate(statement: Statement, values: dict[str, np.ndarray], sizes: dict[str, int]) -> np.ndarray:
    """What a statement means, densely."""
    found = [i for a in statement.operands for i in a.indices]
    every = list(dict.fromkeys((*statement.indices, *statement.reduced, *found)))
    operands = []
    for access in statement.operands:
        axes = sorted(range(len(access.indices)), key=lambda n, a=access: every.index(a.indices[n]))
        shape = [sizes[i] if i in access.indices else 1 for i in every]
        value = values[access.tensor].transpose(axes).reshape(shape)
        operands.append(np.broadcast_to(value, [sizes[i] for i in every]))
    if statement.op == "mask":
        made = np.where(operands[1] != 0, operands[0], statement.fill)
    elif statement.scalar is not None:
        made = operands[0] + statement.scalar if statement.op == "add" else operands[0] * statement.scalar
    else:
        made = (BINARY if len(operands) == 2 else UNARY)[statement.op](*operands)
    axes = tuple(n for n, i in enumerate(every) if i in statement.reduced)
    if axes:
        made = made.sum(axis=axes) if statement.reduction == "add" else made.max(axis=axes)
    left = [i for i in every if i not in statement.reduced]
    return made.transpose([left.index(i) for i in statement.indices])


def random_case(seed: int, sizes: dict[str, int] = SIZES, masks: bool = True) -> Case:
    """Up to three tensors of up to three indices, any formats and sparsities, and up to five statements on them."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    inputs: dict[str, SparseTensor] = {}
    declared: dict[str, Declared] = {}
    values: dict[str, np.ndarray] = {}
    tensors: list[tuple[str, tuple[str, ...]]] = []
    for n in range(rng.randint(1, 3)):
        indices = tuple(rng.sample("ijkl", rng.randint(0 if n else 1, 3)))
        shape = [sizes[i] for i in indices]
        array = numbers.standard_normal(shape) * (numbers.random(shape) < rng.choice([0, 0.2, 0.5, 1]))
        order = rng.sample(range(len(indices)), len(indices))
        format = Format(tuple(rng.choice(["dense", "compressed"]) for _ in indices), tuple(order))
        free = rng.random() < 0.2
        inputs[f"A{n}"] = pack(f"A{n}", array, dense(len(indices)) if free else format)
        declared[f"A{n}"] = Declared(array.shape) if free else declare(inputs[f"A{n}"])
        values[f"A{n}"] = array
        tensors.append((f"A{n}", indices))
    statements: list[Statement] = []
    for n in range(rng.randint(1, 5)):
        if masks and rng.random() < 0.1 and (pair := _masked(rng, n, tensors, inputs)):
            shown = evaluate(pair[0], values, sizes)
            if np.abs(shown[np.isfinite(shown)]).max(initial=0) < 8:
                values |= {pair[0].name: shown, pair[1].name: np.exp(shown)}
                statements += pair
                tensors.append((pair[1].name, pair[1].indices))
                continue
        statement = _statement(rng, f"T{n}", tensors, inputs if masks else {})
        made = evaluate(statement, values, sizes)
        if np.abs(made).max(initial=0) > 1e4:
            break
        statements.append(statement)
        values[statement.name] = made
        tensors.append((statement.name, statement.indices))
    used = {a.tensor for s in statements for a in s.operands}
    outputs = tuple(s.name for s in statements if s.name not in used or rng.random() < 0.2)
    shapes = {name: value.shape for name, value in values.items()}
    return Case(EinsumProgram(declared, tuple(statements), outputs, shapes), inputs, values)


def _statement(
    rng: random.Random, name: str, tensors: list[tuple[str, tuple[str, ...]]], inputs: dict[str, SparseTensor]
) -> Statement:
    scalar, kind = None, rng.random()
    if kind < 0.65:
        a = _renamed(rng, tensors[-1] if rng.random() < 0.5 else rng.choice(tensors))
        b = _renamed(rng, rng.choice(tensors))
        every = list(dict.fromkeys(a[1] + b[1]))
        op = rng.choice(["mul", "mul", "mul", "add", "sub", "max", "min", "mask"])
        if op == "mask" and not (b[1] and b[0] in inputs and "dense" not in inputs[b[0]].format.levels):
            op = "mul"
        operands: tuple[Access, ...] = (Access(*a), Access(*b))
    else:
        a = rng.choice(tensors)
        every, operands = list(a[1]), (Access(*a),)
        op = rng.choice(list(UNARY)) if kind < 0.85 else "copy"
        if rng.random() < 0.2:
            op, scalar = rng.choice([("add", 0.5), ("mul", 2.0)])
    share = 0.5 if op in ("mul", "copy") else 0.0 if op == "mask" else 0.06
    reduced = tuple(i for i in every if rng.random() < share)
    kept = [i for i in every if i not in reduced]
    rng.shuffle(kept)
    return Statement(name, tuple(kept), op, operands, reduced, rng.choice(["add", "add", "max"]), scalar)


def _masked(
    rng: random.Random, number: int, tensors: list[tuple[str, tuple[str, ...]]], inputs: dict[str, SparseTensor]
) -> list[Statement]:
    """Minus infinity where a compressed input stores nothing, then its exponential; nothing if there is no such."""
    known = dict(tensors)
    masks = [name for name, t in inputs.items() if known[name] and "dense" not in t.format.levels]
    if not masks:
        return []
    (a, own), mask = rng.choice(tensors), rng.choice(masks)
    indices = list(dict.fromkeys(own + known[mask]))
    rng.shuffle(indices)
    operands = (Access(a, own), Access(mask, known[mask]))
    first = Statement(f"M{number}", tuple(indices), "mask", operands, fill=-np.inf)
    return [first, Statement(f"E{number}", tuple(indices), "exp", (Access(first.name, tuple(indices)),))]


def _renamed(rng: random.Random, tensor: tuple[str, tuple[str, ...]]) -> tuple[str, tuple[str, ...]]:
    """The same tensor read with other indices of the same sizes."""
    name, indices = tensor[0], list(tensor[1])
    if rng.random() < 0.5:
        return tensor
    for same in ("ik", "jl"):
        at = [n for n, i in enumerate(indices) if i in same]
        for n, index in zip(at, rng.sample(same, len(at)), strict=True):
            indices[n] = index
    return name, tuple(indices)
