"""What rewrites are told by who runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx

from tilestream.graph.sums import Sum

APART = "tilestream.apart"
"""Key in the ``meta`` of a node that stays out of every region: why."""


class SortedSums(NamedTuple):
    """Sums of a graph that sums of sorted rows replace. Each of ``tables`` and ``paying`` shares one sort; those of one
    of ``tables`` are one launch. ``counts`` need no sort: they are counted in whole numbers."""

    tables: list[list[Sum]]
    paying: list[list[Sum]]
    counts: list[Sum]


Runs = Callable[[Any, Sequence[Any], Mapping[str, Any]], bool]
"""Whether an operator has a kernel for arguments like these fake ones."""


@dataclass(frozen=True)
class Settings:
    """What decides where a rewrite applies, besides the graph.

    Attributes:
        least_rows: from how many rows on weight gradients may be launches of ours.
        bulk: whether kernels copy pixels of convolutions in bulk.
        library_epilogues: whether a library's products take in their activations, and are padded.
        sums: which sums by an index are made in sorted order; None where the graph is not to run.
        aligns: which products read copies of their rows that begin on 16 bytes; None where none do.
        runs: whether a library has a kernel; None where it has all.

    Torch pickles this with the partitioner that it is of, so functions have names.
    """

    least_rows: int = 0
    bulk: bool = True
    library_epilogues: bool = True
    sums: Callable[[fx.Graph], SortedSums] | None = None
    aligns: Callable[[fx.Node], bool] | None = None
    runs: Runs | None = None


DEFAULT = Settings()
"""Of a graph of any size that does not run."""
