"""The schedule of a sparse program: what is fused, in what order it iterates, how wide, in what blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tilestream.errors import SparseError
from tilestream.sparse.orders.pog import MAX_ORDERS

Order = int | tuple[str, ...]


LANES, EDGE = 1_024, 4_096
"""Lanes of an index, each a copy of the nodes below it, and the edge of a block: at most."""


@dataclass(frozen=True)
class Schedule:
    """What the compiler is free to choose. ``repr`` is code that makes the same schedule.

    Attributes:
        fuse: ``"auto"``: the one of the others that is expected to take the fewest cycles (``sparse.choice``).
            ``"none"``: one region an operator (a softmax is one). ``"all"``: as much as fits together.
            Otherwise regions by the names of operators or statements; what is not named stands alone.
        order: the dataflow order: by region name, or one for all; a tuple of indices, outermost first, or a number in
            the list of topological orders (``Program.orders``). Unset: the cheapest by the compiler's estimate.
        parallel: lanes by index, or by ``"region:index"``.
        block: edge of the square blocks that values are; 1: scalars.
        locate: find coordinates in dense levels by location, where the released code's option does.
        max_orders: how many topological orders are looked at.

    Raises:
        SparseError: a value outside its range.
    """

    fuse: Literal["auto", "none", "all"] | tuple[tuple[str, ...], ...] = "auto"
    order: Order | Mapping[str, Order] | None = None
    parallel: Mapping[str, int] = field(default_factory=dict)
    block: int = 1
    locate: bool = True
    max_orders: int = MAX_ORDERS

    def __post_init__(self) -> None:
        if isinstance(self.fuse, str) and self.fuse not in ("auto", "none", "all"):
            raise SparseError(
                f"fuse={self.fuse!r}", 'use "auto", "none", "all", or a tuple of tuples of statement names'
            )
        if isinstance(self.order, list):
            object.__setattr__(self, "order", tuple(self.order))
        if self.block < 1:
            raise SparseError(f"block={self.block}", "use 1 for scalars, or the edge of the blocks")
        if wrong := [i for i, ways in self.parallel.items() if ways < 1]:
            raise SparseError(f"parallel: {self.parallel[wrong[0]]} lanes of {wrong[0]!r}", "use 1 or more")
        if most := [i for i, ways in self.parallel.items() if ways > LANES]:
            raise SparseError(f"parallel: {self.parallel[most[0]]:,} lanes of {most[0]!r}", f"use at most {LANES:,}")
        if self.block > EDGE:
            raise SparseError(f"block={self.block:,}", f"use at most {EDGE:,}")
        if self.max_orders < 1:
            raise SparseError(f"max_orders={self.max_orders}", "use 1 or more")

    def order_of(self, region: str) -> Order | None:
        """The order set for a region, or None."""
        if isinstance(self.order, Mapping):
            return self.order.get(region)
        return self.order

    def lanes_of(self, region: str) -> dict[str, int]:
        """Lanes by index in a region."""
        here = {}
        for key, ways in self.parallel.items():
            name, _, index = key.rpartition(":")
            if not name or name == region:
                here[index] = ways
        return here

    def __repr__(self) -> str:
        default = {"fuse": "auto", "order": None, "parallel": {}, "block": 1, "locate": True, "max_orders": MAX_ORDERS}
        given = {name: getattr(self, name) for name in default}
        given |= {"parallel": dict(self.parallel)}
        given |= {"order": dict(self.order)} if isinstance(self.order, Mapping) else {}
        text = ", ".join(f"{name}={value!r}" for name, value in given.items() if value != default[name])
        return f"Schedule({text})"
