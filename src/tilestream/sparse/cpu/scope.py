"""What the generated code has at one of its points: open loops, values, arrays, and stored tensors on their way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilestream.sparse.fusion import Leaf, View


@dataclass(frozen=True)
class Place:
    """Where a leaf stands: the variable of its position under ``depth`` levels; ``missing``: it may be -1."""

    depth: int = 0
    position: str = "0"
    missing: bool = False


@dataclass(frozen=True)
class Array:
    """A flat array with the dimensions of a view, outermost first; the coordinate of ``local`` counts from the start of
    the open tile."""

    name: str
    dims: tuple[str, ...]
    local: str = ""


@dataclass(frozen=True)
class Tile:
    """Coordinates of an index from ``first`` to before ``last``, two variables; ``size`` of them at most."""

    first: str
    last: str
    size: int


@dataclass
class Scope:
    """What is known at a point of the code."""

    bound: dict[str, str] = field(default_factory=dict)
    """Open loops: the variable of each index."""
    tiles: dict[str, Tile] = field(default_factory=dict)
    """Indices of which a tile is open; its loops may or may not be."""
    parts: dict[str, Tile] = field(default_factory=dict)
    """Indices of which this thread has a part of the coordinates. Unlike a tile, nothing is made for it at a time."""
    values: dict[View, str] = field(default_factory=dict)
    rows: dict[View, Array] = field(default_factory=dict)
    """Views that are in an array, as far as loops are open."""
    places: dict[Leaf, Place] = field(default_factory=dict)

    def inner(self) -> Scope:
        found = dict(self.bound), dict(self.tiles), dict(self.parts), dict(self.values), dict(self.rows)
        return Scope(*found, dict(self.places))

    def range(self, index: str) -> Tile | None:
        """The coordinates of an index that its loop runs over here; None: all."""
        return self.tiles.get(index) or self.parts.get(index)


@dataclass(frozen=True)
class Layout:
    """Elements of flat arrays, given the sizes of the indices."""

    sizes: Mapping[str, int]

    def extent(self, array: Array, index: str, scope: Scope) -> int:
        return scope.tiles[index].size if index == array.local else self.sizes[index]

    def stride(self, array: Array, index: str, scope: Scope) -> int:
        """How far apart neighbours along an index are; 0 for one that the array does not have."""
        if index not in array.dims:
            return 0
        step = 1
        for inner in array.dims[array.dims.index(index) + 1 :]:
            step *= self.extent(array, inner, scope)
        return step

    def at(self, array: Array, scope: Scope) -> str:
        """The element at the coordinates of the open loops; of what has no open loop, the first of the tile or all."""
        terms = []
        for index in array.dims:
            tile = scope.range(index)
            if index in scope.bound:
                here = scope.bound[index]
                here = f"({here} - {tile.first})" if tile and index == array.local else here
            elif tile and index != array.local:
                here = tile.first
            else:
                continue
            step = self.stride(array, index, scope)
            terms.append(here if step == 1 else f"{here} * {step}")
        return " + ".join(terms) or "0"

    def element(self, array: Array, scope: Scope) -> str:
        """That element. Its place is never negative, and compiled code need not look whether it is."""
        return f"{array.name}[np.uint64({self.at(array, scope)})]"
