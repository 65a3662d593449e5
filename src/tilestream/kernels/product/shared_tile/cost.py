"""How long a shared tile of ours takes, by the one model of kernels that share a tile (``kernels.product.sharing``)."""

from __future__ import annotations

from dataclasses import replace

from tilestream.devices import Device
from tilestream.ir.tileops import OPS
from tilestream.kernels.coefficients.shared_tile import H200_GENERATED, H200_MADE_BY_EACH, H200_ONE_LAYER, Coefficients
from tilestream.kernels.costs import Counts
from tilestream.kernels.product.block import PANEL
from tilestream.kernels.product.shared_tile import SharedTile
from tilestream.kernels.product.sharing import ELEMENT, Middle, Sharing, Tail, phases


def shared_tile_cost(
    s: SharedTile, rows: int, device: Device, cold: bool = True, rates: Coefficients | None = None
) -> Counts:
    """One call at ``rows`` rows: as many launches as the row tiles of one do not hold, or, where CTAs are ``alone``, as
    many turns of one as its clusters are not resident for.

    Args:
        cold: weights come from DRAM: in a model other layers have passed since they were used.
        rates: those of generated kernels of its kind, if none are given.
    """
    one = phases(shares(s, min(rows, s.row_tiles * s.tile_rows)), device, cold, rates or rates_of(s))
    launches = -(-rows // (s.row_tiles * s.tile_rows))
    if s.middle is Middle.NONE and s.cluster > 1:
        launches *= -(-s.ctas // s.cluster // max(1, device.resident_clusters(s.cluster)))
    again = one.parts[1:] if s.alone else one.parts
    return Counts(one.name, (one, Counts("again", again, times=launches - 1)))


def rates_of(s: SharedTile) -> Coefficients:
    """Of generated kernels of one layer or of two, and of two whose CTAs exchange no middle."""
    if s.block.one_layer:
        return H200_ONE_LAYER
    if s.middle is Middle.NONE:
        return replace(H200_MADE_BY_EACH, step_s=H200_MADE_BY_EACH.step_s * s.depth / 128)
    return H200_GENERATED


def shares(s: SharedTile, rows: int) -> Sharing:
    """What a launch of ``s`` on ``rows`` rows moves. Copies of rows are no higher than there are rows.

    One layer is a first product, of a group's part of the sum, with nothing behind it but the tail.
    """
    k, hid, out = s.block.sizes
    height, firsts = min(rows, s.tile_rows), len(s.block.firsts)
    alone = s.middle is Middle.NONE
    scattered = s.partial_bytes if alone and s.tail is Tail.CLUSTER else 0.0
    both = Sharing(
        rows=max(PANEL, s.tile_rows),
        row_tiles=s.row_tiles,
        groups=s.groups,
        columns=s.columns,
        input_bytes=ELEMENT * height * k,
        first_bytes=ELEMENT * k * firsts * s.middle_columns,
        middle_bytes=ELEMENT * height * s.group_columns,
        second_bytes=ELEMENT * s.group_columns * s.out_columns,
        first_chip_bytes=ELEMENT * hid * firsts * k,
        second_chip_bytes=ELEMENT * hid * out,
        result=rows * out,
        first_steps=-(-k // s.depth),
        second_steps=-(-s.group_columns // s.depth),
        left_ring=s.left_stages * s.left_bytes * height / s.tile_rows,
        weight_ring=s.weight_stages * s.weight_bytes,
        middle=s.middle,
        tail=s.tail,
        cluster=s.cluster,
        slots=s.columns,  # all parts of a middle have a place
        before=bool(s.block.before),
        made_columns=s.middle_columns * firsts if alone else 0,
        middle_work=s.middle_columns // (2 if s.halves else 1) * sum(OPS[op.kind].flops for op in s.block.middle),
        beside=any(op.kind == "load" for op in s.block.after),
        scatter_bytes=scattered * (s.groups - 1) / s.groups,
    )
    if not s.block.one_layer:
        return both
    return replace(
        both,
        input_bytes=both.middle_bytes,
        first_bytes=both.second_bytes,
        middle_bytes=0.0,
        second_bytes=0.0,
        first_chip_bytes=ELEMENT * k * out * s.block.products,
        second_chip_bytes=0.0,
        first_steps=s.steps,
        second_steps=0,
        middle=Middle.NONE,
        slots=0,
        beside=False,
        own_columns=k * -(-height // (4 * s.warpgroups)) if s.own_rows else 0,
        scatter_bytes=s.out_columns * s.live_threads * 2 * (s.groups - 1) / s.groups,
    )
