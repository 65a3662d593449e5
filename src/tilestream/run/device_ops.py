"""Kernels of ours for the operators that rewrites put into graphs (``graph.rewrites.operators``)."""

from __future__ import annotations

from functools import lru_cache, partial
from math import prod

import torch
from torch import Tensor, fx

from tilestream.graph.own import LIBRARY, on_gpu
from tilestream.graph.rewrites import operators
from tilestream.graph.rewrites.operators import LENT, SEGMENT_REDUCE, SEGMENTS, SORTED_INDEX, busy_words
from tilestream.ir.dtypes import DTYPES
from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.segments.reduce import MOST_FEATURES, reduction
from tilestream.run import kept_lists
from tilestream.run.call import ready
from tilestream.run.executable import Enqueue, build_ahead, executable


def segments(index: Tensor, nodes: int, kept: int = 0, wraps: bool = True, drops: bool = False) -> tuple[Tensor, ...]:
    """An index sorted; where the graph says that it may be ``kept``, by an earlier call if that is sure.

    Raises:
        InputError: an index is no node. The kernel ends, as torch's own assertion does, and the CUDA context is lost:
            this call says so where torch notices in time, else the next one.
    """
    make = partial(_sorted, index, nodes, wraps, drops)
    return kept_lists.kept(index, nodes, make, ("sorted", wraps, drops), kept == LENT) if kept else make()


def _sorted(index: Tensor, nodes: int, wraps: bool = True, drops: bool = False) -> tuple[Tensor, ...]:
    if not index.is_cuda:
        return operators.segments(index, nodes, wraps=wraps, drops=drops)
    from tilestream.cuda import sorted_keys

    with sorted_keys.explained(index.device):
        busy = index.new_empty(busy_words(len(index)), dtype=torch.int32)
        return *sorted_keys.segments(index, nodes, busy, wraps, drops), busy


def sorted_index(index: Tensor, order: Tensor, rows: int, wraps: bool = True, kept: int = 0) -> Tensor:
    """An index of rows in sorted order; ``kept`` as in ``segments``.

    Raises:
        InputError: an index is no row, as in ``segments``.
    """

    def make() -> tuple[Tensor, ...]:
        return (_picked(index, order, rows, wraps),)

    return (kept_lists.kept(index, rows, make, ("picked", wraps), True, order) if kept else make())[0]


def _picked(index: Tensor, order: Tensor, rows: int, wraps: bool) -> Tensor:
    if not index.is_cuda:
        return operators.sorted_index(index, order, rows, wraps)
    from tilestream.cuda import sorted_keys

    with sorted_keys.explained(index.device):
        return sorted_keys.picked(index, order, rows, wraps)


def segment_reduce(
    base: Tensor | None, rows: Tensor, order: Tensor | None, starts: Tensor, busy: Tensor | None, how: str = "sum"
) -> Tensor:
    """The rows of each segment reduced, by a kernel of the family segments.

    Raises:
        InputError: ``order`` names no row, or ``starts`` are no bounds; as for ``segments``.
    """
    from tilestream.cuda import sorted_keys

    if rows.dtype not in DTYPES:
        return operators.segment_reduce(base, rows, order, starts, busy, how)
    shape, features = (len(starts) - 1, *rows.shape[1:]), prod(rows.shape[1:])
    tensors = {"rows": rows, "base": base}
    flat = {name: t.reshape(t.shape[0], features) for name, t in tensors.items() if t is not None}
    lists = {"order": order if order is None else order.int(), "starts": starts, "starts.busy": busy}
    fixed = {name: t for name, t in lists.items() if t is not None}
    total = rows.new_empty(shape[0], features)
    with sorted_keys.explained(rows.device), torch.cuda.device_of(rows):
        for first in range(0, features if shape[0] else 0, MOST_FEATURES):
            columns = slice(first, first + MOST_FEATURES)
            part = total[:, columns] if features <= MOST_FEATURES else rows.new_empty(total[:, columns].shape)
            given = {name: ready(t[:, columns]) for name, t in flat.items()} | fixed | {"y": part}
            options = [x is not None for x in (base, order, busy)]
            pipeline = reduction(how, part.shape[1], DTYPES[rows.dtype], *options)
            lie = tuple((t.shape, t.stride()) for t in given.values())
            _bound(pipeline, rows.device, shape[0], tuple(given), lie)(tuple(given.values()))
            if part.shape[1] < features:
                total[:, columns] = part
    return total.view(shape)


@lru_cache(maxsize=256)
def _bound(pipeline: Pipeline, device: torch.device, nodes: int, names: tuple[str, ...], _: object) -> Enqueue:
    """A reduction to ``nodes`` nodes, of tensors that are elsewhere at each call, and lie as they lie."""
    return executable(pipeline, "cuda", device).bind({}, nodes, names)


def begin(graph: fx.Graph) -> None:
    """Begin to compile the kernels of a graph's sums, which otherwise begin when the graph is first called."""
    pipelines = []
    for node in graph.find_nodes(op="call_function", target=SEGMENT_REDUCE):
        base, given, order, _, busy, how = node.args if len(node.args) == 6 else (*node.args, "sum")
        rows = given.meta["val"]
        features = prod(rows.shape[1:])
        if rows.is_cuda and rows.dtype in DTYPES and isinstance(features, int) and 0 < features <= MOST_FEATURES:
            options = [x is not None for x in (base, order, busy)]
            pipelines.append(reduction(how, features, DTYPES[rows.dtype], *options))
    if pipelines:
        from tilestream.cuda import sorted_keys

        build_ahead(pipelines, "cuda")
        sorted_keys.begin()


on_gpu(SEGMENTS, segments)
on_gpu(SORTED_INDEX, sorted_index)
on_gpu(SEGMENT_REDUCE, segment_reduce)
for _name, _kernel in (("segments", segments), ("sorted_index", sorted_index)):
    LIBRARY.impl(_name, _kernel, "CPU")  # lists are kept there as well
