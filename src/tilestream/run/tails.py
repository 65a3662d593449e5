"""Regions that start later: the first layers by a library, activations as epilogues, and a kernel of ours behind.

``plan.tails`` says which are promising. Both ways are timed as they would run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from tilestream.announce import announced
from tilestream.graph.region import Region
from tilestream.graph.selection import Partition
from tilestream.graph.tails import Tail
from tilestream.ir.pipeline import Pipeline
from tilestream.options import Options
from tilestream.run import early_launches, epilogues, prepare
from tilestream.run.place import place
from tilestream.run.target import Target

TAIL = "a tail behind a library"


@dataclass(frozen=True)
class Kind:
    """What decides the times of a tail: the key of its region's plan, and how many layers are left to a library."""

    plan: str
    left: int


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
    kind = Kind(prepare.question(region, options, target).key(measured=True), tail.left)

    def make() -> fx.GraphModule | None:
        pipeline = prepare.built_plan(tail.region, options, target).chosen.pipeline
        return None if pipeline is None else split(tail, pipeline, options, target.kind)

    return prepare.wins(TAIL, kind, region, make, options, target)


def split(tail: Tail, pipeline: Pipeline, options: Options, kind: str) -> fx.GraphModule:
    """The region's graph as the whole graph would have it: libraries' products with their activations, then the tail's
    call, whose kernel starts early."""
    place(tail.graph, tail.part, lambda _: pipeline, kind, options.constant_weights)
    epilogues.fuse(tail.graph, {})
    early_launches.start_early(tail.graph, options)
    return tail.graph
