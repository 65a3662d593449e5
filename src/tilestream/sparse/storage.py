"""Tensors as fibertrees: one level an index, dense or compressed, over an array of values."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tilestream.errors import SparseError


@dataclass(frozen=True)
class Format:
    """How a tensor is stored.

    ``levels``: ``"dense"`` or ``"compressed"``, outermost first. ``order``: which index of the tensor each level
    holds ((1, 0) is column-major). ``block``: edge of the square blocks that are its values (1: scalars); a blocked
    matrix has levels over blocks.
    """

    levels: tuple[str, ...]
    order: tuple[int, ...] = ()
    block: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", self.order or tuple(range(len(self.levels))))
        if wrong := [x for x in self.levels if x not in ("dense", "compressed")]:
            raise SparseError(f"{wrong[0]!r} is no level format", "use dense or compressed")
        if sorted(self.order) != list(range(len(self.levels))):
            raise SparseError(f"order {self.order} of {len(self.levels)} levels", "name every index once")
        if self.block < 1:
            raise SparseError(f"blocks of {self.block}", "use 1 for scalars, or the edge of the blocks")


@dataclass(frozen=True)
class Level:
    """One level: ``size`` coordinates; compressed ones have ``seg`` (int64 [fibers + 1]) and ``crd`` (int64 [n])."""

    size: int
    seg: np.ndarray | None = field(default=None, repr=False)
    crd: np.ndarray | None = field(default=None, repr=False)

    @property
    def compressed(self) -> bool:
        return self.seg is not None


@dataclass(frozen=True)
class SparseTensor:
    """A tensor of logical ``shape``. ``values``: float64 [n], or [n, block, block]; position ``p`` of the last level.

    With blocks, ``shape`` is a multiple of the block in its last two indices and levels count blocks.
    """

    name: str
    shape: tuple[int, ...]
    format: Format
    levels: tuple[Level, ...]
    values: np.ndarray = field(repr=False)

    @property
    def nnz(self) -> int:
        """Stored values, explicit zeros included; a block counts each of its elements."""
        return int(self.values.size)

    def to_dense(self) -> np.ndarray:
        """float64 array of ``shape``."""
        block = self.format.block
        coordinates = np.zeros((1, 0), dtype=np.int64)
        for level in self.levels:
            if level.seg is None or level.crd is None:
                inner = np.tile(np.arange(level.size), len(coordinates))
                outer = np.repeat(coordinates, level.size, axis=0)
            else:
                inner = level.crd
                outer = np.repeat(coordinates, np.diff(level.seg), axis=0)
            coordinates = np.concatenate([outer, inner[:, None]], axis=1)
        where = coordinates[:, np.argsort(self.format.order)]
        if block == 1:
            out = np.zeros(self.shape)
            out[tuple(where.T)] = self.values
            return out
        *outer_shape, rows, columns = self.shape
        blocks = np.zeros((*outer_shape, rows // block, columns // block, block, block))
        blocks[tuple(where.T)] = self.values
        return blocks.swapaxes(-3, -2).reshape(self.shape)


def pack(name: str, array: np.ndarray, format: Format) -> SparseTensor:
    """Store a dense array: compressed levels keep the coordinates under which something is not zero.

    Raises:
        SparseError: another number of indices than levels, or a shape that is no multiple of the block.
    """
    array = np.asarray(array, dtype=np.float64)
    if array.ndim != len(format.levels):
        raise SparseError(
            f"tensor {name!r} has {array.ndim} indices and a format of {len(format.levels)} levels",
            "give one level an index",
        )
    shape, block = array.shape, format.block
    if block > 1:
        if array.ndim < 2 or shape[-2] % block or shape[-1] % block:
            raise SparseError(f"tensor {name!r} {shape} in blocks of {block}", "pad it to a multiple of the block")
        *outer, rows, columns = shape
        array = array.reshape(*outer, rows // block, block, columns // block, block).swapaxes(-3, -2)
    array = array.transpose(*format.order, *range(len(format.levels), array.ndim))
    present = (array != 0).any(axis=(-2, -1)) if block > 1 else array != 0
    sizes = array.shape[: len(format.levels)]
    parents = np.zeros((1, 0), dtype=np.int64)  # coordinates of every fiber of the level in hand
    levels: list[Level] = []
    for depth, kind in enumerate(format.levels):
        size = sizes[depth]
        if kind == "dense":
            levels.append(Level(size))
            below = np.tile(np.arange(size), len(parents))
            parents = np.concatenate([np.repeat(parents, size, axis=0), below[:, None]], axis=1)
            continue
        under = (
            present.reshape(*sizes[: depth + 1], -1).any(axis=-1)
            if present.size
            else np.zeros(sizes[: depth + 1], bool)
        )
        kept = under[tuple(parents.T)].reshape(len(parents), size)
        fiber, crd = np.nonzero(kept)
        seg = np.concatenate([[0], np.cumsum(kept.sum(axis=1))]).astype(np.int64)
        levels.append(Level(size, seg, crd.astype(np.int64)))
        parents = np.concatenate([parents[fiber], crd[:, None]], axis=1)
    values = np.ascontiguousarray(array[tuple(parents.T)])
    return SparseTensor(name, shape, format, tuple(levels), values)
