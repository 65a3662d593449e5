"""Data movement between regions: on coordinates, so that nothing sparse becomes dense."""

from __future__ import annotations

import math

import numpy as np

from tilestream.errors import SparseError
from tilestream.sparse.einsum import Move
from tilestream.sparse.storage import Format, SparseTensor, from_coo, to_coo


def perform(move: Move, operands: list[SparseTensor]) -> SparseTensor:
    """The result of a move.

    ``reshape``: to ``move.shape``. ``slice``: args (dimension, start, step). ``cat``: args (dimension,). ``permute``:
    args the dimensions. ``index_select``: args (dimension, *rows).

    Raises:
        SparseError: a kind that is not one of these.
    """
    coordinates, values = to_coo(operands[0])
    shape = operands[0].shape
    if move.kind == "reshape":
        flat = np.zeros(len(values), dtype=np.int64)
        for dim, size in enumerate(shape):
            flat = flat * size + coordinates[:, dim]
        coordinates = np.stack(np.unravel_index(flat, move.shape), axis=1) if math.prod(move.shape) else coordinates
        coordinates = coordinates.reshape(len(values), len(move.shape))
    elif move.kind == "permute":
        coordinates = coordinates[:, list(move.args)]
    elif move.kind == "slice":
        dim, start, step = move.args
        at = coordinates[:, dim] - start
        kept = (at >= 0) & (at % step == 0) & (at // step < move.shape[dim])
        coordinates, values = coordinates[kept].copy(), values[kept]
        coordinates[:, dim] = (coordinates[:, dim] - start) // step
    elif move.kind == "cat":
        dim, parts, offset = move.args[0], [], 0
        for one in operands:
            at, value = to_coo(one)
            shift = np.zeros(len(one.shape), dtype=np.int64)
            shift[dim] = offset
            parts.append((at + shift, value))
            offset += one.shape[dim]
        coordinates = np.concatenate([at for at, _ in parts])
        values = np.concatenate([value for _, value in parts])
    elif move.kind == "index_select":
        dim, *rows = move.args
        pieces = [(np.flatnonzero(coordinates[:, dim] == row), n) for n, row in enumerate(rows)]
        kept = np.concatenate([at for at, _ in pieces]) if pieces else np.zeros(0, dtype=np.int64)
        numbers = np.concatenate([np.full(len(at), n) for at, n in pieces]) if pieces else kept
        coordinates, values = coordinates[kept].copy(), values[kept]
        coordinates[:, dim] = numbers
    else:
        raise SparseError(f"no data movement of kind {move.kind!r}", "use reshape, permute, slice, cat, index_select")
    full = all(x.nnz == math.prod(x.shape) for x in operands)
    kind = "dense" if full else "compressed"
    return from_coo(move.name, coordinates, values, move.shape, Format((kind,) * len(move.shape)))
