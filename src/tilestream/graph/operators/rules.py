"""The rules of operators, by the operators that they are of: each is written where the rule is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import fx

from tilestream.graph.lowering import Emitter
from tilestream.graph.nodes import RESHAPES, aten
from tilestream.graph.operators.writes import Writes
from tilestream.ir.pipeline import Tile

Rule = Callable[[Emitter, fx.Node], Tile]
"""Appends what a node computes; returns the tile that holds its elements in row-major order."""

Elementwise = Callable[[Writes, fx.Node], Tile]
"""Such a rule that says nothing of dimensions."""

RULES: dict[object, Rule] = {}

ELEMENTWISE: dict[object, Elementwise] = {}
"""Those of operators that know nothing of dimensions: lowering to other axes than rows can share them."""

SHAPES = {
    *(*RESHAPES, aten.unsqueeze, aten.squeeze, aten.expand),
    *(aten.clone, aten.contiguous, aten.detach, aten.alias),
}
"""Operators that leave elements in their order, or repeat them."""
REDUCTIONS = {aten.sum: "sum", aten.mean: "mean", aten.amax: "max", aten.amin: "min"}
"""Over features, with what they are called."""

R = TypeVar("R", bound=Rule)
E = TypeVar("E", bound=Elementwise)


def rule(*operators: object) -> Callable[[R], R]:
    """What follows is the rule of these operators, without overloads."""

    def taken(function: R) -> R:
        RULES.update(dict.fromkeys(operators, function))
        return function

    return taken


def elementwise(*operators: object) -> Callable[[E], E]:
    """Likewise of operators that know nothing of dimensions."""

    def taken(function: E) -> E:
        ELEMENTWISE.update(dict.fromkeys(operators, function))
        return rule(*operators)(function)

    return taken
