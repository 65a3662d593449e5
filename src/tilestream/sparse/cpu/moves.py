"""Data movement between loops: views of dense memory where there are any; of sparse tensors, where they lie is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tilestream.sparse.cpu.held import Held, Pattern, Stored, as_tensor, flat, pattern, stored
from tilestream.sparse.einsum import Move
from tilestream.sparse.moves import perform
from tilestream.sparse.storage import to_coo


class Moves:
    """Moves of a program; ``arrays``: names of what the loops read as dense arrays.

    The matrix that edges make is sorted once: as long as the edges are the same, only what they carry is put in order.
    """

    def __init__(self, arrays: frozenset[str]) -> None:
        self.arrays = arrays
        self._made: dict[str, tuple[Pattern, Pattern, Pattern, torch.Tensor, bool]] = {}

    def run(self, move: Move, have: Mapping[str, Held], dtype: torch.dtype) -> Held:
        operands = [have[name] for name in move.operands]
        if all(isinstance(x, torch.Tensor) for x in operands):
            made = dense(move, [x for x in operands if isinstance(x, torch.Tensor)])
            if made is not None:
                return made.contiguous()
        if move.kind == "adjacency":
            first, second, carried = operands
            if isinstance(first, Stored) and isinstance(second, Stored) and isinstance(carried, torch.Tensor):
                return self._adjacency(move, first.pattern, second.pattern, carried)
        made = perform(move, [as_tensor(n, x) for n, x in zip(move.operands, operands, strict=True)])
        return flat(made, dtype) if move.name in self.arrays else stored(made, dtype)

    def _adjacency(self, move: Move, first: Pattern, second: Pattern, carried: torch.Tensor) -> Stored:
        known = self._made.get(move.name)
        if known is None or known[0] is not first or known[1] is not second:
            known = first, second, *_edges(move, first, second, tuple(carried.shape))
            self._made[move.name] = known
        *_, found, where, distinct = known
        if distinct:
            return Stored(found, carried.reshape(-1).index_select(0, where))
        values = carried.new_zeros(found.tensor.nnz).index_add_(0, where, carried.reshape(-1))
        return Stored(found, values)


def _edges(move: Move, first: Pattern, second: Pattern, shape: tuple[int, ...]) -> tuple[Pattern, torch.Tensor, bool]:
    """The matrix's pattern, and which number each of its entries is; where edges share an entry (not ``distinct``),
    which entry each number goes to."""
    levels = torch.ones(shape, dtype=torch.float64)
    made = perform(move, [first.tensor, second.tensor, as_tensor("ones", levels)])
    distinct = made.nnz == levels.numel()
    found = pattern(made)
    if distinct:
        numbers = torch.arange(1.0, levels.numel() + 1, dtype=torch.float64).reshape(shape)
        placed = perform(move, [first.tensor, second.tensor, as_tensor("numbers", numbers)])
        return found, torch.from_numpy(np.rint(placed.values).astype(np.int64) - 1), True
    coordinates, _ = to_coo(made)
    key = np.ravel_multi_index(tuple(coordinates.T), made.shape)
    order = np.argsort(key)
    edges = _coordinates(move, first, second, shape)
    wanted = np.ravel_multi_index(tuple(edges.T), made.shape)
    where = np.take(order, np.searchsorted(key, wanted, sorter=order))
    return found, torch.from_numpy(where), False


def _coordinates(move: Move, first: Pattern, second: Pattern, shape: tuple[int, ...]) -> np.ndarray:
    """Where each number that the edges carry goes, in the order of what they carry."""
    at, ends = move.args[0], list[np.ndarray]()
    for one in (first.tensor, second.tensor):
        coordinates, _ = to_coo(one)
        ends.append(coordinates[np.argsort(coordinates[:, 0], kind="stable"), 1])
    numbers = [one.reshape(-1) for one in np.meshgrid(*map(np.arange, shape), indexing="ij")]
    edge = numbers.pop(at)
    return np.stack([ends[0][edge], ends[1][edge], *numbers], axis=1)


def dense(move: Move, operands: Sequence[Any]) -> Any:
    """The result where PyTorch has it as one operator on dense tensors (or on proxies of them); None elsewhere."""
    first = operands[0]
    if move.kind == "reshape":
        return first.reshape(move.shape)
    if move.kind == "permute":
        return first.permute(move.args)
    if move.kind == "cat":
        return torch.cat(list(operands), dim=move.args[0])
    if move.kind == "slice":
        dim, start, step = move.args
        return first[
            tuple(
                slice(start, start + step * size, step) if d == dim else slice(None)
                for d, size in enumerate(move.shape)
            )
        ]
    if move.kind in ("tril", "triu"):
        return getattr(torch, move.kind)(first, move.args[0])
    if move.kind == "index_select" and isinstance(first, torch.Tensor):
        return first.index_select(move.args[0], torch.tensor(move.args[1:], dtype=torch.int64))
    return None
