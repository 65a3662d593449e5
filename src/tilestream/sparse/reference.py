"""Einsums over coordinates, one join of sorted keys after the other: the oracle where dense PyTorch does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tilestream.errors import SparseError

MOST = 20_000_000
"""Products of a contraction, at most."""


@dataclass(frozen=True)
class Entries:
    """What a tensor stores: ``indices`` its letters, ``at`` int64 [n, d], ``values`` float64 [n]."""

    indices: str
    at: np.ndarray
    values: np.ndarray


def einsum(text: str, operands: Sequence[tuple[np.ndarray, np.ndarray]], shape: Sequence[int]) -> torch.Tensor:
    """``torch.einsum`` of sparse operands, as COO.

    Args:
        text: as ``'ik,kj->ij'``.
        operands: coordinates int64 [n, d] and values float64 [n] of each.
        shape: of the result.

    Raises:
        SparseError: more than ``MOST`` products in one contraction.
    """
    left, result = text.replace(" ", "").split("->")
    terms = left.split(",")
    entries = [Entries(term, *given) for term, given in zip(terms, operands, strict=True)]
    made = entries[0]
    for n in range(1, len(entries)):
        later = set(result).union(*terms[n + 1 :])
        made = _summed(
            _joined(made, entries[n]), "".join(i for i in dict.fromkeys(made.indices + terms[n]) if i in later)
        )
    made = _summed(made, result)
    at = torch.from_numpy(np.ascontiguousarray(made.at.T))
    return torch.sparse_coo_tensor(at, torch.from_numpy(made.values), tuple(shape), check_invariants=True)


def _joined(a: Entries, b: Entries) -> Entries:
    """A product for every pair of entries that agree in the indices of both."""
    shared = [i for i in a.indices if i in b.indices]
    keys = np.concatenate([_columns(a, shared), _columns(b, shared)])
    _, key = np.unique(keys, axis=0, return_inverse=True) if shared else (None, np.zeros(len(keys), dtype=np.int64))
    first, second = key[: len(a.values)], key[len(a.values) :]
    order = np.argsort(second, kind="stable")
    low, high = (np.searchsorted(second[order], first, side) for side in ("left", "right"))
    counts = high - low
    if int(counts.sum()) > MOST:
        raise SparseError(f"{int(counts.sum()):,} products to compare with", "compare a smaller instance")
    mine = np.repeat(np.arange(len(first)), counts)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    other = order[np.repeat(low, counts) + np.arange(len(mine)) - starts]
    rest = [i for i in b.indices if i not in a.indices]
    at = np.concatenate([a.at[mine], _columns(b, rest)[other]], axis=1)
    return Entries(a.indices + "".join(rest), at, a.values[mine] * b.values[other])


def _summed(x: Entries, kept: str) -> Entries:
    """Summed over all indices but ``kept``, in that order."""
    if not kept:
        return Entries("", np.zeros((1, 0), dtype=np.int64), np.array([x.values.sum()]))
    at, group = np.unique(_columns(x, kept), axis=0, return_inverse=True)
    return Entries(kept, at, np.bincount(group.reshape(-1), x.values, minlength=len(at)))


def _columns(x: Entries, indices: Sequence[str]) -> np.ndarray:
    return x.at[:, [x.indices.index(i) for i in indices]]
