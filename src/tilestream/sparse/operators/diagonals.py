"""Triangles, diagonals and borders: data movement on coordinates, so that what is sparse stays so."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilestream.sparse.operators.registry import NoLowering, operator
from tilestream.sparse.operators.shapes import on_truths
from tilestream.sparse.recorder import Recorder, View


def _moved(rec: Recorder, kind: str, x: View, args: tuple[int, ...], shape: tuple[int, ...]) -> View:
    """A move of a tensor none of whose dimensions is of size 1, which a program leaves out."""
    if 1 in (*x.shape, *shape):
        raise NoLowering(f"{kind} of a tensor of shape {x.shape}", "drop its dimensions of size 1")
    return rec.spread(rec.move(kind, [rec.plain(x)], shape, args, rec.at), shape)


@operator("tril")
@on_truths
def _tril(rec: Recorder, x: View, diagonal: int = 0) -> View:
    return _moved(rec, "tril", x, (diagonal,), x.shape)


@operator("triu")
@on_truths
def _triu(rec: Recorder, x: View, diagonal: int = 0) -> View:
    return _moved(rec, "triu", x, (diagonal,), x.shape)


def _last(rank: int, first: int, second: int) -> list[int]:
    """An order of dimensions with two of them last."""
    ends = [first % rank, second % rank]
    return [d for d in range(rank) if d not in ends] + ends


@operator("diagonal", "diagonal_copy")
@on_truths
def _diagonal(rec: Recorder, x: View, offset: int = 0, dim1: int = 0, dim2: int = 1) -> View:
    order = _last(len(x.shape), dim1, dim2)
    x = View(x.tensor, tuple(x.dims[d] for d in order), tuple(x.shape[d] for d in order))
    length = min(x.shape[-2] - max(-offset, 0), x.shape[-1] - max(offset, 0))
    return _moved(rec, "diagonal", x, (offset,), (*x.shape[:-2], max(length, 0)))


@operator("diag_embed")
@on_truths
def _diag_embed(rec: Recorder, x: View, offset: int = 0, dim1: int = -2, dim2: int = -1) -> View:
    edge, rank = x.shape[-1] + abs(offset), len(x.shape) + 1
    made = _moved(rec, "diag_embed", x, (offset,), (*x.shape[:-1], edge, edge))
    order = _last(rank, dim1, dim2)
    back = [order.index(d) for d in range(rank)]
    return View(made.tensor, tuple(made.dims[d] for d in back), tuple(made.shape[d] for d in back))


@operator("constant_pad_nd")
@on_truths
def _pad(rec: Recorder, x: View, pad: Sequence[int], value: float = 0.0) -> View:
    """``pad``: before and after, from the last dimension on; what is negative takes away."""
    inside = torch.zeros(x.shape, dtype=torch.float64) if value else None
    for n in range(len(pad) // 2):
        dim, before, after = len(x.shape) - 1 - n, pad[2 * n], pad[2 * n + 1]
        x = rec.slice(x, dim, max(-before, 0), x.shape[dim] - max(-after, 0))
        before, after = max(before, 0), max(after, 0)
        if before or after:
            shape = tuple(s + (before + after) * (d == dim) for d, s in enumerate(x.shape))
            x = _moved(rec, "pad", x, (dim, before), shape)
    if inside is None:
        return x
    border = torch.constant_pad_nd(inside, list(pad), float(value))
    return rec.binary("add", x, rec.known(border, "_border"), "_bordered")
