"""A joint graph as forward and backward: rewritten, cut by torch's partitioner, and cut again with less to save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.utils._pytree import tree_leaves

from tilestream.graph.gradients import transposed
from tilestream.graph.nodes import aten, packet, results_of
from tilestream.graph.recompute import make_again, saved_bytes, unsaved
from tilestream.graph.rewrites.derivatives import SAVED
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
        self.first(joint)
        rewrite(joint, When.JOINT, self.settings)
        results = kwargs["num_fwd_outputs"]
        forward, backward = save_rows(*minimum_cut(joint, inputs, **kwargs), results)
        again = unsaved(forward, backward, results)
        if not again:
            return forward, backward
        make_again(joint.graph, again)
        less, more = save_rows(*minimum_cut(joint, inputs, **kwargs), results)
        spared = saved_bytes(forward, results) - saved_bytes(less, results)
        if spared <= 0:
            return forward, backward
        more.meta[SPARED] = spared
        return less, more


def minimum_cut(
    joint: fx.GraphModule, inputs: Sequence[object], num_fwd_outputs: int, **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Torch's cut, with what a rewrite marked ``SAVED`` in the forward graph.

    Torch leaves to the backward graph what no result of the forward graph is made of, and saves what it is made of. So
    for the time of the cut these values are results too.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    marked, end = [n for n in joint.graph.nodes if SAVED in n.meta], num_fwd_outputs
    if not marked:
        return min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=end, **kwargs)
    results, told = (tree_leaves(given) for given in _results(joint))
    _return(joint, [*results[:end], *marked, *results[end:]], [*told[:end], *told[:1] * len(marked), *told[end:]])
    forward, backward = min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=end + len(marked), **kwargs)
    for graph in (joint, forward):  # the joint one is another now: torch has joined what is equal in it
        results, told = (tree_leaves(given) for given in _results(graph))
        own = slice(end, end + len(marked))
        del results[own], told[own]
        _return(graph, results, told)
    return forward, backward


def _results(module: fx.GraphModule) -> tuple[Any, Any]:
    """What a graph returns, and what AOTAutograd says of each."""
    output = module.graph.output_node()
    return output.args, output.meta.get("desc", [None] * len(tree_leaves(output.args)))


def _return(module: fx.GraphModule, results: list[Any], told: list[Any]) -> None:
    output = module.graph.output_node()
    output.args, output.meta["desc"] = (results,), told
    module.recompile()


def save_rows(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Both graphs, changed in place: rows that are saved are saved as they lie.

    For ``mm(t(X), dY)``, the gradient of a weight ``[in, out]``, autograd saves the transposed view. That is the same
    memory, but the backward graph would not see the rows that it sums over.

    Args:
        results: how many of the forward graph's outputs are the user's; the others are saved.
    """
    output, given = forward.graph.output_node(), {n.name: n for n in backward.graph.find_nodes(op="placeholder")}
    outputs = results_of(forward.graph)
    first = next(n for n in backward.graph.nodes if n.op != "placeholder")
    for view in dict.fromkeys(v for v in outputs[results:] if isinstance(v, fx.Node)):
        rows, place = transposed(view), given.get(view.name)
        if rows is None or place is None or rows in outputs or view in outputs[:results]:
            continue
        if not all(packet(user) is aten.mm and user.args[0] is place for user in place.users):
            continue
        with backward.graph.inserting_before(first):
            again = backward.graph.create_node("call_function", view.target, (place, *view.args[1:]))
        place.replace_all_uses_with(again, delete_user_cb=lambda user, own=again: user is not own)
        again.meta, place.meta = dict(place.meta), dict(rows.meta)
        place._rename(rows.name)
        place.target = place.name
        output.replace_input_with(view, rows)
        if not view.users:
            forward.graph.erase_node(view)
    forward.recompile()
    backward.recompile()
    return forward, backward


def spared_for(backward: fx.GraphModule) -> int:
    """Bytes that ``Cutter`` did not save for a backward graph."""
    return backward.meta.get(SPARED, 0)
