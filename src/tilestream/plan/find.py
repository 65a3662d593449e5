"""What is found in one graph, whether it is compiled or explained: regions, weight gradients, and what stays out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import fx

from tilestream.devices import Device
from tilestream.graph.capture import Kind
from tilestream.graph.cut import spared_for
from tilestream.graph.gradients import GradientSite
from tilestream.graph.live import tensor_bytes
from tilestream.graph.moved import moved, text
from tilestream.graph.nodes import computes, is_ours, is_product, name, takes_tf32
from tilestream.graph.operators.split import FLOAT32
from tilestream.graph.provenance import source
from tilestream.graph.ragged import edge_networks, ragged_regions
from tilestream.graph.ragged.edge_networks import Joined
from tilestream.graph.region import Region
from tilestream.graph.rewrites.settings import APART, Settings
from tilestream.graph.rewrites.table import When, rewrite
from tilestream.graph.selection import POINTWISE, Cut, Exclusion, Partition, partition
from tilestream.graph.tails import LIBRARY, Tail
from tilestream.ir.float32 import by_parts
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Transport
from tilestream.kernels.product.block import MOST_ROWS
from tilestream.kernels.product.finder import is_projection
from tilestream.options import Options
from tilestream.plan import margins, planner
from tilestream.plan.aligned import aligns
from tilestream.plan.candidates import fallback_of, prediction_of
from tilestream.plan.edge_networks import pays, with_networks
from tilestream.plan.gradient_launches import apart, gradient_sites, least_rows
from tilestream.plan.messages import sorted_sums
from tilestream.plan.minor import with_minor
from tilestream.plan.passes.segments import body, cut

LONE = "a product by itself: nothing streams into it or out of it, and a library's is as fast"
RAGGED = "part of a ragged region"
NO_ROWS = "no rows: nothing is launched"


@dataclass(frozen=True)
class Found(Partition):
    """A graph in its normal form, cut into regions, weight gradients, and the rest.

    Attributes:
        graph: what ``cuts`` and ``sites`` are parts of.
        kind: ``inference``, ``forward`` or ``backward``.
        sites: weight gradients that may be launches of ours.
        networks: those of edges that have taken in their sums, as regions among ``cuts``.
    """

    graph: fx.GraphModule
    kind: Kind
    sites: tuple[GradientSite, ...] = ()
    networks: tuple[Joined, ...] = ()

    @property
    def outside(self) -> list[fx.Node]:
        """The operators of ``exclusions``, in their order."""
        inside = {node for cut in self.cuts for node in cut.nodes}
        return [n for n in self.graph.graph.nodes if computes(n) and not is_ours(n) and n not in inside]

    def with_tails(self, later: Mapping[str, Tail]) -> Found:
        """The same where regions start later: tails, by the names of their regions, in the places of these."""
        shorter = [later[c.region.name].within(self.graph.graph) if c.region.name in later else None for c in self.cuts]
        return self.with_cuts(tuple(tail or cut for tail, cut in zip(shorter, self.cuts, strict=True)))

    def apart(self, networks: Sequence[Joined]) -> Found:
        """The same with these networks and the regions around their sums as they were."""
        before = {id(each.cut): (each.network, *each.around) for each in networks}
        return self.with_cuts(tuple(c for cut in self.cuts for c in before.get(id(cut), (cut,))))

    def with_cuts(self, cuts: tuple[Cut, ...], reason: str = LIBRARY) -> Found:
        """The same with other regions; ``reason``: why what was in one is outside now."""
        known = dict(zip(self.outside, self.exclusions, strict=True))
        made = replace(self, cuts=cuts)
        outside = [known.get(n) or Exclusion(name(n), source(n), reason) for n in made.outside]
        return replace(made, exclusions=tuple(outside))


def find(
    graph: fx.GraphModule,
    kind: Kind,
    options: Options,
    device: Device,
    known: Found | None = None,
    sums: bool = True,
    networks: bool = True,
) -> Found:
    """The regions and weight gradients of a graph.

    Args:
        graph: functional ATen, which is rewritten in place: it gets its normal form, and where the options say so, its
            convolutions become those of pixels.
        sums: whether an inference graph's sums by an index are made in sorted order where that pays.
        known: what was found in another graph, which counts where that is a copy of this one.
        networks: whether networks of edges take in their sums where that is predicted to be faster.
    """
    backward = kind == "backward"
    if backward:
        rewrite(graph, When.BACKWARD)
    if kind == "inference" and sums:
        rewrite(graph, When.SUMS, Settings(sums=sorted_sums))
    rewrite(graph, When.NORMAL_FORM)
    if known is not None and text(known.graph.graph) == text(graph.graph):
        cuts, sites = moved(known.cuts, known.sites, graph.graph)
        return replace(known, graph=graph, cuts=cuts, sites=sites, networks=())
    if kind == "inference" and options.convolutions != "off":
        rewrite(graph, When.CONVOLUTIONS, Settings(bulk=options.convolutions != "lanes"))
    if kind == "inference":
        rewrite(graph, When.ROWS, Settings(aligns=partial(aligns, device=device)))
    sites = gradient_sites(graph.graph, device, least_rows(options)) if backward else []
    by_parts = options.float32_parts and kind == "inference"  # gradients of SchNet were off by 5 times eager's error
    ragged, left = ragged_regions(graph)
    taken = {node: RAGGED for cut in ragged for node in cut.nodes}
    part = partition(
        graph,
        apart={n.name: why for n, why in (left | taken).items()}
        | (kept_out(graph.graph) | apart(sites) | ({} if by_parts else of_float32(graph.graph))),
        held=[cut.nodes for cut in ragged],
        training=kind != "inference",
        backward=backward,
        spared=spared_for(graph),
        projections=options.projections and kind == "inference",
        pays=partial(as_one_launch, options=options, device=device),
    )
    exclusions = tuple(e for e in part.exclusions if e.reason != RAGGED)
    cuts = with_cold((*part.cuts, *ragged), graph.graph, device)
    found = Found(cuts, exclusions, part.operators, graph, kind, tuple(sites))
    rows = len(part.cuts)
    asked = edge_networks(graph, cuts[:rows], cuts[rows:]) if networks else []
    joined = tuple(each for each in asked if pays(each, options, device))
    if not joined:
        return replace(found, cuts=with_minor(found.cuts, device))
    return replace(found.with_cuts(with_networks(found.cuts, joined), POINTWISE), networks=joined)


def kept_out(graph: fx.Graph) -> dict[str, str]:
    """Names of the nodes that a rewrite keeps out of every region, and why."""
    return {n.name: n.meta[APART] for n in graph.nodes if APART in n.meta}


def of_float32(graph: fx.Graph) -> dict[str, str]:
    """Names of the products of float32 that torch keeps off the tensor cores, and why."""
    found = (n for n in graph.nodes if not takes_tf32() and is_product(n))
    return {n.name: FLOAT32 for n in found if n.meta["val"].dtype == torch.float32}


def is_lone(region: Region, options: Options) -> bool:
    """Whether a region is one product that no kernel of ours does better than a library's."""
    if region.program.ragged or len(region.operators) > 1 or options.strategy != "auto":
        return False
    if by_parts(region.program):  # a library's has no tensor cores
        return region.rows <= MOST_ROWS
    return region.rows > MOST_ROWS or not is_projection(region.program)


def with_cold(cuts: Sequence[Cut], graph: fx.Graph, device: Device) -> tuple[Cut, ...]:
    """``cuts``, marked where the graph's arguments and their results are more than the L2 holds.

    That is a lower bound of what a call moves, whose other values may stay on chip: where in doubt, weights are warm.
    """
    given = [*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr")]
    size = sum(map(tensor_bytes, {*given, *(node for cut in cuts for node in cut.outputs)}))
    if size <= device.l2_bytes:
        return tuple(cuts)
    return tuple(replace(cut, region=replace(cut.region, cold=True)) for cut in cuts)


def as_one_launch(region: Region, options: Options, device: Device) -> bool:
    """Whether some kernel of the whole block may beat a library's kernels, as far as predictions tell.

    Where none can, on few tiles of rows most of all, a layer by itself still may: its activation or its residual, which
    a library leaves to a kernel behind, is its epilogue. So it may where its layers one by one are predicted to take
    far less. A strategy by name is asked of the block.
    """
    if options.strategy != "auto":
        return True
    made = planner.proposals(region.program, region.rows, device, options)
    fallback = fallback_of(made)
    best = min((prediction_of(c) for c in made if c.pipeline is not None), default=None)
    if best is None or fallback.predicted_us is None:
        return True
    return best <= min(margins.HOPELESS * fallback.predicted_us, _by_layers_us(region, options, device) / margins.APART)


def _by_layers_us(region: Region, options: Options, device: Device) -> float:
    """The same of both layers, each as one launch or as a library's kernels; what is in front is a kernel by itself."""
    parts = body(region.program)
    first, *_, last = parts.linears()
    made = cut(parts, [c for c in (first, last) if c], Transport.DRAM, "")
    of_each = (planner.proposals(p, region.rows, device, options) for p in cut_at_dram(made))
    return sum(min(map(prediction_of, each)) for each in of_each)
