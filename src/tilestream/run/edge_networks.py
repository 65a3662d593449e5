"""Networks of edges with their sums as an epilogue, beside the same as two kernels: both are timed as they would run.

``plan.edge_networks`` says which are promising.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from tilestream.announce import announced
from tilestream.graph.modules import copied
from tilestream.graph.region import Region
from tilestream.options import Options
from tilestream.plan.find import Found, find
from tilestream.run import epilogues, prepare
from tilestream.run.place import place
from tilestream.run.target import Target

APART = "a network of edges and its sums apart"


@dataclass(frozen=True)
class Kind:
    """What decides the times: the key of the plan of the network with its sums."""

    plan: str


def fastest(found: Found, options: Options, target: Target) -> Found:
    """``found`` with networks apart from their sums where that is faster than what their plans chose. What goes wrong
    here costs a network no more than its other way."""
    slower = []
    for joined in found.networks:
        region = joined.cut.region
        with announced(f"{region.name} keeps its sums"), prepare.kernels_kept(options, target):
            if _is_faster_apart(region, options, target):
                slower.append(joined)
    return found.apart(slower) if slower else found


def _is_faster_apart(region: Region, options: Options, target: Target) -> bool:
    kind = Kind(prepare.question(region, options, target).key(measured=True))
    return prepare.wins(APART, kind, region, lambda: apart(region, options, target), options, target)


def apart(region: Region, options: Options, target: Target) -> fx.GraphModule:
    """The region's graph with a call of the network, if a kernel of ours runs it, and one of what sums it."""
    graph = copied(region.graph)
    inside = find(graph, "inference", options, target.hardware, sums=False, networks=False)
    place(graph, inside, lambda r: prepare.built_plan(r, options, target).chosen.pipeline, target.kind)
    epilogues.fuse(graph, {})
    return graph
