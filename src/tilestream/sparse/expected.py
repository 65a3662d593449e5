"""What is expected of whole programs, and how much memory on the chip a stream graph takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tilestream.sparse.einsum import Move
from tilestream.sparse.lowering.build import Region
from tilestream.sparse.moves import perform
from tilestream.sparse.orders.heuristic import Estimate, Profile, estimate
from tilestream.sparse.program import Program
from tilestream.sparse.storage import Format, SparseTensor
from tilestream.sparse.stream.graph import Graph
from tilestream.sparse.timing import COMAL, Timing

WORD = 4


def on_chip_bytes(graph: Graph, depth: int, outputs: Mapping[str, Any]) -> float:
    """Bytes of ``depth`` tokens in every channel, and of the accumulators.

    A coordinate, a reference or a repeat signal takes a word, a value a word an element of its tile. An accumulator
    holds a row of the largest result of this graph a level that it keeps (order 1: one row).
    """
    tile = graph.block**2
    channels = 0
    for node in graph.nodes:
        if node.kind == "broadcast":
            continue
        for port in node.outs:
            channels += depth * WORD * (tile if port == "val" else 1)
    sizes = sorted((n for shape, _ in outputs.values() for n in shape), reverse=True) or [1]
    held = 0
    for node in graph.nodes:
        if node.kind == "spacc":
            order = int(node.attr("order") or 0)
            held += math.prod(max(1, n // graph.block) for n in sizes[:order]) * (WORD * tile + WORD)
    return channels + held


def estimate_program(
    program: Program,
    inputs: Sequence[Any] = (),
    timing: Timing = COMAL,
    observe: Callable[[Region, Estimate], None] | None = None,
) -> Estimate:
    """Expected figures of a program's regions, one after the other; what one makes, the next one reads.

    ``observe``: called with each region and its own.
    """
    have: dict[str, SparseTensor] = dict(program.bind(*inputs))
    expected: dict[str, tuple[Profile, Format]] = {}
    total = Estimate(0.0, 0.0, 0.0)
    for step in program.steps:
        if isinstance(step, Move):
            if all(name in have for name in step.operands):
                have[step.name] = perform(step, [have[name] for name in step.operands])
                continue
            # What moves is taken for dense: a reshape mixes the coordinates of several indices.
            levels = len(step.shape)
            expected[step.name] = Profile(step.shape, (None,) * levels), Format(("dense",) * levels)
            continue
        found = estimate(step.graph, _feed(program, step, have, expected), timing)
        for name, (shape, format) in step.outputs.items():  # a number has no level that says anything of it
            expected[name] = found.outputs.get(name) or Profile(shape, (None,) * len(shape)), format
        total += found
        if observe is not None:
            observe(step, found)
    return total


def _feed(
    program: Program,
    region: Region,
    have: Mapping[str, SparseTensor],
    expected: Mapping[str, tuple[Profile, Format]],
) -> dict[str, SparseTensor | Profile]:
    """What a region reads: views of tensors that are there, profiles of those that are not."""
    feed: dict[str, SparseTensor | Profile] = {}
    for name, (source, format) in region.inputs.items():
        if isinstance(source, str) and source in expected:
            feed[name] = _in_format(*expected[source], format)
        else:
            feed[name] = program.view(name, source, format, have)
    return feed


def _in_format(profile: Profile, stored: Format, wanted: Format) -> Profile:
    """A profile in another order of levels, or in blocks; a dense level holds every coordinate."""
    by_index = dict(zip(stored.order, zip(profile.sizes, profile.shares, strict=True), strict=True))
    if wanted.block > 1 and stored.block == 1:
        for index in sorted(by_index)[-2:]:
            by_index[index] = _blocked(*by_index[index], wanted.block)
    sizes = tuple(by_index[i][0] for i in wanted.order)
    shares = tuple(
        None if kind == "dense" else by_index[i][1] for i, kind in zip(wanted.order, wanted.levels, strict=True)
    )
    return Profile(sizes, shares)


def _blocked(size: int, share: np.ndarray | None, block: int) -> tuple[int, np.ndarray | None]:
    """A level over blocks: one is there if any of its coordinates is."""
    blocks = -(-size // block)
    if share is None:
        return blocks, None
    padded = np.zeros(blocks * block)
    padded[:size] = share
    return blocks, 1 - np.prod(1 - padded.reshape(blocks, block), axis=1)
