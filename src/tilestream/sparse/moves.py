"""Data movement between regions: on coordinates, so that nothing sparse becomes dense."""

from __future__ import annotations

import math

import numpy as np
import torch

from tilestream.errors import SparseError
from tilestream.sparse.einsum import Move
from tilestream.sparse.storage import Format, SparseTensor, from_coo, from_torch, to_coo


def perform(move: Move, operands: list[SparseTensor]) -> SparseTensor:
    """The result of a move.

    ``reshape``: to ``move.shape``. ``slice``: args (dimension, start, step). ``cat``: args (dimension,). ``permute``:
    args the dimensions. ``index_select``: args (dimension, *rows). ``adjacency``: of two incidence matrices
    [edges, nodes] and what the edges carry, the matrix [targets, sources, ...] of that, edges of one pair summed; args
    the edges' dimension of the third. ``topk``: ones at the largest (or smallest) of each row; args (dimension,
    how many, whether largest). ``topk_values``: these values, largest first.

    Raises:
        SparseError: a kind that is not one of these.
    """
    if move.kind in ("topk", "topk_values"):
        return _topk(move, operands[0])
    if move.kind == "adjacency":
        return _adjacency(move, *operands)
    coordinates, values = to_coo(operands[0])
    shape = operands[0].shape
    if move.kind == "reshape":
        flat = np.zeros(len(values), dtype=np.int64)
        for dim, size in enumerate(shape):
            flat = flat * size + coordinates[:, dim]
        if move.shape and len(values):
            coordinates = np.stack(np.unravel_index(flat, move.shape), axis=1)
        else:
            coordinates = np.zeros((len(values), len(move.shape)), dtype=np.int64)
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
        raise SparseError(f"no data movement of kind {move.kind!r}", "use one that perform() lists")
    full = all(x.nnz == math.prod(x.shape) for x in operands)
    kind = "dense" if full else "compressed"
    return from_coo(move.name, coordinates, values, move.shape, Format((kind,) * len(move.shape)))


def _adjacency(move: Move, targets: SparseTensor, sources: SparseTensor, carried: SparseTensor) -> SparseTensor:
    at = move.args[0]
    ends = []
    for incidence in (targets, sources):
        coordinates, _ = to_coo(incidence)
        ends.append(coordinates[np.argsort(coordinates[:, 0], kind="stable"), 1])
    coordinates, values = to_coo(carried)
    edge = coordinates[:, at]
    rest = np.delete(coordinates, at, axis=1)
    entries = np.concatenate([ends[0][edge][:, None], ends[1][edge][:, None], rest], axis=1)
    return from_coo(move.name, entries, values, move.shape, Format(("compressed",) * len(move.shape)))


def _topk(move: Move, operand: SparseTensor) -> SparseTensor:
    dim, count, largest = move.args
    found = torch.from_numpy(operand.to_dense()).topk(count, dim, bool(largest))
    if move.kind == "topk_values":
        return from_torch(move.name, found.values)
    marked = torch.zeros(operand.shape, dtype=torch.float64).scatter_(dim, found.indices, 1.0)
    return from_torch(move.name, marked, Format(("compressed",) * len(operand.shape)))
