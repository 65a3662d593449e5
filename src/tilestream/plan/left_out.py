"""What stays out of every region, by the time that it takes: the share of the whole, and the operators with most of it.

How many operators stay out says little: 15 gathers may take longer than 200 additions that Inductor fuses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from tilestream.devices import Device
from tilestream.graph.nodes import is_ours
from tilestream.graph.selection import Partition
from tilestream.plan.fusion import units
from tilestream.plan.library import kernels
from tilestream.plan.values import Readers
from tilestream.plan.whole import WholePlan
from tilestream.simulator.library import Cache, seconds

MOST_NAMES = 2
"""Of a kernel that fuses operators, so many are named."""


@dataclass(frozen=True)
class Part:
    """A kernel or pipeline: its operators, the user's line, its time in any unit, and whether it is in a region."""

    operators: tuple[str, ...]
    source: str
    time: float
    inside: bool


@dataclass(frozen=True)
class LeftOut:
    """``share`` of the time is outside of regions; ``largest`` are the equal kernels that have most of it.

    ``largest`` reads ``aten.gather.default x15``; its own share of the whole time is ``largest_share``, its first
    operator and line ``operator`` and ``source``.
    """

    share: float
    largest: str
    largest_share: float
    operator: str
    source: str


def left_out(parts: Iterable[Part]) -> LeftOut | None:
    """Of all parts of a model; None where nothing is outside of regions, or nothing takes any time."""
    parts = list(parts)
    whole = sum(p.time for p in parts)
    outside = [p for p in parts if not p.inside and p.operators]
    if not outside or whole <= 0:
        return None
    groups: dict[tuple[tuple[str, int], ...], list[Part]] = {}
    for p in outside:
        groups.setdefault(tuple(sorted(Counter(p.operators).items())), []).append(p)
    members = max(groups.values(), key=lambda group: sum(p.time for p in group))
    time = sum(p.time for p in members)
    first = members[0]
    share = sum(p.time for p in outside) / whole
    return LeftOut(share, _title(members), time / whole, first.operators[0], first.source)


def of_plan(plan: WholePlan) -> LeftOut | None:
    """Of a planned model, by the time that is predicted of every launch."""
    return left_out(Part(x.operators, x.source, x.predicted_us, x.ours) for x in plan.launches)


def of_partition(graph: fx.Graph, found: Partition, device: Device, tf32: bool) -> LeftOut | None:
    """Of a graph that is cut and not yet planned: by the time of everything on Inductor, in closed form.

    Args:
        tf32: whether tensor cores take float32 products.
    """
    nodes = list(graph.nodes)
    readers, cache = Readers(nodes), Cache(device)

    def timed(members: Sequence[fx.Node], inside: bool) -> Iterable[Part]:
        for kernel in kernels(members, readers, tf32):
            yield Part(kernel.ops, kernel.source, seconds((kernel,), device, cache), inside)

    parts: list[Part] = []
    streamed = {f"{number}": cut.nodes for number, cut in enumerate(found.cuts)}
    for unit in units(nodes, streamed):
        if not unit.region:
            parts += timed(unit.nodes, inside=all(map(is_ours, unit.nodes)))
            continue
        for inner in units(unit.nodes, {}):
            parts += timed(inner.nodes, inside=True)
    return left_out(parts)


def _title(members: Sequence[Part]) -> str:
    counts = list(Counter(members[0].operators).items())
    names = [name if n == 1 else f"{n} {name}" for name, n in counts[:MOST_NAMES]]
    more = len(counts) - MOST_NAMES
    title = " + ".join(names) + (f" + {more} more" if more > 0 else "")
    return title if len(members) == 1 else f"{title} x{len(members)}"
