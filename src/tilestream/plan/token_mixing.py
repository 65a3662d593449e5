"""What layers over tokens are predicted to take, by our kernel and by a library's; which of a graph are ours."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from torch import fx

from tilestream.devices import Device
from tilestream.graph.sizes import hint
from tilestream.graph.token_mixing import Site, place, sites
from tilestream.ir.dtypes import DTYPES
from tilestream.kernels.costs import Amount, Counts
from tilestream.kernels.operators.token_mixing import Mixing, cycles, kernel
from tilestream.plan.replacement import Replacement, dram, launch
from tilestream.simulator.library import Stream


@dataclass(frozen=True)
class Kind:
    """All that decides how long such layers take."""

    mixing: Mixing
    images: int

    @property
    def image_bytes(self) -> int:
        """Of all images."""
        return 2 * self.images * self.mixing.tokens * self.mixing.channels

    @property
    def product_flops(self) -> int:
        """Of either layer."""
        return self.image_bytes * self.mixing.hidden


def kind_of(site: Site) -> Kind:
    return Kind(site.mixing, site.images)


def ours(kind: Kind, device: Device) -> Counts:
    """Our kernel: memory, or what its SMs issue and multiply; and a launch."""
    turns = ceil(kind.images * kind.mixing.parts / device.sms)
    taken = (1 + kind.mixing.residual + 1) * kind.image_bytes
    streams = (dram(taken, device), Amount("cycles", turns * cycles(kind.mixing), device.clock_hz))
    return Counts("token mixing", (Counts("streams", streams, max), launch(device)))


def library(kind: Kind, device: Device) -> Counts:
    """What a library and Inductor cannot do without: the norm, which turns images as it writes them, two products, and
    the sum, which turns them back."""
    image, hidden = kind.image_bytes, kind.image_bytes // kind.mixing.tokens * kind.mixing.hidden
    ends = Counts("turned", (dram((4 + kind.mixing.residual) * image, device),))
    work = Amount("tensor", kind.product_flops, device.tensor_flops["bf16"])
    product = Counts("product", (Counts("streams", (dram(image + hidden, device), work), max), launch(device)), times=2)
    return Counts("library", (ends, product, Counts("launches", (launch(device),), times=2)))


def work_of(node: fx.Node) -> Stream:
    """What the simulator runs for a call of the operator: what it takes an SM's schedulers, as lane operations."""
    given: tuple[Any, ...] = node.args
    x, w1 = given[0].meta["val"], given[4].meta["val"]
    dtype, images = DTYPES[x.dtype], hint(x.shape[0])
    mixing = Mixing(x.shape[1], w1.shape[0], x.shape[2], dtype, given[9], given[10] is not None, given[8])
    return Stream(float(images * x.shape[1] * x.shape[2]), slots=128.0 * images * mixing.parts * cycles(mixing))


TOKEN_LAYERS = Replacement(
    "token mixing",
    "layers over tokens go to Inductor",
    lambda graph, options: sites(graph) if options.token_mixing else (),
    lambda site, _: [kind_of(site)],
    ours,
    library,
    lambda owner, site, _: place(owner, site),
    lambda kind, _: [kernel(kind.mixing).source],
)
"""Two layers over the tokens of images."""
