"""What convolutions of patches are predicted to take, as layers over rows and by cuDNN."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from tilestream.devices import Device
from tilestream.graph.patches import Patches, Site, place, sites
from tilestream.kernels.costs import Amount, Counts
from tilestream.options import Options
from tilestream.plan.chooser import Question, alternative, decide, kept


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


def question(kind: Kind, device: Device, forced: bool = False) -> Question:
    """Whether patches are copied to rows of a layer, or cuDNN has their convolution."""
    return alternative("patches", kind, device, (ours(kind, device).us, library(kind, device).us), forced)


def ours(kind: Kind, device: Device) -> Counts:
    """The copy, and the product."""
    copy = Counts("copy", (_moved(kind, device, 2, 0), _launch(device)))
    return Counts("patches", (copy, _product(kind, device)))


def library(kind: Kind, device: Device) -> Counts:
    """cuDNN's kernel, which has channels last: of others it turns pictures and results. Assumed: none was timed."""
    turned = [_moved(kind, device, 2 * (not kind.patches.last[0]), 2 * (not kind.patches.last[0]))]
    launches = [_launch(device)] * (0 if kind.patches.last[0] else 2)
    return Counts("library", (*turned, *launches, _product(kind, device)))


def _product(kind: Kind, device: Device) -> Counts:
    flops = 2 * kind.rows * kind.patches.features * kind.patches.out
    streams = (_moved(kind, device, 1, 1), Amount("tensor", flops, device.tensor_flops["bf16"]))
    return Counts("product", (Counts("streams", streams, max), _launch(device)))


def _moved(kind: Kind, device: Device, pictures: int, results: int) -> Amount:
    """So many passes over the pictures, and over the results."""
    amount = 2 * kind.rows * (pictures * kind.patches.features + results * kind.patches.out)
    return Amount("dram", amount, device.dram_bytes_per_s)


def _launch(device: Device) -> Amount:
    return Amount("launch", device.launch_s)


def place_expected(owner: fx.GraphModule, options: Options, device: Device) -> None:
    """Rewrite those that a compilation would: by the times that are kept, else those predicted to be faster."""
    found = []
    for site in sites(owner.graph) if options.convolutions != "off" else ():
        asked = question(kind_of(site), device, options.target == "reference")
        timed = kept(asked, options, measured=True) if options.measure and options.strategy == "auto" else None
        if (timed or decide(asked)).wins:
            found.append(site)
    place(owner, found)
