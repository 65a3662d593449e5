"""What follows of a tensor's sign from the statements that make it: what divides by it need not fear a 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tilestream.sparse.einsum import Move, Statement
from tilestream.sparse.storage import SparseTensor

ANY, NOT_BELOW, ABOVE = 0, 1, 2
"""Any value; 0 or more; more than 0, and so stored everywhere. What is not a number counts as any of them."""

_NOT_BELOW = frozenset("exp sigmoid relu abs square sqrt rsqrt acos gt ge lt le eq ne".split())
_KEPT = frozenset("copy identity sqrt cast zeroed".split())


class Signs:
    """Signs of a program's tensors by name, each looked at once."""

    def __init__(self) -> None:
        self._found: dict[str, int] = {}
        self._read = 0

    def of(self, name: str, steps: Sequence[Statement | Move], constants: Mapping[str, SparseTensor]) -> int:
        """One of the three, of the tensor ``name``; ``steps`` are those recorded so far."""
        for step in steps[self._read :]:
            self._found[step.name] = self._after(step, constants)
        self._read = len(steps)
        return self._sign(name, constants)

    def _sign(self, name: str, constants: Mapping[str, SparseTensor]) -> int:
        if name not in self._found and name in constants:
            values, levels = constants[name].values, constants[name].format.levels
            stored = "compressed" not in levels
            low = ABOVE if stored and bool(np.all(values > 0)) else NOT_BELOW
            self._found[name] = low if bool(np.all(values >= 0)) else ANY
        return self._found.get(name, ANY)

    def _after(self, step: Statement | Move, constants: Mapping[str, SparseTensor]) -> int:
        if isinstance(step, Move):
            signs = [self._sign(x, constants) for x in step.operands]
            if step.eager is not None:
                return ANY
            moved = step.kind in ("reshape", "permute", "slice", "cat")
            return min(signs, default=ANY) if moved else min(NOT_BELOW, *signs)
        signs = [self._sign(a.tensor, constants) for a in step.operands]
        if len(signs) == 2:
            return _of_two(step, *signs)
        return _of_one(step, signs[0])


def _of_one(step: Statement, sign: int) -> int:
    scalar, op = step.scalar, step.op
    if scalar is None or op == "cast":
        return sign if op in _KEPT and sign else NOT_BELOW if op in _NOT_BELOW else ANY
    if op == "max":
        return max(sign, ABOVE if scalar > 0 else NOT_BELOW if scalar == 0 else ANY)
    if op in ("add", "mul", "div", "min", "pick") and scalar > 0:
        return ABOVE if op == "add" and sign else min(sign, NOT_BELOW) if op == "pick" else sign
    return NOT_BELOW if op in _NOT_BELOW else ANY


def _of_two(step: Statement, a: int, b: int) -> int:
    op = step.op
    if op == "max":
        return max(a, b)
    if op == "add":
        return max(a, b) if min(a, b) else ANY
    if op in ("gt", "ge", "eq", "ne"):
        return NOT_BELOW
    if op in ("keep", "mask"):
        return min(a, NOT_BELOW) if step.fill == 0 else ANY
    if op in ("mul", "min"):
        return min(a, b)
    return min(a, b, NOT_BELOW) if op in ("div", "share") else ANY
