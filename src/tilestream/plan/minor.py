"""Regions that have so little of their graph's time that only their best kernels by prediction are timed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from tilestream.devices import Device
from tilestream.graph.region import Region
from tilestream.graph.selection import Cut
from tilestream.ir.pipeline import Pipeline
from tilestream.options import Options
from tilestream.plan import margins
from tilestream.plan.planner import on_inductor


def with_minor(cuts: Sequence[Cut], device: Device) -> tuple[Cut, ...]:
    """``cuts``, those marked whose programs are the shortest and together have at most ``margins.MINOR`` of the time of
    all regions, as predicted of a library. Equal regions count together: their kernel is one."""
    regions = [r for r in (cut.region for cut in cuts) if r.rows > 0 and not r.program.ragged]
    if len({r.program for r in regions}) < 2:
        return tuple(cuts)
    by_program: dict[Pipeline, float] = defaultdict(float)
    for region in regions:
        by_program[region.program] += on_inductor(region.program, region.rows, device).predicted_us or 0.0
    left_us = margins.MINOR * sum(by_program.values())
    found: set[Pipeline] = set()
    for program, us in sorted(by_program.items(), key=lambda item: item[1]):
        left_us -= us
        if left_us < 0:
            break
        found.add(program)
    return tuple(replace(c, region=replace(c.region, minor=c.region.program in found)) for c in cuts)


def effort_for(region: Region, options: Options) -> Options:
    """The options that a region's kernels are searched by."""
    lower = region.minor and options.effort == "measured" and options.strategy == "auto"
    return options.with_(effort="model") if lower else options
