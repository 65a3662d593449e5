"""What is expected of whole programs, and how much memory on the chip a stream graph takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tilestream.sparse.graph import Graph
from tilestream.sparse.heuristic import Estimate, estimate
from tilestream.sparse.program import Program

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


def estimate_program(program: Program, inputs: Sequence[Any] = ()) -> Estimate:
    """Expected figures of a program's regions, one after the other; what one makes, the next one reads."""
    tensors: dict[str, Any] = dict(program.bind(*inputs))
    total = Estimate(0.0, 0.0, 0.0)
    for region in program.regions:
        found = estimate(region.graph, tensors)
        tensors.update(found.outputs)
        total += found
    return total
