"""Changes of shape: other ways to read a tensor, or data movement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilestream.sparse.operators.registry import Lowering, operator
from tilestream.sparse.recorder import Condition, Recorder, View


def swap(x: View) -> View:
    return View(x.tensor, (*x.dims[:-2], x.dims[-1], x.dims[-2]), (*x.shape[:-2], x.shape[-1], x.shape[-2]))


def on_truths(lowering: Lowering) -> Lowering:
    """A change of shape, of truth values too."""

    def lower(rec: Recorder, x: View | Condition, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, Condition):
            return lowering(rec, x, *args, **kwargs)
        made = lowering(rec, x.view, *args, **kwargs)
        if isinstance(made, list):
            return [Condition(one, x.stored, x.zeros) for one in made]
        return Condition(made, x.stored, x.zeros)

    return lower


@operator("view", "reshape", "_unsafe_view", "flatten", "unsqueeze", "squeeze", "view_as", "reshape_as", "unflatten")
@on_truths
def _reshape(rec: Recorder, x: View, *_: Any, shape: tuple[int, ...]) -> View:
    return rec.reshape(x, shape)


@operator("transpose", "swapaxes")
@on_truths
def _transpose(rec: Recorder, x: View, a: int, b: int) -> View:
    order = list(range(len(x.shape)))
    order[a], order[b] = order[b], order[a]
    return _permute(rec, x, order)


@operator("t", "numpy_T", "mT", "adjoint")
@on_truths
def _t(rec: Recorder, x: View) -> View:
    return swap(x) if len(x.shape) > 1 else x


@operator("permute")
@on_truths
def _permute(rec: Recorder, x: View, order: Sequence[int]) -> View:
    return View(x.tensor, tuple(x.dims[d] for d in order), tuple(x.shape[d] for d in order))


@operator("expand", "expand_as", "broadcast_to")
@on_truths
def _expand(rec: Recorder, x: View, *_: Any, shape: tuple[int, ...], **__: Any) -> View:
    return View(x.tensor, (None,) * (len(shape) - len(x.shape)) + x.dims, shape)


@operator("copy")
def _copy(rec: Recorder, x: View, y: View, *_: Any) -> View:
    return View(y.tensor, (None,) * (len(x.shape) - len(y.shape)) + y.dims, x.shape)


@operator("slice")
@on_truths
def _slice(
    rec: Recorder, x: View, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> View:
    first, last, step = slice(start, end, step).indices(x.shape[dim])
    return rec.slice(x, dim % len(x.shape), first, last, step)


@operator("narrow")
@on_truths
def _narrow(rec: Recorder, x: View, dim: int, start: int, length: int) -> View:
    return rec.slice(x, dim % len(x.shape), start, start + length)


@operator("select")
@on_truths
def _select(rec: Recorder, x: View, dim: int, index: int) -> View:
    dim, index = dim % len(x.shape), index % x.shape[dim]
    one = rec.slice(x, dim, index, index + 1)
    return rec.reshape(one, one.shape[:dim] + one.shape[dim + 1 :])


@operator("split", "split_with_sizes", "chunk", "tensor_split")
@on_truths
def _split(rec: Recorder, x: View, sizes: Any, dim: int = 0, *, shape: list[tuple[int, ...]]) -> list[View]:
    dim, at, parts = dim % len(x.shape), 0, []
    for one in shape:
        parts.append(rec.slice(x, dim, at, at + one[dim]))
        at += one[dim]
    return parts


@operator("unbind")
@on_truths
def _unbind(rec: Recorder, x: View, dim: int = 0) -> list[View]:
    return [_select(rec, x, dim, n) for n in range(x.shape[dim])]


@operator("cat")
def _cat(rec: Recorder, parts: Sequence[View], dim: int = 0) -> View:
    return rec.cat(parts, dim % len(parts[0].shape))


@operator("stack")
def _stack(rec: Recorder, parts: Sequence[View], dim: int = 0) -> View:
    dim %= len(parts[0].shape) + 1
    return rec.cat([rec.reshape(p, (*p.shape[:dim], 1, *p.shape[dim:])) for p in parts], dim)


@operator("repeat", "tile")
@on_truths
def _repeat(rec: Recorder, x: View, times: Sequence[int]) -> View:
    rank = max(len(times), len(x.shape))
    times = (*[1] * (rank - len(times)), *times)
    dims = (*[None] * (rank - len(x.shape)), *x.dims)
    shape = (*[1] * (rank - len(x.shape)), *x.shape)
    spread = [(None, n) for n in times]
    pairs = [one for pair in zip(spread, zip(dims, shape, strict=True), strict=True) for one in pair]
    whole = View(x.tensor, tuple(d for d, _ in pairs), tuple(n for _, n in pairs))
    return rec.reshape(whole, tuple(n * size for n, size in zip(times, shape, strict=True)))
