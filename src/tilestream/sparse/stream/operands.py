"""What a stream graph is run on: every tensor that it reads, a shape for every result, one block size."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tilestream.errors import SparseError
from tilestream.sparse.storage import Format, SparseTensor
from tilestream.sparse.stream.graph import Graph


def check_operands(
    graph: Graph, tensors: Mapping[str, SparseTensor], shapes: Mapping[str, tuple[tuple[int, ...], Format]]
) -> None:
    """Whether ``graph`` can be run on ``tensors``, with ``shapes`` (logical shape, format) of its results.

    Raises:
        SparseError: a tensor or a shape is missing, or a tensor has other blocks than the graph, or fibers that are
            out of bounds or not sorted.
    """
    if missing := [x for x in graph.tensors() if x not in tensors]:
        raise SparseError(f"graph {graph.name!r} reads tensor {missing[0]!r}, which is not given", "pass it")
    if missing := [x for x in graph.results() if x not in shapes]:
        raise SparseError(f"result {missing[0]!r} of graph {graph.name!r} has no shape", "pass it in shapes")
    if wrong := [x for x in graph.tensors() if tensors[x].format.block != graph.block]:
        has = tensors[wrong[0]].format.block
        raise SparseError(
            f"tensor {wrong[0]!r} has blocks of {has}, graph {graph.name!r} of {graph.block}", "use one block size"
        )
    for name in graph.tensors():
        for depth, level in enumerate(tensors[name].levels):
            if level.seg is not None and level.crd is not None and (wrong := _wrong_fibers(level.seg, level.crd)):
                raise SparseError(
                    f"level {depth} of tensor {name!r} has {wrong}",
                    "make it with storage.pack or one of storage's from_ functions, which sort and add up",
                )


def _wrong_fibers(seg: np.ndarray, crd: np.ndarray) -> str:
    """What is wrong with a compressed level: joiners take sorted fibers, each coordinate once, for granted."""
    if np.any(np.diff(seg, prepend=0) < 0) or seg[-1] > len(crd):
        return "segments that go down or end after its coordinates"
    up = crd[1 : seg[-1]] > crd[: max(seg[-1] - 1, 0)]
    starts = seg[(seg > 0) & (seg < seg[-1])]
    up[starts - 1] = True  # from one fiber to the next
    return "" if up.all() else "coordinates that do not go up within a fiber"
