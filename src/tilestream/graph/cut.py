"""A joint graph as forward and backward: rewritten, cut by torch's partitioner, and cut again with less to save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from tilestream.graph.recompute import make_again, saved_bytes, unsaved
from tilestream.graph.rewrites.settings import DEFAULT, Settings
from tilestream.graph.rewrites.table import When, rewrite

SPARED = "tilestream_spared"
"""In the ``meta`` of a backward graph: bytes that torch's partitioner would have saved for it."""


def _nothing(_: fx.GraphModule) -> None:
    """Leaves a graph as it is."""


@dataclass(frozen=True)
class Cutter:
    """Cuts where torch's minimum cut says (``min_cut_rematerialization_partition``), but makes again what costs no time
    (``graph.recompute``). A ``partition_fn`` of AOTAutograd.

    Args:
        settings: of the rewrites of a joint graph.
        first: rewrites it before all others do.
    """

    settings: Settings = DEFAULT
    first: Callable[[fx.GraphModule], object] = _nothing

    def __call__(
        self, joint: fx.GraphModule, inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        from torch._functorch.partitioners import min_cut_rematerialization_partition as minimum_cut

        self.first(joint)
        rewrite(joint, When.JOINT, self.settings)
        forward, backward = minimum_cut(joint, inputs, **kwargs)
        results = kwargs["num_fwd_outputs"]
        again = unsaved(forward, backward, results)
        if not again:
            return forward, backward
        make_again(joint.graph, again)
        less, more = minimum_cut(joint, inputs, **kwargs)
        spared = saved_bytes(forward, results) - saved_bytes(less, results)
        if spared <= 0:
            return forward, backward
        more.meta[SPARED] = spared
        return less, more


def spared_for(backward: fx.GraphModule) -> int:
    """Bytes that ``Cutter`` did not save for a backward graph."""
    found = backward.meta.get(SPARED, 0)
    assert isinstance(found, int)
    return found
