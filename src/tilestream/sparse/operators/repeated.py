"""Rows in another order or several times: gathered by an index that follows from shapes, and running sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tilestream.sparse.operators.messages import adjacency, gather, letters_of
from tilestream.sparse.operators.registry import operator
from tilestream.sparse.recorder import Recorder, View


@operator("repeat_interleave")
def _repeat_interleave(rec: Recorder, x: View, times: Any, dim: int | None = None, **_: Any) -> View:
    x, dim = (rec.reshape(x, (math.prod(x.shape),)), 0) if dim is None else (x, dim % len(x.shape))
    if isinstance(times, int):
        times = torch.tensor([times])
    rows = torch.arange(x.shape[dim]).repeat_interleave(times.expand(x.shape[dim]))
    return gather(rec, x, dim, rows)


@operator("flip")
def _flip(rec: Recorder, x: View, dims: Sequence[int]) -> View:
    for dim in dims:
        x = gather(rec, x, dim, torch.arange(x.shape[dim]).flip(0))
    return x


@operator("unfold")
def _unfold(rec: Recorder, x: View, dim: int, size: int, step: int) -> View:
    """Windows along a dimension; a window's elements become the last one."""
    dim %= len(x.shape)
    starts = torch.arange(0, x.shape[dim] - size + 1, step)
    rows = gather(rec, x, dim, (starts[:, None] + torch.arange(size)).reshape(-1))
    made = rec.reshape(rows, (*x.shape[:dim], len(starts), size, *x.shape[dim + 1 :]))
    order = [d for d in range(len(made.shape)) if d != dim + 1] + [dim + 1]
    return View(made.tensor, tuple(made.dims[d] for d in order), tuple(made.shape[d] for d in order))


@operator("cumsum")
def _cumsum(rec: Recorder, x: View, dim: int, **_: Any) -> View:
    """A product with a triangle of ones."""
    dim %= len(x.shape)
    size, rank = x.shape[dim], len(x.shape)
    entries = np.argwhere(np.tri(size))
    triangle = adjacency(rec, entries, np.ones(len(entries)), (size, size))
    return rec.contract([["e", "n"], letters_of(rank, n=dim)], [triangle, x], letters_of(rank, e=dim))
