"""What code that makes a view in one go (a product, a sum of rows) needs of the nests that it stands in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

from tilestream.sparse.cpu.leaves import Leaves
from tilestream.sparse.cpu.scope import Scope
from tilestream.sparse.fusion import Op, View
from tilestream.sparse.region import Region


class Making(Leaves, ABC):
    """Code under construction. ``buffers``: size and dtype of the arrays that it works in."""

    def __init__(self, region: Region, dense: Collection[str], free: Collection[str]) -> None:
        super().__init__(region, dense, free)
        self.buffers: dict[str, tuple[int, str]] = {}

    def buffer(self, base: str, size: int, dtype: str = "real") -> str:
        made = self.name(base)
        self.buffers[made] = max(1, size), dtype
        return made

    def enter(self, op: Op, index: str, scope: Scope) -> None:
        """Begin a loop, and move on what can be moved on in it."""
        self.open(op, index, scope)
        self.catch_up(op, scope)

    @abstractmethod
    def settle(self, view: View, scope: Scope) -> None:
        """Make what can be made of a view with the loops and tiles that are open."""

    @abstractmethod
    def row(self, op: Op, dims: tuple[str, ...], scope: Scope) -> None:
        """Make a view where it is: a number, or an array over the indices whose loops are not open."""
