"""Tile ops as C++, one after another: the one program, however the elements of tiles lie in the threads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from tilestream.ir.axes import View
from tilestream.ir.pipeline import TileOp
from tilestream.ir.tileops import OPS
from tilestream.kernels.parts.snippets import expression, literal

Value = tuple[str, ...]
"""C++ of what a thread computes of a tile side by side: an element, or two neighbours in a row."""

NEUTRAL = {"sum": literal(0.0), "max": literal(float("-inf"))}
"""What a row's reduction of each kind begins with."""

_TOGETHER = {"silu": "silu_pair"}
"""Functions that cost less for two values than twice (math.cuh)."""


class Elements(ABC):
    """Tile ops become statements: each value is named once, and read by its name.

    A way for elements to lie says what names are, and how a row is reduced. Norms are ops here: sums of rows, and what
    is computed of those (``ir.macros``).

    Args:
        values: C++ of tiles that are there.
        vectors: of tensors without rows, biases and scalars, that ops read.

    Attributes:
        lines: the statements so far.
        count: values that were named.
    """

    def __init__(self, values: Mapping[str, Value] | None = None, vectors: Mapping[View, Value] | None = None) -> None:
        self.values, self.vectors = dict(values or {}), dict(vectors or {})
        self.lines: list[str] = []
        self.count = 0

    def run(self, ops: Iterable[TileOp]) -> None:
        """Compute what ``ops`` make, in order. What loads bring is among the values."""
        for op in ops:
            if op.kind == "load":
                continue
            operands = [self.value(name) for name in op.ins]
            operands += [self.vector(op, view) for view in op.views[len(op.tiles) :]]
            made = self.reduced if OPS[op.kind].family == "reduce" else self.computed
            self.values[op.made.name] = made(op, operands)

    def taken(self) -> list[str]:
        """The statements since it was asked last."""
        lines, self.lines = self.lines, []
        return lines

    def value(self, tile: str) -> Value:
        """C++ of a tile, which is fetched where no op made it."""
        if tile not in self.values:
            self.values[tile] = self.fetched(tile)
        return self.values[tile]

    def fetched(self, tile: str) -> Value:
        """C++ of a tile that lies elsewhere."""
        raise KeyError(tile)

    def number(self) -> int:
        """Of the next value."""
        self.count += 1
        return self.count - 1

    def vector(self, op: TileOp, view: View) -> Value:
        """C++ of the elements of a tensor without rows that ``op`` reads."""
        return self.vectors[view]

    @abstractmethod
    def computed(self, op: TileOp, operands: Sequence[Value]) -> Value:
        """C++ of what an elementwise op makes."""

    @abstractmethod
    def reduced(self, op: TileOp, operands: Sequence[Value]) -> Value:
        """C++ of what a reduction of rows makes: of a row its sum, or its maximum."""


def expressions(op: TileOp, operands: Sequence[Value]) -> list[str]:
    """An elementwise op on each of the elements that lie side by side."""
    return [expression(op, list(each)) for each in zip(*operands, strict=True)]


class Pairs(Elements):
    """Two neighbours ``v0[0]`` and ``v0[1]`` of each tile, in a thread that knows nothing of the rest of a row."""

    def computed(self, op: TileOp, operands: Sequence[Value]) -> Value:
        name = f"v{self.number()}"
        if op.kind in _TOGETHER:
            self.lines += [f"float {name}[2];", f"{_TOGETHER[op.kind]}({', '.join(operands[0])}, {name});"]
        else:
            self.lines.append(f"const float {name}[2] = {{{', '.join(expressions(op, operands))}}};")
        return both(f"{name}[e]")

    def reduced(self, op: TileOp, operands: Sequence[Value]) -> Value:
        raise NotImplementedError(f"{op.kind} wants whole rows")


def both(form: str) -> Value:
    """Two neighbours, of what ``form`` says of neighbour ``[e]``."""
    return form.replace("[e]", "[0]"), form.replace("[e]", "[1]")


def registers(fragment: str) -> Value:
    """A lane's pair (i, j) in accumulators."""
    return f"TS_REG({fragment}, 4 * i + 2 * j)", f"TS_REG({fragment}, 4 * i + 2 * j + 1)"
