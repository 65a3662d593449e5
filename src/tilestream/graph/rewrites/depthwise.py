"""Depthwise convolutions as our operator, on pictures whose channels lie last: with the norm, the activation and the
mean behind them where it takes these in; and what becomes of that mean."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from tilestream.graph.depthwise import DEPTHWISE, TAKEN, Site
from tilestream.graph.nodes import argument, aten
from tilestream.graph.rewrites.insert import call
from tilestream.graph.squeeze import Site as Squeeze
from tilestream.graph.squeeze import site_of
from tilestream.kernels.operators.depthwise import Tile

CAST = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True)
class Taken:
    """A site that becomes the operator, with the scale and the shift that its norm is, and the gates that become one:
    each with the mean that it is made of."""

    site: Site
    tile: Tile
    scale: fx.Node | None
    shift: fx.Node | None
    gates: tuple[tuple[fx.Node, Squeeze], ...]

    @classmethod
    def of(cls, node: fx.Node, folded: Mapping[fx.Node, tuple[fx.Node, fx.Node]]) -> Taken | None:
        """None where the norm is none of ``folded``, those that are a scale and a shift."""
        site, tile, squeezed = node.meta.pop(TAKEN)
        gates = tuple((m, gate) for m in site.means if squeezed and (gate := site_of(m)) is not None)
        if site.norm is None:
            return cls(site, tile, None, None, gates)
        return cls(site, tile, *folded[site.norm], gates) if site.norm in folded else None

    @property
    def inside(self) -> set[fx.Node]:
        """The nodes that the operators compute."""
        found, node = {self.site.node, *(n for _, gate in self.gates for n in gate.inside)}, self.site.last
        while node not in found:
            found.add(node)
            node = node.all_input_nodes[0]
        return found


def taken_in(taken: Taken, x: fx.Node) -> fx.Node:
    """The operator's result on ``x``, whose channels lie last, where the graph inserts; means of it are replaced."""
    site, node = taken.site, taken.site.node
    weight, bias = node.args[1:3]
    conv, tile = site.conv, [taken.tile.rows, taken.tile.columns]
    slid = (conv.stride, list(conv.padding), conv.activation, tile, conv.pooled)
    made = call(node, DEPTHWISE, x, weight, bias, taken.scale, taken.shift, *slid)
    result = call(node, operator.getitem, made, 0)
    if conv.pooled:
        pooled = call(node, operator.getitem, made, 1)
        gates, pixels = dict(taken.gates), conv.out[0] * conv.out[1]
        for gate in gates.values():
            last = gate.inside[-1]
            with node.graph.inserting_before(last):
                last.replace_all_uses_with(gate.gate(pooled, pixels))
        for mean in (m for m in site.means if m not in gates):
            with node.graph.inserting_before(mean):
                total = call(mean, aten.sum.dim_IntList, pooled, [1])
                share = call(mean, aten.mul.Tensor, total, 1 / pixels)
                share = call(mean, CAST, share, mean.meta["val"].dtype)
                if argument(mean, 2, "keepdim", False):
                    share = call(mean, aten.reshape.default, share, [*share.meta["val"].shape, 1, 1])
            mean.replace_all_uses_with(share)
    return result
