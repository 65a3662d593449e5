"""What squeeze and excite is predicted to take, by our kernel and by a library's."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from torch import fx

from tilestream.devices import Device
from tilestream.graph.depthwise import Site
from tilestream.graph.sizes import hint
from tilestream.graph.squeeze import site_of
from tilestream.kernels.costs import Amount, Counts
from tilestream.kernels.operators.grouped import tile_of
from tilestream.kernels.operators.squeeze import Squeeze, kernel
from tilestream.plan.depthwise import chosen, take
from tilestream.plan.replacement import Replacement, dram, launch
from tilestream.simulator.library import Stream

RESIDENT, CTA_BYTES_PER_S = 2, 60e9
"""CTAs of an SM; bytes that one loads a second, near what an SM's port to the L2 carries. Assumed: no GPU has timed it
yet."""


@dataclass(frozen=True)
class Kind:
    """All that decides how long one takes. ``parts``: tiles of a picture, of which there are sums."""

    shape: Squeeze
    parts: int
    pictures: int

    @property
    def sum_bytes(self) -> int:
        """Of a picture."""
        return 4 * self.parts * self.shape.channels


def kinds_of(site: Site, device: Device) -> list[Kind]:
    """Those behind a depthwise convolution, whose tiles our kernel has on a device."""
    found = [s for mean in site.means if (s := site_of(mean)) is not None]
    parts = tile_of(site.conv, site.images, device.sms).tiles(site.conv)
    return [Kind(s.shape, parts, site.images) for s in found]


def ours(kind: Kind, device: Device) -> Counts:
    """Our kernel: what a CTA loads, one after another for each picture that it has; and a launch."""
    turns = ceil(kind.pictures / (RESIDENT * device.sms))
    loaded = Amount("loads", turns * (kind.sum_bytes + kind.shape.weight_bytes), CTA_BYTES_PER_S)
    waits = Amount("waits", 3.0 * turns, 1 / device.load_s)
    streams = Counts("streams", (dram(kind.pictures * kind.sum_bytes, device), Counts("a CTA", (loaded, waits))), max)
    return Counts("squeeze", (streams, launch(device)))


def library(kind: Kind, device: Device) -> Counts:
    """The sum, and two products of some microseconds."""
    launches = Counts("launches", (launch(device), Amount("waits", 1.0, 1 / device.load_s)), times=3)
    return Counts("library", (dram(kind.pictures * kind.sum_bytes, device), launches))


def work_of(node: fx.Node) -> Stream:
    """What the simulator runs for a call of the operator."""
    given: tuple[Any, ...] = node.args
    sums, w1 = given[0].meta["val"], given[2].meta["val"]
    read = float(hint(sums.shape[0])) * (sums.shape[1] * sums.shape[2] + w1.shape[0] * w1.shape[1])
    return Stream(read, touched=4 * read)


GATES = Replacement(
    "squeeze",
    "gates behind a depthwise convolution go to Inductor",
    lambda graph, _: [site for site in chosen(graph) if any(map(site_of, site.means))],
    kinds_of,
    ours,
    library,
    lambda _, site, device: take(site, device, squeezed=True),
    lambda kind, _: [kernel(kind.shape).source],
)
"""Gates behind convolutions that are chosen already: all of one, since it leaves sums for them or none."""
