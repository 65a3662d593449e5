"""Regions said otherwise, beside what their plans chose: both ways are timed as they would run.

One starts later: its first layers by a library, activations as epilogues, and a kernel of ours behind (``plan.tails``
says which are promising). A network of edges has its sums as an epilogue, or as a kernel of its own
(``plan.edge_networks``).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from tilestream.announce import announced
from tilestream.graph.modules import copied
from tilestream.graph.region import Region
from tilestream.graph.selection import Partition
from tilestream.graph.tails import Tail
from tilestream.ir.pipeline import Pipeline
from tilestream.options import Options
from tilestream.plan.find import Found, find
from tilestream.run import early_launches, epilogues, prepare
from tilestream.run.place import place
from tilestream.run.target import Target

TAIL = "a tail behind a library"


def faster(found: Partition, later: Mapping[str, Tail], options: Options, target: Target) -> dict[str, Tail]:
    """Those of ``later`` that are faster behind a library's products than their regions, which are planned. What goes
    wrong here costs a region no more than its tail."""
    made: dict[str, Tail] = {}
    for region in found.regions:
        tail = later.get(region.name)
        with announced(f"{region.name} starts where it did"), prepare.kernels_kept(options, target):
            if tail is not None and _is_faster(region, tail, options, target):
                made[region.name] = tail
    return made


def _is_faster(region: Region, tail: Tail, options: Options, target: Target) -> bool:
    """Whether the tail behind a library's products takes less than what the region's plan chose."""

    def make() -> fx.GraphModule | None:
        pipeline = prepare.built_plan(tail.region, options, target).chosen.pipeline
        return None if pipeline is None else split(tail, pipeline, options, target.kind)

    return prepare.wins(TAIL, region, make, options, target, tail.left)


def split(tail: Tail, pipeline: Pipeline, options: Options, kind: str) -> fx.GraphModule:
    """The region's graph as the whole graph would have it: libraries' products with their activations, then the tail's
    call, whose kernel starts early."""
    place(tail.graph, tail.part, lambda _: pipeline, kind, options.constant_weights)
    epilogues.fuse(tail.graph, {})
    early_launches.start_early(tail.graph, options)
    return tail.graph


APART = "a network of edges and its sums apart"


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
    return prepare.wins(APART, region, lambda: apart(region, options, target), options, target)


def apart(region: Region, options: Options, target: Target) -> fx.GraphModule:
    """The region's graph with a call of the network, if a kernel of ours runs it, and one of what sums it."""
    graph = copied(region.graph)
    inside = find(graph, "inference", options, target.hardware, sums=False, networks=False)
    place(graph, inside, lambda r: prepare.built_plan(r, options, target).chosen.pipeline, target.kind)
    epilogues.fuse(graph, {})
    return graph
