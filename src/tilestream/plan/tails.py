"""Regions that may start later, by prediction: the first layers by a library, and a kernel of ours behind.

On a few thousand rows a row stream has fewer tiles than there are SMs, so that a wide first layer, which a library
spreads over all of them, holds up the narrow ones behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from tilestream.devices import Device
from tilestream.graph.nodes import computes, is_ours, name
from tilestream.graph.provenance import source
from tilestream.graph.region import Region
from tilestream.graph.selection import Cut, Exclusion, Partition
from tilestream.graph.tails import LIBRARY, Tail, tails
from tilestream.ir.pipeline import TILE_ROWS
from tilestream.kernels.product.shared_tile import MOST_ROWS
from tilestream.options import Options
from tilestream.plan.planner import Candidate, fallback_of, proposals
from tilestream.plan.turned import turned

PROMISING = 0.9
"""A region's way with a tail is timed if it is predicted to take at most this share of what the region takes."""


def start_later(owner: fx.Graph, found: Partition, options: Options, device: Device) -> Partition:
    """The partition of ``owner`` as it will probably run: every tail that promises to be faster in the place of its
    region. On a GPU both are timed (``run.tails``)."""
    cuts: list[Cut] = []
    left: set[fx.Node] = set()
    for cut in found.cuts:
        tail = promising(cut.region, options, device)
        shorter = tail.within(owner) if tail is not None else None
        cuts.append(shorter or cut)
        left |= {*cut.nodes} - {*cuts[-1].nodes}
    inside = {node for cut in found.cuts for node in cut.nodes}
    outside = iter(found.exclusions)
    exclusions: list[Exclusion] = []
    for node in (n for n in owner.nodes if n.op == "call_function" and computes(n) and not is_ours(n)):
        if node in left:
            exclusions.append(Exclusion(name(node), source(node), LIBRARY))
        elif node not in inside:
            exclusions.append(next(outside))
    return replace(found, cuts=tuple(cuts), exclusions=tuple(exclusions))


def promising(region: Region, options: Options, device: Device) -> Tail | None:
    """The tail that takes least by prediction behind a library's products, where that is clearly less than the region
    takes, or a library alone; None where none does."""
    if not MOST_ROWS < region.rows <= TILE_ROWS * device.sms:
        return None
    mine = _proposals(region, options, device)
    library_us, own_us = _fallback_us(mine), _best_us(mine)
    found: list[tuple[float, Tail]] = []
    for tail in tails(region):
        theirs = _proposals(tail.region, options, device)
        found.append((library_us - _fallback_us(theirs) + _best_us(theirs), tail))
    least_us, best = min(found, key=lambda each: each[0], default=(0.0, None))
    return best if least_us <= PROMISING * min(own_us, library_us) else None


def _proposals(region: Region, options: Options, device: Device) -> Sequence[Candidate]:
    return proposals(region.program, region.rows, device, options, turned(region, options))


def _fallback_us(candidates: Sequence[Candidate]) -> float:
    return fallback_of(candidates).predicted_us or 0.0


def _best_us(candidates: Sequence[Candidate]) -> float:
    own = (c.predicted_us for c in candidates if c.pipeline is not None and c.predicted_us is not None)
    return min(own, default=float("inf"))
