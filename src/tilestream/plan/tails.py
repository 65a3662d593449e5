"""Regions that may start later, by prediction: the first layers by a library, and a kernel of ours behind.

On a few thousand rows a row stream has fewer tiles than there are SMs, so that a wide first layer, which a library
spreads over all of them, holds up the narrow ones behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilestream.announce import announced
from tilestream.devices import Device
from tilestream.graph.region import Region
from tilestream.graph.selection import Partition
from tilestream.graph.tails import Tail, tails
from tilestream.ir.pipeline import TILE_ROWS
from tilestream.kernels.product.block import MOST_ROWS
from tilestream.options import Options
from tilestream.plan import margins
from tilestream.plan.candidates import Candidate, fallback_of
from tilestream.plan.planner import proposals
from tilestream.plan.turned import turned


def all_promising(found: Partition, options: Options, device: Device) -> dict[str, Tail]:
    """The tails that may run, by the names of their regions in an inference graph; none where nothing is timed."""
    if not options.measure or options.strategy != "auto":
        return {}
    made: dict[str, Tail] = {}
    for region in (r for r in found.regions if not r.program.ragged and not r.minor):
        with announced(f"{region.name} has no tail"):
            tail = promising(region, options, device)
            made |= {} if tail is None else {region.name: tail}
    return made


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
    return best if least_us <= margins.PROMISING * min(own_us, library_us) else None


def _proposals(region: Region, options: Options, device: Device) -> Sequence[Candidate]:
    return proposals(region.program, region.rows, device, options, turned(region, options))


def _fallback_us(candidates: Sequence[Candidate]) -> float:
    return fallback_of(candidates).predicted_us or 0.0


def _best_us(candidates: Sequence[Candidate]) -> float:
    own = (c.predicted_us for c in candidates if c.pipeline is not None and c.predicted_us is not None)
    return min(own, default=float("inf"))
