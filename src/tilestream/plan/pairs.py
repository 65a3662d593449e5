"""A region of a backward graph and the launch that sums what it makes, where both together are a backward chain."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from tilestream.devices import Device
from tilestream.errors import VerifyError
from tilestream.graph.lowering import Steps
from tilestream.graph.nodes import aten, is_view, packet, readers, value
from tilestream.graph.selection import Cut
from tilestream.ir.pipeline import Pipeline
from tilestream.ir.ways import reached
from tilestream.plan.backward_chains import Joined, join
from tilestream.plan.gradient_launches import GradientLaunch

log = logging.getLogger(__name__)

_SAME = (aten.detach, aten.alias, aten.view, aten.reshape, aten._unsafe_view)


@dataclass(frozen=True)
class Pair:
    """A region and the stationary sums of its results.

    Attributes:
        rows_by, summed_by: the pipelines that run them apart.
        same: inputs of the sums that are inputs or results of the region, by name.
        wanted: results of the region that others than the sums read.
        joined: what both are together.
    """

    cut: Cut
    launch: GradientLaunch
    rows_by: Pipeline
    summed_by: Pipeline
    same: Mapping[str, str]
    wanted: tuple[str, ...]
    joined: Joined

    @property
    def beside(self) -> dict[str, fx.Node]:
        """Operands of the sums that the region neither takes nor makes."""
        return {tensor: node for tensor, node in self.launch.operands.items() if tensor not in self.same}


def maker(launch: GradientLaunch, outputs: Mapping[fx.Node, int]) -> int | None:
    """The region that makes the gradients that a launch sums; None where it is none, or not one alone.

    Args:
        outputs: results of regions, with the number of each.
    """
    made = {outputs[node] for site in launch.sites if (node := _first_of(outputs, site.gradient)) is not None}
    return made.pop() if len(made) == 1 else None


def find_pair(
    cut: Cut,
    launch: GradientLaunch,
    pipelines: tuple[Pipeline, Pipeline],
    together: Mapping[fx.Node, Sequence[fx.Node]],
    device: Device,
) -> Pair | None:
    """The pair that a region and the sums of its results are; None where no kernel can be made of both.

    Args:
        pipelines: what would run them apart.
        together: nodes by each of those with which they run at once.
    """
    own = cut.region
    if own.symbols:
        return None
    results = {node: result.tensor for node, result in zip(cut.outputs, own.results, strict=True)}
    by_name = {n.name: n for n in cut.nodes[0].graph.nodes}
    inputs = {(origin_of(by_name[own.arguments[o.index]]), bare(o.steps)): o.tensor for o in own.inputs}

    def before(node: fx.Node) -> list[fx.Node]:
        return [*node.all_input_nodes, *together.get(node, ())]

    same: dict[str, str] = {}
    for tensor, node in launch.operands.items():
        made = _first_of(results, node)
        if made is not None:
            same[tensor] = results[made]
        elif (known := inputs.get((unpadded(node), ()))) is not None:
            same[tensor] = known
        elif not reached([unpadded(node)], before).isdisjoint(cut.nodes):
            return None
    both = {*launch.nodes, *cut.nodes}

    def leaves(node: fx.Node) -> bool:
        return any(r not in both for r in readers(node, lambda user: is_view(user) and user not in both))

    wanted = tuple(tensor for node, tensor in results.items() if leaves(node))
    try:
        joined = join(*pipelines, same, wanted, launch.rows, device)
    except VerifyError as reason:
        log.debug("%s and %s are no backward chain: %s", own.name, launch.name, reason)
        return None
    return Pair(cut, launch, *pipelines, same, wanted, joined)


def _first_of(results: Container[fx.Node], node: fx.Node) -> fx.Node | None:
    """Which of ``results`` a node is, under any leading dimensions."""
    current: fx.Node | None = node
    while current is not None and current not in results:
        current = same_as(current)
    return current


def origin_of(node: fx.Node) -> fx.Node:
    """What a node is, under other leading dimensions."""
    while (before := same_as(node)) is not None:
        node = before
    return node


def same_as(node: fx.Node) -> fx.Node | None:
    """What a node is a view of, if that has the same columns."""
    if packet(node) not in _SAME or not isinstance(node.args[0], fx.Node):
        return None
    before, after = value(node.args[0]), value(node)
    if before is None or after is None or before.shape[-1:] != after.shape[-1:]:
        return None
    return node.args[0]


def unpadded(node: fx.Node) -> fx.Node:
    """What a node is without columns of zeros behind it."""
    is_pad = packet(node) is aten.constant_pad_nd and len(node.args[1]) == 2 and node.args[1][0] == 0  # pyright: ignore
    return origin_of(node.args[0]) if is_pad and isinstance(node.args[0], fx.Node) else origin_of(node)


def bare(steps: Steps) -> Steps:
    """Steps that change more than leading dimensions."""
    return tuple(step for step in steps if step[0] != "flatten")
