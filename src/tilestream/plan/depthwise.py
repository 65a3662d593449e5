"""What a depthwise convolution is predicted to take, by our kernel and by a library's; which of a graph are ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from tilestream.devices import Device
from tilestream.graph.costs.work import size
from tilestream.graph.depthwise import TAKEN, Site, site_of
from tilestream.graph.sizes import hint
from tilestream.kernels.costs import Amount, Counts
from tilestream.kernels.operators.depthwise import Depthwise, Tile
from tilestream.kernels.operators.grouped import cycles, kernel, tile_of
from tilestream.options import Options
from tilestream.plan.replacement import Replacement, dram, launch
from tilestream.simulator.library import Stream

TAP, OUTPUT, INPUT = 4.7, 6.0, 16.0
"""Lane operations of cuDNN's kernel for a tap of an output, for an output and for an input. Fitted to fifteen
convolutions of ConvNeXt-T and EfficientNet-B0 on an H100 (10 to 88 us): 11 % off in the mean, 29 % at most."""


EVEN, ODD = 90.0, 860.0
"""The same of an output of a wider group: of 4 to 32 channels, a power of two, and of others, whose pixels and weights
cuDNN turns first. By convolutions of ResNeXt-50 and RegNetY-3.2GF on an H200 (20 to 320 us), one of two within 20 %."""


@dataclass(frozen=True)
class Kind:
    """All that decides how long one takes."""

    conv: Depthwise
    images: int
    biased: bool

    @property
    def pixels(self) -> tuple[int, int]:
        """Elements that are read and written."""
        made = self.images * self.conv.out[0] * self.conv.out[1] * self.conv.channels
        return self.images * self.conv.height * self.conv.width * self.conv.channels, made


def kind_of(site: Site) -> Kind:
    return Kind(site.conv, site.images, site.node.args[2] is not None)


def tile_on(kind: Kind, device: Device) -> Tile:
    """The tile by which our kernel has it."""
    return tile_of(kind.conv, kind.images, device.sms)


def ours(kind: Kind, device: Device) -> Counts:
    """Our kernel: memory or issue, and a launch."""
    issued = cycles(kind.conv, tile_on(kind, device), kind.images, device.sms)
    streams = (dram(2 * sum(kind.pixels), device), Amount("cycles", issued, device.clock_hz))
    return Counts("depthwise", (Counts("streams", streams, max), launch(device)))


def library(kind: Kind, device: Device) -> Counts:
    """cuDNN's kernel, without what follows it."""
    streams = (dram(2 * sum(kind.pixels), device), Amount("lanes", _library_lanes(kind), device.simt_flops))
    return Counts("library", (Counts("streams", streams, max), launch(device)))


def library_work(site: Site) -> Stream:
    """What the simulator runs for cuDNN's kernel."""
    kind = kind_of(site)
    return Stream(float(kind.pixels[1]), slots=_library_lanes(kind))


def _library_lanes(kind: Kind) -> float:
    (read, made), (ky, kx), group = kind.pixels, kind.conv.kernel, kind.conv.group
    if group > 1:
        return made * (EVEN if group in (4, 8, 16, 32) else ODD)
    return made * (TAP * ky * kx + OUTPUT) + INPUT * read


def sites(graph: fx.Graph, options: Options) -> list[Site]:
    """The convolutions of an inference graph that may be ours."""
    if options.convolutions == "off":
        return []
    return [site for node in graph.nodes if (site := site_of(node)) is not None]


def take(site: Site, device: Device, squeezed: bool = False) -> bool:
    """Have the graph's rewrite put our operator in the place of a site; ``squeezed``: of gates behind it as well."""
    site.node.meta[TAKEN] = site, tile_on(kind_of(site), device), squeezed
    return True


def chosen(graph: fx.Graph) -> list[Site]:
    """Those that were taken."""
    return [node.meta[TAKEN][0] for node in graph.nodes if TAKEN in node.meta]


DEPTHWISE_CONVOLUTIONS = Replacement(
    "depthwise convolution",
    "a depthwise convolution goes to Inductor",
    sites,
    lambda site, _: [kind_of(site)],
    ours,
    library,
    lambda _, site, device: take(site, device),
    lambda kind, device: [kernel(kind.conv, tile_on(kind, device)).source],
)
"""Depthwise convolutions with what follows each pixel: a library's is held without that."""


def work_of(node: fx.Node) -> Stream:
    """What the simulator runs for a call of the operator."""
    given: tuple[Any, ...] = node.args
    x, weight, made = given[0].meta["val"], given[1].meta["val"], node.meta["val"][0]
    shape = (hint(x.shape[1]), hint(x.shape[2]), hint(x.shape[3]), tuple(weight.shape[2:]))
    conv = Depthwise(*shape, given[5], tuple(given[6]), activation=given[7], group=hint(weight.shape[1]))
    tile = Tile(*given[8])
    lanes = hint(x.shape[0]) * tile.tiles(conv) * conv.channels / 2
    return Stream(float(size(made)), slots=lanes * tile.slots(conv), touched=2.0 * (size(x) + size(made)))
