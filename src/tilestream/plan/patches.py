"""What convolutions of patches are predicted to take, as layers over rows and by cuDNN."""

from __future__ import annotations

from dataclasses import dataclass

from tilestream.devices import Device
from tilestream.graph.patches import Patches, Site, place, sites
from tilestream.kernels.costs import Amount, Counts
from tilestream.plan.replacement import Replacement, dram, launch


@dataclass(frozen=True)
class Kind:
    """All that decides how long one takes."""

    patches: Patches
    images: int

    @property
    def rows(self) -> int:
        return self.images * self.patches.grid[0] * self.patches.grid[1]


def kind_of(site: Site) -> Kind:
    return Kind(site.patches, site.images)


def ours(kind: Kind, device: Device) -> Counts:
    """The copy, and the product."""
    copy = Counts("copy", (_moved(kind, device, 2, 0), launch(device)))
    return Counts("patches", (copy, _product(kind, device)))


def library(kind: Kind, device: Device) -> Counts:
    """cuDNN's kernel, which has channels last: of others it turns pictures and results. Assumed: none was timed."""
    turned = [_moved(kind, device, 2 * (not kind.patches.last[0]), 2 * (not kind.patches.last[0]))]
    launches = [launch(device)] * (0 if kind.patches.last[0] else 2)
    return Counts("library", (*turned, *launches, _product(kind, device)))


def _product(kind: Kind, device: Device) -> Counts:
    flops = 2 * kind.rows * kind.patches.features * kind.patches.out
    streams = (_moved(kind, device, 1, 1), Amount("tensor", flops, device.tensor_flops["bf16"]))
    return Counts("product", (Counts("streams", streams, max), launch(device)))


def _moved(kind: Kind, device: Device, pictures: int, results: int) -> Amount:
    """So many passes over the pictures, and over the results."""
    return dram(2 * kind.rows * (pictures * kind.patches.features + results * kind.patches.out), device)


PATCHES = Replacement(
    "patches",
    "a convolution of patches goes to cuDNN",
    lambda graph, options: sites(graph) if options.convolutions != "off" else (),
    lambda site, _: [kind_of(site)],
    ours,
    library,
    lambda owner, site, _: place(owner, site),
)
"""Convolutions of patches, as layers over rows."""
