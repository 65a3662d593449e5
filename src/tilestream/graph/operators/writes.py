"""What the rules of elementwise operators ask of who writes: row programs and programs over axes both have it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import fx

from tilestream.ir.pipeline import Tile


class Writes(Protocol):
    """Operands of elementwise operators, aligned to a frame, and the ops made of them."""

    def frame(self, node: fx.Node, /, *operands: object) -> Any:
        """What the operands of ``node`` are aligned to."""
        ...

    def operand(self, node: object, frame: Any, /) -> Tile | str | float:
        """A tile, the name of a parameter, or a number."""
        ...

    def tile(self, node: object, frame: Any = None, /) -> Tile:
        """An operand that must be a tile."""
        ...

    def unary(self, kind: str, x: Tile, dtype: str, /, **attrs: float | int | str) -> Tile:
        """``kind`` of every element."""
        ...

    def binary(self, kind: str, left: Tile | str | float, right: Tile | str | float, dtype: str, /) -> Tile:
        """``left kind right``, one of them a tile."""
        ...
