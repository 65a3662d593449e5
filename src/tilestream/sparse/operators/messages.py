"""Gathering rows by index and scattering them: products with incidence matrices, or with the adjacency.

An incidence matrix has a row an edge and a one where that edge's node is. Gathering is a product with it, and a sum
over edges one with its transpose. Where gathered rows go straight into a sum, at most multiplied by something of the
edge, the two products are one with the adjacency matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tilestream.errors import SparseError
from tilestream.sparse.einsum import Move
from tilestream.sparse.moves import perform
from tilestream.sparse.operators.masks import Places, scattered_places
from tilestream.sparse.operators.registry import NoLowering, operator
from tilestream.sparse.operators.shapes import swap
from tilestream.sparse.recorder import Gathered, Recorder, View
from tilestream.sparse.storage import SparseTensor, compressed, from_coo, to_coo


def _rows(index: Any, size: int, wrap: bool = False) -> np.ndarray:
    """Indices as int64 [n], checked."""
    if not isinstance(index, torch.Tensor):
        raise NoLowering("an index that is computed from numbers", "give it to the module as a tensor of whole numbers")
    found = index.detach().cpu().reshape(-1).numpy().astype(np.int64)
    found = np.where(found < 0, found + size, found) if wrap else found
    if len(found) and (found.min() < 0 or found.max() >= size):
        wrong = found.min() if found.min() < 0 else found.max()
        raise SparseError(
            f"index {wrong} into {size} rows",
            f"give indices from 0 to {size - 1}; for a bipartite graph, check the sizes",
        )
    return found


def _incidence(rec: Recorder, rows: np.ndarray, size: int) -> View:
    """Ones [edges, nodes] where an edge's node is."""
    key = (rows.tobytes(), size)
    if key not in rec.incidences:
        entries = np.stack([np.arange(len(rows)), rows], axis=1)
        name = rec.fresh(f"{rec.at}_incidence")
        made = from_coo(name, entries, np.ones(len(rows)), (len(rows), size), compressed(2))
        rec.incidences[key] = name, rec.constant(name, made)
    return rec.incidences[key][1]


def letters_of(rank: int, **named: int) -> list[str]:
    """A letter a dimension, those that are named put in."""
    found = list("abcdfghjklmopqrstuvwxyz"[:rank])
    for letter, dim in named.items():
        found[dim] = letter
    return found


def gather(rec: Recorder, x: View, dim: int, index: Any, wrap: bool = False) -> View:
    """Rows of ``x`` along a dimension, by an index [n]."""
    dim %= len(x.shape)
    rows = _rows(index, x.shape[dim], wrap)
    incidence = _incidence(rec, rows, x.shape[dim])
    rank = len(x.shape)
    terms = [["e", "n"], letters_of(rank, n=dim)]
    made = rec.contract(terms, [incidence, x], letters_of(rank, e=dim))
    return Gathered(made.tensor, made.dims, made.shape, x, torch.from_numpy(rows), dim)


def scatter(rec: Recorder, src: View, dim: int, index: Any, size: int, reduce: str) -> View:
    """What comes to each of ``size`` rows, summed or the largest; 0 where nothing comes."""
    dim %= len(src.shape)
    rows = _rows(index, size)
    if len(rows) != src.shape[dim]:
        raise NoLowering(f"{len(rows)} indices for {src.shape[dim]} rows", "give one index a row")
    if isinstance(src, Gathered) and src.dim == dim and size > 1 and src.source.shape[dim] > 1:
        if reduce == "sum":
            return _aggregate(rec, src, rows, size)
        if src.factor is None:
            pairs = _ones(rec, rows, src.index.numpy(), (size, src.source.shape[dim]))
            return _largest(rec, src.source, dim, pairs)
    incidence = _incidence(rec, rows, size)
    if reduce == "sum":
        rank = len(src.shape)
        return rec.contract([["e", "n"], letters_of(rank, e=dim)], [incidence, src], letters_of(rank, n=dim))
    return _largest(rec, src, dim, swap(incidence))


def _largest(rec: Recorder, x: View, dim: int, pairs: View) -> View:
    """The largest of ``x`` along ``dim`` over what each row of ``pairs`` [targets, rows] stores; 0 of nothing."""
    after = len(x.shape) - dim - 1
    spread = View(x.tensor, (*x.dims[:dim], None, *x.dims[dim:]), (*x.shape[:dim], 1, *x.shape[dim:]))
    mask = View(pairs.tensor, (*[None] * dim, *pairs.dims, *[None] * after), (*[1] * dim, *pairs.shape, *[1] * after))
    chosen = rec.binary("mask", spread, mask, "_chosen", fill=-math.inf)
    return rec.unary("zeroed", rec.reduce(chosen, [dim + 1], False, "max", "_largest"))


def _ones(rec: Recorder, targets: np.ndarray, sources: np.ndarray, shape: tuple[int, int]) -> View:
    """The adjacency whose values say how many edges a pair has."""
    return adjacency(rec, np.stack([targets, sources], axis=1), np.ones(len(targets)), shape)


def adjacency(rec: Recorder, entries: np.ndarray, values: np.ndarray, shape: tuple[int, ...]) -> View:
    key = (entries.tobytes(), values.tobytes(), shape)
    if key not in rec.incidences:
        name = rec.fresh(f"{rec.at}_adjacency")
        made = from_coo(name, entries, values, shape, compressed(len(shape)))
        rec.incidences[key] = name, rec.constant(name, made)
    return rec.incidences[key][1]


def _aggregate(rec: Recorder, src: Gathered, rows: np.ndarray, size: int) -> View:
    """A sum over edges of gathered rows times a factor: a product with the adjacency."""
    dim, rank, factor = src.dim, len(src.shape), src.factor
    sources, nodes = src.index.numpy(), src.source.shape[src.dim]
    if factor is not None:
        gap = rank - len(factor.shape)
        factor = View(factor.tensor, (*[None] * gap, *factor.dims), (*[1] * gap, *factor.shape))
    if factor is None or factor.dims[dim] is None:
        pairs = _ones(rec, rows, sources, (size, nodes))
        made = rec.contract([["i", "n"], letters_of(rank, n=dim)], [pairs, src.source], letters_of(rank, i=dim))
        return made if factor is None else rec.binary("mul", made, replace_size(factor, dim), "_times")
    # Dimensions of the factor's tensor in their own order: the edges, and what else it depends on.
    places = {at: d for d, at in enumerate(factor.dims) if at is not None}
    edge = next(at for at, d in places.items() if d == dim)
    others = [at for at in sorted(places) if at != edge]
    sizes = rec.shapes[factor.tensor]
    shape = (size, nodes, *(sizes[at] for at in others))
    known = _known(rec, factor.tensor)
    if known is not None:
        coordinates, values = to_coo(known)
        at = coordinates[:, edge]
        entries = np.concatenate([rows[at][:, None], sources[at][:, None], coordinates[:, others]], axis=1)
        pairs = adjacency(rec, entries, values, shape)
    else:
        ends = [_incidence(rec, rows, size).tensor, _incidence(rec, sources, nodes).tensor]
        name = rec.move("adjacency", [*ends, factor.tensor], shape, (edge,), f"{rec.at}_adjacency")
        pairs = rec.spread(name, shape)
    letters = letters_of(rank, n=dim)
    term = ["i", "n", *(letters[places[at]] for at in others)]
    return rec.contract([term, letters], [pairs, src.source], letters_of(rank, i=dim))


def replace_size(x: View, dim: int) -> View:
    """A view that is the same all along ``dim``, with size 1 there."""
    return replace(x, shape=tuple(1 if d == dim else size for d, size in enumerate(x.shape)))


def _known(rec: Recorder, name: str) -> SparseTensor | None:
    """The values of a tensor that follows from constants by moves alone."""
    if name in rec.constants:
        return rec.constants[name]
    step = next((s for s in rec.steps if s.name == name), None)
    if not isinstance(step, Move):
        return None
    operands = [_known(rec, x) for x in step.operands]
    return perform(step, [x for x in operands if x is not None]) if all(x is not None for x in operands) else None


# -- operators --------------------------------------------------------------------------------------------------------


@operator("index_select")
def _index_select(rec: Recorder, x: View, dim: int, index: Any) -> View:
    return gather(rec, x, dim, index)


@operator("embedding")
def _embedding(rec: Recorder, weight: View, index: Any, *_: Any, **__: Any) -> View:
    made = gather(rec, weight, 0, index)
    return made if index.ndim == 1 else rec.reshape(made, (*index.shape, *weight.shape[1:]))


@operator("index")
def _index(rec: Recorder, x: View, indices: Sequence[Any]) -> View:
    used = [d for d, index in enumerate(indices) if index is not None]
    first = indices[used[0]]
    if len(used) == 1 and isinstance(first, torch.Tensor) and first.dtype == torch.bool:
        if first.ndim > 1:
            raise NoLowering("a mask of several dimensions as an index", "multiply by the mask, or index with numbers")
        first = first.nonzero().reshape(-1)
    if used != list(range(used[0], used[0] + len(used))):
        raise NoLowering("indices with a gap between them", "index one dimension at a time")
    if len(used) > 1:  # several dimensions as one
        found = torch.broadcast_tensors(*[indices[d] for d in used])
        sizes = [x.shape[d] for d in used]
        wrapped = [torch.from_numpy(_rows(i, n, True)).reshape(i.shape) for i, n in zip(found, sizes, strict=True)]
        first = wrapped[0]
        for index, size in zip(wrapped[1:], sizes[1:], strict=True):
            first = first * size + index
        x = rec.reshape(x, (*x.shape[: used[0]], math.prod(sizes), *x.shape[used[-1] + 1 :]))
    made = gather(rec, x, used[0], first, wrap=True)
    if first.ndim == 1:
        return made
    return rec.reshape(made, (*x.shape[: used[0]], *first.shape, *x.shape[used[0] + 1 :]))


def _along(index: torch.Tensor, dim: int) -> torch.Tensor | None:
    """An index that says the same for every other dimension, as [n]."""
    if not index.numel():
        return index.new_zeros(index.shape[dim])
    first = index
    for d in range(index.ndim):
        first = first if d == dim % index.ndim else first.narrow(d, 0, 1)
    return first.reshape(-1) if bool((first == index).all()) else None


def _flat(index: torch.Tensor, dim: int, shape: Sequence[int]) -> torch.Tensor:
    """Where elements of a tensor of ``shape`` are that an index names along one dimension, in the flattened tensor."""
    at = torch.zeros(index.shape, dtype=torch.int64)
    for d, size in enumerate(shape):
        here = torch.arange(index.shape[d]).reshape([-1 if e == d else 1 for e in range(index.ndim)])
        at = at * size + (index if d == dim % index.ndim else here)
    return at


@operator("gather")
def _gather(rec: Recorder, x: View, dim: int, index: Any, sparse_grad: bool = False) -> View:
    if not isinstance(index, torch.Tensor):
        raise NoLowering("gather by an index that is computed", "give it to the module as a tensor of whole numbers")
    dim %= len(x.shape)
    _rows(index, x.shape[dim])
    one = _along(index, dim)
    same = all(a == b for d, (a, b) in enumerate(zip(index.shape, x.shape, strict=True)) if d != dim)
    if one is not None and same:
        return gather(rec, x, dim, one)
    flat = rec.reshape(x, (math.prod(x.shape),))
    return rec.reshape(gather(rec, flat, 0, _flat(index, dim, x.shape).reshape(-1)), tuple(index.shape))


def _scattered(
    rec: Recorder, base: Any, dim: int, index: Any, src: Any, reduce: str, itself: bool, size: tuple[int, ...]
) -> View:
    """``scatter_reduce``: ``reduce`` is sum, mean, amax or amin; ``itself``: ``base`` counts as well."""
    if not isinstance(index, torch.Tensor):
        raise NoLowering("scatter by an index that is computed", "give it to the module as a tensor of whole numbers")
    if reduce not in ("sum", "mean", "amax", "amin"):
        raise NoLowering(f"scatter that reduces by {reduce!r}", "use sum, mean, amax or amin")
    dim %= len(size)
    src = src if tuple(src.shape) == tuple(index.shape) else _cut(rec, src, index.shape)
    one = _along(index, dim)
    same = all(a == b for d, (a, b) in enumerate(zip(index.shape, size, strict=True)) if d != dim)
    if one is None or not same:  # element by element
        flat = _flat(index, dim, size).reshape(-1)
        _rows(index, size[dim])
        source = rec.reshape(src, (math.prod(src.shape),))
        known = isinstance(base, torch.Tensor)
        start = base.reshape(-1) if known else rec.reshape(base, (math.prod(size),))
        made = _scattered(rec, start, 0, flat, source, reduce, itself, (math.prod(size),))
        return rec.reshape(made, size)
    counts = torch.bincount(torch.from_numpy(_rows(one, size[dim])), minlength=size[dim]).to(torch.float64)
    shape = [size[dim] if d == dim else 1 for d in range(len(size))]
    sign = -1.0 if reduce == "amin" else 1.0
    source = src if sign > 0 else rec.unary("neg", src, "_flipped")
    made = scatter(rec, source, dim, one, size[dim], "sum" if reduce in ("sum", "mean") else "max")
    made = made if sign > 0 else rec.unary("neg", made, "_back")
    zero = isinstance(base, torch.Tensor) and not bool(base.any())
    start = rec.known(base, "_base") if isinstance(base, torch.Tensor) else base
    some = rec.known((counts > 0).to(torch.float64).reshape(shape), "_some")
    if reduce == "sum" or reduce == "mean":
        if itself and not zero:
            made = rec.binary("add", made, start, "_with")
        if reduce == "mean":
            made = rec.binary(
                "share", made, rec.known((counts + itself).clamp(min=1).reshape(shape), "_counts"), "_mean"
            )
    elif itself:
        best = rec.binary("max" if reduce == "amax" else "min", made, start, "_best")
        return _chosen(rec, some, best, start)
    if itself or zero:
        return made
    return _chosen(rec, some, made, start)


def _chosen(rec: Recorder, some: View, made: View, start: View) -> View:
    """``made`` where something came, else ``start``."""
    none = rec.unary("eq", some, "_none", 0.0)
    return rec.binary("add", rec.binary("keep", made, some, "_came"), rec.binary("keep", start, none, "_left"))


def _cut(rec: Recorder, src: View, shape: Sequence[int]) -> View:
    for d, size in enumerate(shape):
        src = rec.slice(src, d, 0, size)
    return src


def _size(base: Any) -> tuple[int, ...]:
    return tuple(base.shape)


@operator("scatter_add")
def _scatter_add(rec: Recorder, base: Any, dim: int, index: Any, src: Any) -> View:
    return _scattered(rec, base, dim, index, src, "sum", True, _size(base))


@operator("scatter_reduce")
def _scatter_reduce(
    rec: Recorder, base: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True
) -> View:
    return _scattered(rec, base, dim, index, src, reduce, include_self, _size(base))


@operator("index_add")
def _index_add(rec: Recorder, base: Any, dim: int, index: Any, src: View, alpha: float = 1) -> View:
    src = src if alpha == 1 else rec.unary("mul", src, "_alpha", float(alpha))
    size = _size(base)
    spread = [1] * len(size)
    spread[dim % len(size)] = -1
    whole = tuple(src.shape[d] if d == dim % len(size) else n for d, n in enumerate(size))
    return _scattered(rec, base, dim, index.reshape(spread).expand(whole), src, "sum", True, size)


@operator("index_copy")
def _index_copy(rec: Recorder, base: Any, dim: int, index: Any, src: View) -> View:
    size = _size(base)
    spread = [1] * len(size)
    spread[dim % len(size)] = -1
    return _scatter(rec, base, dim, index.reshape(spread).expand(tuple(src.shape)), src)


@operator("index_reduce")
def _index_reduce(
    rec: Recorder, base: Any, dim: int, index: Any, src: View, reduce: str, *, include_self: bool = True
) -> View:
    size = _size(base)
    spread = [1] * len(size)
    spread[dim % len(size)] = -1
    index = index.reshape(spread).expand(tuple(src.shape))
    return _scattered(rec, base, dim, index, src, reduce, include_self, size)


@operator("scatter")
def _scatter(rec: Recorder, base: Any, dim: int, index: Any, src: Any, reduce: str | None = None) -> View:
    if (
        isinstance(index, Places)
        and reduce is None
        and (dim % len(index.shape), _size(base))
        == (
            index.dim,
            index.marked.shape,
        )
    ):
        if isinstance(base, torch.Tensor):
            base = float(base.reshape(-1)[0]) if _uniform(base) else rec.known(base, "_base")
        return scattered_places(rec, base, index, src)
    if reduce is not None:
        return _scattered(rec, base, dim, index, src, {"add": "sum"}.get(reduce, reduce), True, _size(base))
    _once(index, dim, _size(base))
    src = (
        src if isinstance(src, View) else rec.known(torch.full(index.shape, float(src), dtype=torch.float64), "_value")
    )
    return _scattered(rec, base, dim, index, src, "amax", False, _size(base))


def _uniform(x: torch.Tensor) -> bool:
    return x.numel() > 0 and bool((x == x.reshape(-1)[0]).all())


def _once(index: Any, dim: int, size: Sequence[int]) -> None:
    if not isinstance(index, torch.Tensor):
        raise NoLowering("scatter by an index that is computed", "give it to the module as a tensor of whole numbers")
    flat = _flat(index, dim, size).reshape(-1)
    if len(flat) != len(flat.unique()):
        raise SparseError("a scatter that writes one place twice", "say how to reduce, with scatter_reduce")


@operator("index_fill")
def _index_fill(rec: Recorder, x: View, dim: int, index: Any, value: Any) -> View:
    dim %= len(x.shape)
    some = torch.zeros(x.shape[dim], dtype=torch.float64)
    some[torch.from_numpy(_rows(index, x.shape[dim], True))] = 1.0
    mask = rec.known(some.reshape([-1 if d == dim else 1 for d in range(len(x.shape))]), "_some")
    fill = value if isinstance(value, View) else rec.known(torch.tensor(float(value), dtype=torch.float64), "_value")
    return _chosen(rec, mask, fill, x)


@operator("index_put")
def _index_put(rec: Recorder, base: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> View:
    size = _size(base)
    values = rec.known(values, "_values") if isinstance(values, torch.Tensor) else values
    if not all(isinstance(i, torch.Tensor) for i in indices):
        raise NoLowering("index_put with indices that are computed, or with ranges", "use index_add or torch.where")
    if len(indices) == 1 and indices[0].dtype == torch.bool:
        indices = list(indices[0].nonzero(as_tuple=True))
    found = torch.broadcast_tensors(*indices)
    rest = math.prod(size[len(found) :])
    at = torch.zeros(found[0].shape, dtype=torch.int64)
    for index, n in zip(found, size, strict=False):
        at = at * n + torch.from_numpy(_rows(index, n, True)).reshape(index.shape)
    at = (at.reshape(-1, 1) * rest + torch.arange(rest)).reshape(-1)
    if not accumulate and len(at) != len(at.unique()):
        raise SparseError("index_put that writes one place twice", "use accumulate=True, or indices that differ")
    shape = (*found[0].shape, *size[len(found) :])
    gap = len(shape) - len(values.shape)
    spread = View(
        values.tensor,
        (
            *[None] * gap,
            *(d if s == n else None for d, s, n in zip(values.dims, values.shape, shape[gap:], strict=True)),
        ),
        shape,
    )
    flat = rec.reshape(spread, (math.prod(shape),))
    start = base.reshape(-1) if isinstance(base, torch.Tensor) else rec.reshape(base, (math.prod(size),))
    made = _scattered(rec, start, 0, at, flat, "sum" if accumulate else "amax", accumulate, (math.prod(size),))
    return rec.reshape(made, size)


@operator("segment_reduce")
def _segment_reduce(
    rec: Recorder,
    x: View,
    reduce: str,
    *,
    lengths: torch.Tensor | None = None,
    indices: Any = None,
    offsets: torch.Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> View:
    if lengths is None and offsets is not None:
        lengths = offsets.diff()
    if lengths is None or lengths.ndim != 1 or axis or (initial or 0.0) != 0.0 or indices is not None:
        raise NoLowering("segment_reduce of this kind", "give lengths or offsets of the first dimension")
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    size = (len(lengths), *x.shape[1:])
    index = rows.reshape([-1, *[1] * (len(size) - 1)]).expand(tuple(x.shape))
    names = {"max": "amax", "min": "amin"}
    if reduce in names and initial is None and not bool((lengths > 0).all()):
        raise SparseError(f"segment_reduce by {reduce!r} with an empty segment", "give initial=0")
    return _scattered(rec, torch.zeros(size), 0, index, x, names.get(reduce, reduce), False, size)


@operator("embedding_bag")
def _embedding_bag(
    rec: Recorder,
    weight: View,
    index: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad: bool = False,
    mode: int = 0,
    sparse: bool = False,
    weights: View | None = None,
    last: bool = False,
    padding: int | None = None,
) -> list[Any]:
    """Rows of a table summed (``mode`` 0), averaged (1) or the largest (2) by bag: the first of four results."""
    ends = offsets.reshape(-1).tolist() if last else [*offsets.reshape(-1).tolist(), index.numel()]
    bags = torch.repeat_interleave(torch.arange(len(ends) - 1), torch.tensor(ends).diff())
    index = index.reshape(-1)
    kept = torch.ones_like(index, dtype=torch.bool) if padding is None or padding < 0 else index != padding
    rows = gather(rec, weight, 0, index[kept])
    if weights is not None:
        factor = gather(rec, weights, 0, kept.nonzero().reshape(-1)) if not bool(kept.all()) else weights
        factor = View(factor.tensor, (*factor.dims, None), (*factor.shape, 1))
        made = rec.binary("mul", rows, factor, "_weighted")
        rows = replace(rows, tensor=made.tensor, dims=made.dims, shape=made.shape, factor=factor)
    count = len(ends) - 1
    base = torch.zeros(count, weight.shape[1], dtype=torch.float64)
    spread = bags[kept].reshape(-1, 1).expand(-1, weight.shape[1])
    reduce = ("sum", "mean", "amax")[mode]
    return [_scattered(rec, base, 0, spread, rows, reduce, False, (count, weight.shape[1])), None, None, None]
