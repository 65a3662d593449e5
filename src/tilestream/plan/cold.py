"""Regions whose weights come from DRAM in every call, since their graph moves more than the L2 holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from tilestream.devices import Device
from tilestream.graph.live import tensor_bytes
from tilestream.graph.selection import Cut


def with_cold(cuts: Sequence[Cut], graph: fx.Graph, device: Device) -> tuple[Cut, ...]:
    """``cuts``, marked where the graph's arguments and their results are more than the L2 holds.

    That is a lower bound of what a call moves, whose other values may stay on chip: where in doubt, weights are warm.
    """
    given = [*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr")]
    size = sum(map(tensor_bytes, {*given, *(node for cut in cuts for node in cut.outputs)}))
    if size <= device.l2_bytes:
        return tuple(cuts)
    return tuple(replace(cut, region=replace(cut.region, cold=True)) for cut in cuts)
