"""The regions of one graph: found in the same way for what runs and for what is told of it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from tilestream.devices import Device
from tilestream.graph.cut import spared_for
from tilestream.graph.gradients import GradientSite
from tilestream.graph.pixels import to_pixels
from tilestream.graph.region import Region
from tilestream.graph.selection import Partition, partition
from tilestream.kernels.product.shared_tile import MOST_ROWS, is_projection
from tilestream.options import Options
from tilestream.plan.gradient_launches import apart, gradient_sites, least_rows

LONE = "a product by itself: nothing streams into it or out of it, and a library's is as fast"


def find_regions(
    graph: fx.GraphModule,
    options: Options,
    device: Device,
    kept_out: Mapping[str, str],
    *,
    training: bool,
    backward: bool,
) -> tuple[Partition, list[GradientSite]]:
    """The regions of a graph in its normal form, and the weight gradients that stay out of them.

    Args:
        graph: functional ATen; where the options say so, its convolutions are rewritten in place.
        kept_out: names of nodes that are in no region, and why (``graph.row_sums.own_operands``).
        training: whether the graph is half of a training step.
        backward: whether it is the second half.
    """
    out = dict(kept_out)
    if not training and options.convolutions != "off":
        out |= to_pixels(graph.graph, bulk=options.convolutions != "lanes")
        graph.recompile()
    summed = gradient_sites(graph.graph, device, least_rows(options)) if backward else []
    out |= apart(summed)
    found = partition(
        graph,
        apart=out,
        training=training,
        backward=backward,
        spared=spared_for(graph),
        projections=options.projections and not training,
    )
    return found, summed


def is_lone(region: Region, options: Options) -> bool:
    """Whether a region is one product that no kernel of ours does better than a library's."""
    if len(region.operators) > 1 or options.strategy != "auto":
        return False
    return region.rows > MOST_ROWS or not is_projection(region.program)
