"""Weights that are not in the L2 when a region starts, as in a model that moves more than it holds: a region is timed
on copies of its weights in turn.

Timed warm, SmolLM's down projection took what eager's took on an H100 (8.8 us), and from DRAM 1.3 times that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any, TypeVar

from tilestream.graph.region import Region
from tilestream.run import timing

TIMES_L2 = 2
"""What lies between two reads of a weight, in sizes of the L2; as ``benchmarks`` does for cold rows."""

T = TypeVar("T")


def sets(region: Region, values: Sequence[Any], l2_bytes: float) -> list[Sequence[Any]]:
    """``values`` of a region's arguments, and where the region is cold, copies that differ in where its weights lie:
    as many as are ``TIMES_L2`` of the L2, but at most what is captured."""
    weights = {p.index: values[p.index] for p in region.parameters}
    size = sum(w.numel() * w.element_size() for w in weights.values())
    if not region.cold or not size:
        return [values]
    count = min(timing.MOST_CALLS, math.ceil(TIMES_L2 * l2_bytes / size))
    found = [values]
    for _ in range(count - 1):
        copies = {index: weight.clone() for index, weight in weights.items()}
        found.append([copies.get(index, value) for index, value in enumerate(values)])
    return found


def in_turn(run: Callable[[Sequence[Any]], T], given: Sequence[Sequence[Any]]) -> Callable[[], T]:
    """A call of ``run`` on the next of ``given``, all of which it has seen: what a first call makes is there."""
    if len(given) == 1:
        return partial(run, given[0])
    for values in given:
        run(values)
    turns = cycle(given)
    return lambda: run(next(turns))
