"""Instructions that one element of an operator takes: those of the tile ops that it becomes, counted as it is lowered.

The kernels of ours, of Inductor and of PyTorch compute the same functions with the same instructions; what else a
library's kernel issues for an element is the simulator's to say (``simulator.library.streams``). Counts of tile ops are
held against machine code (``ir.tileops``).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from tilestream.graph.costs.table import row
from tilestream.graph.nodes import Unsupported, packet, value
from tilestream.graph.operators import ELEMENTWISE
from tilestream.ir.dtypes import DTYPES
from tilestream.ir.pipeline import Tile
from tilestream.ir.tileops import OPS

COMPLEX = 6.0
"""Of a product of complex numbers: four multiplications, two additions."""


@dataclass(frozen=True)
class Each:
    """Instructions an element, by pipe."""

    lanes: float
    special: float


def each(node: fx.Node) -> Each:
    """The cost of one element of ``node``; of which elements, ``Row.per`` says."""
    entry, rule = row(packet(node)), ELEMENTWISE.get(packet(node))
    if entry.tile:
        return Each(OPS[entry.tile].lanes, OPS[entry.tile].transcendental)
    if rule is None:
        return Each(entry.lanes, entry.special)
    made = value(node)
    if made is not None and made.dtype.is_complex:
        return Each(COMPLEX if entry.label == "mul" else 1.0, 0.0)
    counted = _Counted()
    try:
        rule(counted, node)
    except Unsupported:  # a power that has no tile op, a division that rounds
        return Each(entry.lanes, entry.special)
    return Each(counted.lanes, counted.special)


class _Counted:
    """Takes what an elementwise operator writes (``operators.writes``), and adds up what it issues."""

    def __init__(self) -> None:
        self.lanes = self.special = 0.0

    def frame(self, node: fx.Node, /, *operands: object) -> None:
        return None

    def operand(self, node: object, frame: None = None, /) -> Tile | float:
        return float(node) if isinstance(node, bool | int | float) else self.tile(node)

    def tile(self, node: object, frame: None = None, /) -> Tile:
        fake = value(node)
        return _some(DTYPES.get(fake.dtype, "f32") if fake is not None else "f32")

    def unary(self, kind: str, x: Tile, dtype: str, /, **attrs: float | int | str) -> Tile:
        return self._add(kind, dtype)

    def binary(self, kind: str, left: Tile | str | float, right: Tile | str | float, dtype: str, /) -> Tile:
        return self._add(kind, dtype)

    def _add(self, kind: str, dtype: str) -> Tile:
        self.lanes += OPS[kind].lanes
        self.special += OPS[kind].transcendental
        return _some(dtype)


def _some(dtype: str) -> Tile:
    """Any tile of a dtype: a cost asks for no more."""
    return Tile.of("any", 1, dtype)
