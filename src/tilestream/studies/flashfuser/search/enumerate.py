"""Every kernel of the family that a chain can have on a device, and why others cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tilestream.devices import Device
from tilestream.studies.flashfuser.dataflow.chain import ELEMENT, Chain
from tilestream.studies.flashfuser.dataflow.places import ACCUMULATOR_REGISTERS, CONSUMERS
from tilestream.studies.flashfuser.search.variant import TILE, Middle, SharedTile, Tail, weight_stage

RESERVED = 6 * 1024
"""Bytes of shared memory for barriers and for the tile of C or E that is on its way out."""

FEWEST = 0.5
"""Share of the SMs below which a grid is not tried where more CTAs can be had."""

COLUMNS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""CTAs of a group."""

WIDEST = ACCUMULATOR_REGISTERS * CONSUMERS // TILE
"""Columns of a product of 128 rows: 384, as many as two warpgroups have accumulators for."""

DEPTHS = (64, 128)
STAGES = range(2, 13)
CLUSTERS = (2, 4, 6, 8, 16)


def variants(chain: Chain, device: Device) -> list[SharedTile]:
    """Legal kernels of ``chain``: co-resident on ``device``, rings within its shared memory, every weight read once.

    A group count that does not divide N is padded with columns of zeros.
    """
    made: dict[SharedTile, None] = {}
    for shape in _shapes(chain, device):
        made |= dict.fromkeys(_rings(shape, chain, device))
    return list(made)


def resident(v: SharedTile, chain: Chain, device: Device) -> bool:
    """Whether all CTAs run at once, which every exchange needs."""
    if v.multicast == 1:
        return v.ctas(chain) <= device.sms
    if v.multicast > device.largest_cluster:
        return False
    return v.ctas(chain) <= v.multicast * device.resident_clusters(v.multicast)


def _shapes(chain: Chain, device: Device) -> Iterator[SharedTile]:
    """Grids with their exchange and tail; rings are still the least."""
    rows = TILE if chain.m > TILE // 2 else TILE // 2
    tiles = -(-chain.m // rows)
    room = device.sms // tiles
    for columns in COLUMNS:
        if columns > room or chain.l % columns or (chain.l // columns) % 8:
            continue
        # A CTA that exchanges owns its part of E whole; one that does not makes all of E in chunks.
        block_l = chain.l // columns if columns > 1 else next(c for c in (64, 32, 16, 8) if chain.l % c == 0)
        if block_l > WIDEST:  # E's part lives in registers
            continue
        for groups in _groups(chain, room // columns, columns, tiles, device):
            block_n = -(-chain.n // (groups * columns * 8)) * 8
            if block_n * chain.branches > WIDEST or groups * columns * block_n >= chain.n + columns * block_n:
                continue
            for middle, tail, cluster in _exchanges(columns, groups, block_l):
                v = SharedTile(rows, groups, columns, block_n, block_l, middle, tail, cluster)
                if resident(v, chain, device):
                    yield v


def _groups(chain: Chain, most: int, columns: int, tiles: int, device: Device) -> Iterator[int]:
    """Numbers of groups that fill the machine, or as much of it as the chain has columns for."""
    widest = min(most, max(1, chain.n // (8 * columns)))
    for groups in range(widest, 0, -1):
        if groups < widest and tiles * groups * columns < FEWEST * device.sms:
            return
        yield groups


def _exchanges(columns: int, groups: int, block_l: int) -> Iterator[tuple[Middle, Tail, int]]:
    """Middle, tail and cluster size."""
    if columns == 1:
        yield Middle.NONE, Tail.ATOMICS if groups > 1 else Tail.STORE, 1
        return
    tails = (Tail.ADD, Tail.PARTIALS) if groups > 1 else (Tail.STORE,)
    for tail in tails:
        yield Middle.L2, tail, 1
        for cluster in CLUSTERS:
            if columns % cluster == 0:
                yield Middle.L2, tail, cluster
        if columns in CLUSTERS:
            yield Middle.DSM, tail, columns
    if groups in CLUSTERS and block_l % groups == 0:
        yield Middle.L2, Tail.DSM, groups


def _rings(shape: SharedTile, chain: Chain, device: Device) -> Iterator[SharedTile]:
    """The shape with rings that fill shared memory: more of it for rows, or for weights."""
    for depth in DEPTHS:
        if depth > chain.k and depth > DEPTHS[0]:
            continue
        for depth2 in DEPTHS:
            width = shape.block_n * shape.columns
            if depth2 > DEPTHS[0] and width % depth2:
                continue
            v = replace(shape, depth=depth, depth2=depth2)
            room = device.shared_bytes_per_cta - RESERVED
            if v.middle is Middle.DSM:  # slots for the peers' parts, within half of the room
                part = v.rows * v.block_n * ELEMENT
                slots = min(v.columns - 1, room // 2 // part)
                if slots == 0:
                    continue
                v, room = replace(v, slots=slots), room - slots * part
            page = weight_stage(v, chain.branches)
            for stages in STAGES:
                left = room - stages * depth * v.rows * ELEMENT
                if left < 2 * page:
                    break
                if stages % 2 == 0 or stages < 6:
                    yield replace(v, stages=stages, weight_stages=min(32, left // page))
