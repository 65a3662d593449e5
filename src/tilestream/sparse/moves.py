"""Data movement between regions: on coordinates, so that nothing sparse becomes dense."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from tilestream.errors import SparseError
from tilestream.sparse.einsum import Move
from tilestream.sparse.storage import Format, SparseTensor, from_coo, from_torch, to_coo


def perform(move: Move, operands: list[SparseTensor], fills: Sequence[float] = ()) -> SparseTensor:
    """The result of a move. ``fills``: what operands do not store stands for, for one that PyTorch runs.

    ``reshape``: to ``move.shape``. ``slice``: args (dimension, start, step). ``cat``: args (dimension,). ``permute``:
    args the dimensions. ``index_select``: args (dimension, *rows). ``adjacency``: of two incidence matrices
    [edges, nodes] and what the edges carry, the matrix [targets, sources, ...] of that, edges of one pair summed; args
    the edges' dimension of the third. ``topk``: ones at the largest (or smallest) of each row; args (dimension,
    how many, whether largest). ``topk_values``: these values, largest first; ``topk_places``: their indices.
    ``bare``: ones all along the fibers of a mask that store nothing; args (dimension of the fibers,). ``whole``: ones
    where a mask stores something, and zeros all along those fibers. ``both``: ones where two masks store something.
    ``tril``, ``triu``: args (diagonal,), of the last two dimensions. ``diagonal``: args (offset,), of the last two
    dimensions; ``diag_embed`` its inverse. ``pad``: args (dimension, zeros before). ``eager``: what PyTorch runs.

    Raises:
        SparseError: a kind that is not one of these.
    """
    if move.eager is not None:
        return move.eager.run(move.name, move.shape, operands, fills)
    if move.kind in ("topk", "topk_values", "topk_places"):
        return _topk(move, operands[0])
    if move.kind in ("bare", "whole", "both"):
        return _mask(move, operands)
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
    elif move.kind in ("tril", "triu", "diagonal", "diag_embed", "pad"):
        coordinates, values = _along_diagonal(move, coordinates, values)
    else:
        raise SparseError(f"no data movement of kind {move.kind!r}", "use one that perform() lists")
    full = all(x.nnz == math.prod(x.shape) for x in operands) and len(values) == math.prod(move.shape)
    kind = "dense" if full else "compressed"
    return from_coo(move.name, coordinates, values, move.shape, Format((kind,) * len(move.shape)))


def _along_diagonal(move: Move, coordinates: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Entries that a triangle or a diagonal keeps, or that come to stand on a diagonal or behind a border of zeros."""
    if move.kind == "pad":
        dim, before = move.args
        shift = np.zeros(len(move.shape), dtype=np.int64)
        shift[dim] = before
        return coordinates + shift, values
    offset = move.args[0]
    if move.kind == "diag_embed":
        ends = coordinates[:, -1:] + np.array([[max(-offset, 0), max(offset, 0)]])
        return np.concatenate([coordinates[:, :-1], ends], axis=1), values
    above = coordinates[:, -1] - coordinates[:, -2] - offset
    kept = above <= 0 if move.kind == "tril" else above >= 0 if move.kind == "triu" else above == 0
    coordinates, values = coordinates[kept], values[kept]
    if move.kind == "diagonal":
        coordinates = np.concatenate([coordinates[:, :-2], coordinates[:, -2:].min(axis=1, keepdims=True)], axis=1)
    return coordinates, values


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


def bare_fibers(mask: SparseTensor, dim: int) -> np.ndarray:
    """Coordinates int64 [n, d - 1], without ``dim``, of a mask's fibers that store nothing."""
    rest = tuple(size for d, size in enumerate(mask.shape) if d != dim)
    if not rest:
        return np.zeros((0 if mask.nnz else 1, 0), dtype=np.int64)
    held = np.zeros(rest, dtype=bool)
    held[tuple(np.delete(to_coo(mask)[0], dim, axis=1).T)] = True
    return np.argwhere(~held)


def _mask(move: Move, masks: Sequence[SparseTensor]) -> SparseTensor:
    coordinates = to_coo(masks[0])[0]
    if move.kind == "both":
        flat = [np.ravel_multi_index(tuple(to_coo(x)[0].T), move.shape) for x in masks]
        coordinates = np.stack(np.unravel_index(np.intersect1d(flat[0], flat[1]), move.shape), axis=1)
        ones, zeros = coordinates, coordinates[:0]
    else:
        (dim,) = move.args
        fibers = bare_fibers(masks[0], dim)
        along = np.tile(np.arange(move.shape[dim]), len(fibers))
        bare = np.insert(np.repeat(fibers, move.shape[dim], axis=0), dim, along, axis=1)
        ones, zeros = (bare, bare[:0]) if move.kind == "bare" else (coordinates, bare)
    entries = np.concatenate([ones, zeros])
    values = np.concatenate([np.ones(len(ones)), np.zeros(len(zeros))])
    return from_coo(move.name, entries, values, move.shape, Format(("compressed",) * len(move.shape)))


def _topk(move: Move, operand: SparseTensor) -> SparseTensor:
    dim, count, largest = move.args
    found = torch.from_numpy(operand.to_dense()).topk(count, dim, bool(largest))
    if move.kind != "topk":
        return from_torch(move.name, found.values if move.kind == "topk_values" else found.indices.to(torch.float64))
    marked = torch.zeros(operand.shape, dtype=torch.float64).scatter_(dim, found.indices, 1.0)
    return from_torch(move.name, marked, Format(("compressed",) * len(operand.shape)))
