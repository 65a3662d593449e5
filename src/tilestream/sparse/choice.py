"""``fuse="auto"``: what to fuse, by what is expected of a program unfused, in a region a layer, and in one region."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilestream.errors import SparseError
from tilestream.sparse.einsum import EinsumProgram, Statement

MOST_STATEMENTS = 48
"""Statements up to which one region for all of them is looked at: it would be cut many times, which takes time."""

Fusion = str | tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Choice:
    """What was chosen (``fuse``), of which alternatives: by their names what each is expected to take, in ``unit``, or
    why it was left out."""

    name: str
    fuse: Fusion
    expected: Mapping[str, float | str] = field(default_factory=dict)
    unit: str = "cycles"

    def __str__(self) -> str:
        found = {n: x if isinstance(x, str) else f"{x:,.0f} {self.unit}" for n, x in self.expected.items()}
        rest = "; ".join(f"{name}: {text}" for name, text in found.items() if name != self.name)
        return f"fuse={self.name}, expected {found.get(self.name, 'unknown')}" + (f" ({rest})" if rest else "")


def layers(program: EinsumProgram) -> Fusion:
    """Operators by layer: a region begins with each product with a sparse tensor from outside, so that what a product
    reads by its neighbours is made once and not once a neighbour."""
    found: list[list[str]] = [[]]
    for statement in program.statements:
        known = any(statement.group in group for group in found)
        if _gathers(program, statement) and found[-1] and not known:
            found.append([])
        if not known:
            found[-1].append(statement.group)
    return tuple(tuple(group) for group in found)


def _gathers(program: EinsumProgram, statement: Statement) -> bool:
    sparse = [
        a
        for a in statement.operands
        if a.tensor in program.inputs and (form := program.inputs[a.tensor].format) and "compressed" in form.levels
    ]
    return statement.op == "mul" and bool(statement.reduced) and bool(sparse) and len(statement.operands) == 2


def choose(program: EinsumProgram, cost: Callable[[Fusion], float]) -> Choice:
    """The fusion that is expected to take the fewest cycles; of equals the first of none, layers, all.

    Args:
        cost: what a fusion is expected to take.

    Raises:
        SparseError: none of them can be had.
    """
    options: dict[str, Any] = {"none": "none", "layers": layers(program), "all": "all"}
    expected: dict[str, float | str] = {}
    refused: list[SparseError] = []
    for name, fuse in options.items():
        if name == "all" and len(program.statements) > MOST_STATEMENTS:
            expected[name] = f"not looked at, {len(program.statements)} statements"
            continue
        if name == "layers" and len(fuse) < 2:
            continue  # the same as all
        try:
            expected[name] = cost(fuse)
        except SparseError as error:
            expected[name] = error.cause
            refused.append(error)
    possible: dict[str, float] = {n: x for n, x in expected.items() if not isinstance(x, str)}
    if not possible:
        raise refused[0]
    best = min(possible, key=possible.__getitem__)
    return Choice(best, options[best], expected)
