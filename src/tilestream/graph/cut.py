"""A joint graph cut into forward and backward: rewritten, cut by torch's partitioner, and cut again with less to save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from tilestream.graph.broadcasts import put_off_expands
from tilestream.graph.joint import split_joined
from tilestream.graph.norms import open_norms
from tilestream.graph.recompute import make_again, saved_bytes, unsaved


@dataclass(frozen=True)
class Halves:
    """The two graphs; ``spared``: bytes that torch's partitioner would have saved and that are made again."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    spared: int


def cut(joint: fx.GraphModule, inputs: Sequence[object], least_rows: int, **kwargs: Any) -> Halves:
    """Cut where torch's minimum cut says (``min_cut_rematerialization_partition``, whose ``kwargs`` these are), but
    make again what costs no time (``graph.recompute``).

    Args:
        least_rows: from how many rows on weight gradients may be launches of ours.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition as minimum_cut

    rewritten = split_joined(joint.graph, least_rows) + open_norms(joint.graph) + put_off_expands(joint.graph)
    if rewritten:
        joint.recompile()
    forward, backward = minimum_cut(joint, inputs, **kwargs)
    results = kwargs["num_fwd_outputs"]
    again = unsaved(forward, backward, results)
    if not again:
        return Halves(forward, backward, 0)
    make_again(joint.graph, again)
    less, more = minimum_cut(joint, inputs, **kwargs)
    spared = saved_bytes(forward, results) - saved_bytes(less, results)
    return Halves(less, more, spared) if spared > 0 else Halves(forward, backward, 0)
