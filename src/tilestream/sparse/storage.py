"""Tensors as fibertrees: one level an index, dense or compressed, over an array of values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from tilestream.errors import SparseError

_MAX_DENSE = 1 << 31
"""Positions that dense levels may ask for; more is taken for a mistake."""


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

    def coordinates(self) -> np.ndarray:
        """int64 [positions of the last level, d], in the order of ``shape``; with blocks, of blocks."""
        found = np.zeros((1, 0), dtype=np.int64)
        for level in self.levels:
            if level.seg is None or level.crd is None:
                inner = np.tile(np.arange(level.size), len(found))
                outer = np.repeat(found, level.size, axis=0)
            else:
                inner = level.crd
                outer = np.repeat(found, np.diff(level.seg), axis=0)
            found = np.concatenate([outer, inner[:, None]], axis=1)
        return found[:, np.argsort(self.format.order).astype(int)]

    def to_dense(self) -> np.ndarray:
        """float64 array of ``shape``."""
        block = self.format.block
        where = self.coordinates()
        if not self.shape:
            return self.values.reshape(())
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


def from_coo(
    name: str, coordinates: np.ndarray, values: np.ndarray, shape: tuple[int, ...], format: Format
) -> SparseTensor:
    """Store the entries of a coordinate list, explicit zeros included, duplicates summed; nothing is densified but
    what ``format`` calls dense.

    Args:
        coordinates: integers [n, d], in the order of ``shape``.
        values: float64 [n].

    Raises:
        SparseError: shapes that do not fit, a coordinate outside ``shape``, or dense levels beyond any memory.
    """
    coordinates = np.asarray(coordinates, dtype=np.int64).reshape(len(values), len(shape))
    values = np.asarray(values, dtype=np.float64)
    if len(format.levels) != len(shape):
        raise SparseError(f"tensor {name!r} {shape} and {len(format.levels)} levels", "give one level an index")
    if any(size < 0 for size in shape):
        raise SparseError(f"tensor {name!r} of shape {shape}", "give sizes of 0 or more")
    if len(coordinates) and ((coordinates < 0).any() or (coordinates >= np.array(shape)).any()):
        raise SparseError(f"tensor {name!r} has a coordinate outside {shape}", "give the shape that holds all entries")
    sizes, inner = list(shape), None
    if format.block > 1:
        if len(shape) < 2 or shape[-2] % format.block or shape[-1] % format.block:
            raise SparseError(
                f"tensor {name!r} {shape} in blocks of {format.block}", "pad it to a multiple of the block"
            )
        inner = coordinates[:, -2:] % format.block
        coordinates = coordinates.copy()
        coordinates[:, -2:] //= format.block
        sizes[-2:] = [sizes[-2] // format.block, sizes[-1] // format.block]
    levels, position, fibers = coo_levels(name, coordinates, sizes, format)
    stored = np.zeros((fibers, *([format.block] * 2 if inner is not None else [])))
    where = (position,) if inner is None else (position, inner[:, 0], inner[:, 1])
    np.add.at(stored, where, values)
    return SparseTensor(name, tuple(shape), format, tuple(levels), stored)


def coo_levels(
    name: str, coordinates: np.ndarray, sizes: Sequence[int], format: Format
) -> tuple[list[Level], np.ndarray, int]:
    """Levels that hold the entries at ``coordinates`` [n, d], each entry's position, and how many positions there are.

    Raises:
        SparseError: dense levels beyond any memory.
    """
    position = np.zeros(len(coordinates), dtype=np.int64)
    fibers = 1
    levels: list[Level] = []
    for depth, kind in enumerate(format.levels):
        size, crd = sizes[format.order[depth]], coordinates[:, format.order[depth]]
        key = position * size + crd
        if kind == "dense":
            levels.append(Level(size))
            position, fibers = key, fibers * size
        else:
            kept, position = np.unique(key, return_inverse=True)
            counts = np.bincount(kept // max(size, 1), minlength=fibers)
            levels.append(Level(size, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), kept % max(size, 1)))
            fibers = len(kept)
        if fibers > _MAX_DENSE:
            raise SparseError(f"tensor {name!r} {tuple(sizes)} has {fibers} dense positions", "use compressed levels")
    return levels, position, fibers


def to_coo(tensor: SparseTensor) -> tuple[np.ndarray, np.ndarray]:
    """Stored entries: coordinates int64 [n, d] in the order of ``shape``, and values float64 [n]."""
    coordinates = tensor.coordinates()
    block = tensor.format.block
    if block == 1:
        return coordinates, tensor.values
    rows, columns = (x.ravel() for x in np.indices((block, block)))
    spread = np.repeat(coordinates * ([1] * (len(tensor.shape) - 2) + [block] * 2), block * block, axis=0)
    spread[:, -2] += np.tile(rows, len(coordinates))
    spread[:, -1] += np.tile(columns, len(coordinates))
    return spread, tensor.values.ravel()


def repack(tensor: SparseTensor, format: Format, name: str | None = None) -> SparseTensor:
    """The same tensor in another format; explicit zeros stay. Raises ``SparseError`` as ``from_coo`` does."""
    if format == tensor.format:
        return SparseTensor(name or tensor.name, tensor.shape, format, tensor.levels, tensor.values)
    coordinates, values = to_coo(tensor)
    return from_coo(name or tensor.name, coordinates, values, tensor.shape, format)


def prune(tensor: SparseTensor) -> SparseTensor:
    """The tensor without the zeros that its compressed levels store."""
    coordinates, values = to_coo(tensor)
    kept = values != 0
    return from_coo(tensor.name, coordinates[kept], values[kept], tensor.shape, tensor.format)


def dense(rank: int, block: int = 1) -> Format:
    """All levels dense."""
    return Format(("dense",) * rank, block=block)


def compressed(rank: int, block: int = 1) -> Format:
    """All levels compressed: DCSR for a matrix."""
    return Format(("compressed",) * rank, block=block)


def default_format(tensor: torch.Tensor) -> Format:
    """What a torch tensor's layout says: CSR is (dense, compressed), COO all compressed, BSR blocked, strided dense.

    Blocks that are not square are opened: every element of theirs is stored as a scalar.

    Raises:
        SparseError: batched CSR or BSR, or a layout that is none of these.
    """
    rank, layout = tensor.ndim, tensor.layout
    if layout == torch.strided:
        return dense(rank)
    if layout == torch.sparse_coo:
        if tensor.dense_dim():
            return Format(("compressed",) * tensor.sparse_dim() + ("dense",) * tensor.dense_dim())
        return compressed(rank)
    if rank == 2 and layout == torch.sparse_csr:
        return Format(("dense", "compressed"))
    if rank == 2 and layout == torch.sparse_csc:
        return Format(("dense", "compressed"), (1, 0))
    if rank == 2 and layout in (torch.sparse_bsr, torch.sparse_bsc):
        rows, columns = tensor.values().shape[-2:]
        edge = rows if rows == columns else 1
        return Format(("dense", "compressed"), (0, 1) if layout == torch.sparse_bsr else (1, 0), edge)
    raise SparseError(f"a {layout} tensor of shape {tuple(tensor.shape)}", "use COO, CSR, CSC, BSR, BSC or strided")


def from_torch(name: str, tensor: torch.Tensor, format: Format | None = None) -> SparseTensor:
    """A torch tensor of any layout, in ``format`` (default: what its layout says), without making it dense.

    Zeros that a sparse layout stores stay; a strided tensor's zeros are left out of compressed levels.

    Raises:
        SparseError: complex numbers, or row pointers that go down; otherwise as ``default_format`` and ``from_coo``.
    """
    if not isinstance(tensor, torch.Tensor):
        raise SparseError(f"{name!r} is a {type(tensor).__name__}", "give a tensor, a NumPy array or a scipy matrix")
    if tensor.is_complex():
        raise SparseError(f"tensor {name!r} of complex numbers", "use its real and imaginary parts")
    if tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        raise SparseError(f"tensor {name!r} is a stand-in, quantised or nested", "give one that holds numbers")
    wanted = format or default_format(tensor)
    tensor = tensor.detach().cpu()
    if tensor.layout == torch.strided:
        return pack(name, tensor.double().numpy(), wanted)
    if tensor.layout != torch.sparse_coo:
        _check_pointers(name, tensor)
        tensor = tensor.to_sparse_coo()
    tensor = tensor.coalesce()
    coordinates, values = tensor.indices().numpy().T, tensor.values().double().numpy()
    if tensor.dense_dim():
        dims = values.shape[1:]
        tail = np.indices(dims).reshape(len(dims), -1).T
        coordinates = np.concatenate(
            [np.repeat(coordinates, len(tail), axis=0), np.tile(tail, (len(coordinates), 1))], axis=1
        )
    return from_coo(name, coordinates, values.ravel(), tuple(tensor.shape), wanted)


def _check_pointers(name: str, tensor: torch.Tensor) -> None:
    """PyTorch converts what it did not check: pointers that go down end the process there."""
    by_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    pointers = tensor.crow_indices() if by_rows else tensor.ccol_indices()
    entries = (tensor.col_indices() if by_rows else tensor.row_indices()).shape[-1]
    steps = torch.diff(pointers, prepend=pointers.new_zeros(*pointers.shape[:-1], 1))
    if bool((steps < 0).any()) or bool((pointers[..., 0] != 0).any()) or bool((pointers[..., -1] != entries).any()):
        raise SparseError(
            f"tensor {name!r} has {'row' if by_rows else 'column'} pointers that do not go up from 0 to {entries}",
            "make it with check_invariants=True, which says where",
        )


def plain(value: Any) -> Any:
    """What users have instead of torch tensors as such: NumPy arrays, scipy's sparse matrices (COO), and
    ``SparseTensor`` of torch_sparse (CSR, which PyTorch Geometric takes as well); anything else as it is.

    Raises:
        SparseError: an array or a matrix of something else than numbers, or what ``torch.func`` transforms.
    """
    if isinstance(value, torch.Tensor) and is_functorch_wrapped_tensor(value):
        raise SparseError(
            "a tensor that torch.vmap or a transform of torch.func maps over a program",
            "run the program on whole tensors, and use torch.vmap or torch.func inside the module",
        )
    if isinstance(value, torch.Tensor | SparseTensor):
        return value
    convert = getattr(value, "to_torch_sparse_csr_tensor", None)
    if convert is not None:
        return convert()
    try:
        if isinstance(value, np.ndarray | np.generic):
            return torch.from_numpy(np.array(value, order="C"))  # one of its own: torch has no negative strides
        if callable(getattr(value, "tocoo", None)):
            entries = value.tocoo()
            numbers = torch.from_numpy(np.array(entries.data))
            where = torch.from_numpy(np.stack(entries.coords).astype(np.int64))
            return torch.sparse_coo_tensor(where, numbers, entries.shape, check_invariants=True).coalesce()
    except (TypeError, RuntimeError, ValueError) as error:
        raise SparseError(f"a {type(value).__name__} that is no tensor: {error}", "give arrays of numbers") from None
    return value


def from_scipy(name: str, matrix: Any, format: Format | None = None) -> SparseTensor:
    """A scipy sparse matrix or array, all levels compressed unless ``format`` says otherwise."""
    entries = matrix.tocoo()
    coordinates = np.stack([entries.row, entries.col], axis=1)
    return from_coo(name, coordinates, entries.data, tuple(entries.shape), format or compressed(2))


def to_torch(tensor: SparseTensor, layout: torch.layout = torch.strided) -> torch.Tensor:
    """float64 torch tensor, strided or (``torch.sparse_coo``) with the stored entries only."""
    if layout == torch.strided:
        return torch.from_numpy(tensor.to_dense())
    coordinates, values = to_coo(tensor)
    entries = torch.sparse_coo_tensor(torch.from_numpy(coordinates.T.copy()), torch.from_numpy(values.copy()))
    sized = torch.sparse_coo_tensor(entries._indices(), entries._values(), tensor.shape).coalesce()
    return sized if layout == torch.sparse_coo else sized.to_sparse(layout=layout)
