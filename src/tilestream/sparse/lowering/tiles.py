"""Tensors in tiles: from scalar entries to the [b, b] tiles that a blocked graph reads, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tilestream.errors import SparseError
from tilestream.sparse.storage import Format, Level, SparseTensor, coo_levels, from_coo, to_coo


@dataclass(frozen=True)
class TileFormat(Format):
    """Levels over blocks. ``tile``: the dimensions along a tile's rows and columns; None: repeated along that axis.

    ``whole``: the tensor says where something is, so that a block that is there has to be full.
    """

    tile: tuple[int | None, int | None] = (None, None)
    whole: bool = False


@dataclass(frozen=True)
class Edge:
    """An index of ``size`` in blocks of ``block``; as a tensor, a tile a block with ones in the columns that exist."""

    size: int
    block: int

    @property
    def blocks(self) -> int:
        return -(-self.size // self.block)

    def tensor(self, name: str) -> SparseTensor:
        inside = (np.arange(self.blocks * self.block) < self.size).astype(np.float64)
        rows = np.repeat(inside.reshape(self.blocks, 1, self.block), self.block, axis=1)
        return SparseTensor(name, (self.size,), Format(("dense",), block=self.block), (Level(self.blocks),), rows)


def edge_name(index: str) -> str:
    """Tensor that stands for the tiles of an index."""
    return f"edge_{index}"


def to_tiles(tensor: SparseTensor, name: str, format: TileFormat) -> SparseTensor:
    """A tensor's entries in tiles; what a stored tile lacks is 0.

    Raises:
        SparseError: a mask whose blocks are not full.
    """
    coordinates, values = to_coo(tensor)
    block, (rows, columns) = format.block, format.tile
    outer, sizes = coordinates.copy(), list(tensor.shape)
    for dim in (rows, columns):
        if dim is not None:
            outer[:, dim] //= block
            sizes[dim] = Edge(sizes[dim], block).blocks
    levels, position, count = coo_levels(name, outer, sizes, format)
    tiles = np.zeros((count, block, block))
    row = slice(None) if rows is None else coordinates[:, rows] % block
    column = slice(None) if columns is None else coordinates[:, columns] % block
    spread = values.reshape(-1, *[1] * ((rows is None) + (columns is None)))
    where: Any = (position, row, column)
    np.add.at(tiles, where, spread)
    made = SparseTensor(name, tensor.shape, format, tuple(levels), tiles)
    if format.whole and len(values) != _room(made.coordinates(), tensor.shape, format):
        raise SparseError(
            f"mask {name!r} is not made of full blocks of {block}", "use a smaller block, or a mask on its borders"
        )
    return made


def _room(blocks: np.ndarray, shape: tuple[int, ...], format: TileFormat) -> int:
    """Elements of ``shape`` in the blocks at these coordinates."""
    room = np.ones(len(blocks), dtype=np.int64)
    for dim in format.tile:
        if dim is not None:
            room *= np.minimum(format.block, shape[dim] - format.block * blocks[:, dim])
    return int(room.sum())


def from_tiles(tensor: SparseTensor, dims: tuple[int | None, ...], shape: tuple[int, ...], to: Format) -> SparseTensor:
    """The scalars of a blocked result, without its padding.

    ``dims``: the dimension of ``shape`` that each of its own is; None: repeated.
    """
    coordinates, values = to_coo(tensor)
    first = np.ones(len(values), dtype=bool)
    for at, dim in enumerate(dims):
        if dim is None:
            first &= coordinates[:, at] == 0
    where = [at for at, dim in enumerate(dims) if dim is not None]
    order = sorted(where, key=lambda at: dims[at] or 0)
    found = coordinates[:, order]
    kept = first & (found < np.array(shape, dtype=np.int64)).all(axis=1)
    return from_coo(tensor.name, found[kept], values[kept], shape, to)
