"""From the streams that writers keep to a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilestream.errors import SparseError
from tilestream.sparse.storage import Format, Level, SparseTensor
from tilestream.sparse.stream.tokens import show


def assemble(
    name: str,
    shape: tuple[int, ...],
    format: Format,
    crds: Sequence[np.ndarray],
    values: np.ndarray,
    skip_empty: bool = False,
) -> SparseTensor:
    """The tensor that a result's writers were given.

    Args:
        shape: logical shape.
        format: compressed levels keep what came, empty fibers included; dense ones are filled with zeros.
        crds: one int64 array of tags a level, outermost first: coordinates and stops, without done.
        values: float64 [n] or [n, block, block], stops left out.
        skip_empty: the level above may lack the coordinates of fibers that hold nothing, as where they were dropped.

    Raises:
        SparseError: streams that do not fit together.
    """
    block = format.block
    sizes = [shape[i] for i in format.order]
    for index in {len(shape) - 2, len(shape) - 1} if block > 1 else ():
        sizes[format.order.index(index)] //= block
    if len(crds) != len(format.levels):
        raise SparseError(
            f"result {name!r} has {len(crds)} coordinate writers for {len(format.levels)} levels",
            "write every level of the result once",
        )
    fibers = np.array([True])  # of the level above: its elements, and its stops that end nothing
    where, count = np.zeros(1, dtype=np.int64), 1  # storage positions of its elements, and how many it has
    levels: list[Level] = []
    for depth, tags in enumerate(np.asarray(x, dtype=np.int64) for x in crds):
        tags, fibers, lengths = _fibers(tags, fibers, skip_empty and depth > 0, f"level {depth} of result {name!r}")
        stops, lengths = tags < 0, lengths[fibers]
        crd, size = tags[~stops], sizes[depth]
        if len(crd) and crd.max() >= size:
            raise SparseError(
                f"coordinate {crd.max()} at level {depth} of result {name!r}, which has {size}",
                "give the result the shape that its coordinates need",
            )
        if format.levels[depth] == "dense":
            levels.append(Level(size))
            where, count = np.repeat(where, lengths) * size + crd, count * size
        else:
            counts = np.zeros(count, dtype=np.int64)
            counts[where] = lengths
            levels.append(Level(size, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), crd))
            where, count = np.arange(len(crd)), len(crd)
        bare = stops & np.concatenate([[True], stops[:-1]])
        fibers = ~stops[~stops | bare]
    if len(values) != len(where):
        raise SparseError(
            f"result {name!r} has {len(values)} values for {len(where)} coordinates",
            "write streams of one structure; where an outer fiber can be empty, reduce with spacc of order 0",
        )
    kept = np.zeros((count, *((block, block) if block > 1 else ())))
    kept[where] = values
    return SparseTensor(name, tuple(shape), format, tuple(levels), kept)


def _fibers(
    tags: np.ndarray, fibers: np.ndarray, skip_empty: bool, where: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tags of a level, what they are fibers of, and the length of each fiber.

    Args:
        fibers: of the level above: its elements, and its stops that end nothing.

    Raises:
        SparseError: there are others than the level above has.
    """
    stops = tags < 0
    if skip_empty and np.count_nonzero(stops) > len(fibers):
        tags = _without_empty(tags)
        stops, fibers = tags < 0, fibers[fibers]
    ends = np.flatnonzero(stops)
    lengths = np.diff(ends, prepend=-1) - 1
    if len(ends) != len(fibers) or lengths[~fibers].any() or (len(tags) and not stops[-1]):
        last = show(int(tags[-1])) if len(tags) else "nothing"
        raise SparseError(
            f"{where} has {len(ends)} fibers (its stream ends in {last}) "
            f"and the level above has {int(fibers.sum())} coordinates",
            "write streams of one structure; where an outer fiber can be empty, reduce with spacc of order 0",
        )
    return tags, fibers, lengths


def _without_empty(tags: np.ndarray) -> np.ndarray:
    """The coordinates and one stop behind each fiber that has some: the highest of those that came."""
    kept: list[int] = []
    for tag in tags.tolist():
        if tag >= 0 or (kept and kept[-1] >= 0):
            kept.append(tag)
        elif kept:
            kept[-1] = min(kept[-1], tag)
    return np.array(kept, dtype=np.int64)
