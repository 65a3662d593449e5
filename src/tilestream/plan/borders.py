"""What Inductor would save by fusing operators of regions with others: by prediction, of each region's neighbours.

A region is timed against Inductor on its own operators. In the whole graph Inductor also fuses the first and the last
of those with their neighbours, as a residual's addition with the norm behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from tilestream.devices import Device
from tilestream.graph.rewrites.epilogues import with_epilogues
from tilestream.plan.fusion import units
from tilestream.plan.library import kernels
from tilestream.plan.values import Readers
from tilestream.simulator.library import Cache, seconds


def saved_us(graph: fx.Graph, regions: Mapping[str, Sequence[fx.Node]], device: Device, tf32: bool) -> float:
    """Microseconds of a call that Inductor saves where it makes one kernel of operators on both sides of a border: what
    each region and its neighbours take apart, less what they take together, in closed form.

    A border between two regions counts for both.

    Args:
        graph: functional ATen, without calls of regions.
        regions: the operators of each region, by its name.
        tf32: whether tensor cores take float32 products.
    """
    nodes = list(graph.nodes)
    readers = Readers(nodes)

    def inductors_us(members: set[fx.Node]) -> float:
        own, cache = [n for n in nodes if n in members], Cache(device)
        found = (kernels(unit.nodes, readers, tf32) for unit in units(own, with_epilogues(own)))
        return 1e6 * sum(seconds(made, device, cache) for made in found)

    saved = 0.0
    for name, others in neighbours(nodes, regions).items():
        own = set(regions[name])
        saved += max(0.0, inductors_us(own) + inductors_us(others) - inductors_us(own | others))
    return saved


def neighbours(nodes: Sequence[fx.Node], regions: Mapping[str, Sequence[fx.Node]]) -> dict[str, set[fx.Node]]:
    """Of each region that has some, what is not of it and in one kernel of Inductor's with operators of it."""
    inside = {node: name for name, members in regions.items() for node in members}
    found: dict[str, set[fx.Node]] = {}
    for unit in units(nodes, with_epilogues(nodes)):
        for name in {inside[n] for n in unit.nodes if n in inside}:
            found.setdefault(name, set()).update(n for n in unit.nodes if inside.get(n) != name)
    return {name: others for name, others in found.items() if others}
