"""What a kernel of the family takes, by the one model of kernels that share a tile (``kernels.product.sharing``)."""

from __future__ import annotations

from tilestream.devices import Device
from tilestream.devices.shared_tile import H200_SHARED_TILE, SharedTileRates
from tilestream.kernels.product.sharing import Middle, Phases, Sharing, Tail, phases
from tilestream.studies.flashfuser.dataflow.chain import ELEMENT, Chain
from tilestream.studies.flashfuser.search.variant import SharedTile


def cost(
    chain: Chain, v: SharedTile, device: Device, cold: bool = False, rates: SharedTileRates = H200_SHARED_TILE
) -> Phases:
    """Predicted phases of ``chain`` under ``v``.

    Args:
        cold: weights come from DRAM; they do in any case where they are larger than the L2.
    """
    return phases(sharing(chain, v), device, cold, rates)


def sharing(chain: Chain, v: SharedTile) -> Sharing:
    """What a launch of ``v`` moves."""
    width = v.block_n * v.columns
    whole = v.middle is Middle.NONE
    return Sharing(
        rows=v.rows,
        row_tiles=-(-chain.m // v.rows),
        groups=v.groups,
        columns=v.columns,
        input_bytes=v.rows * chain.k * ELEMENT,
        first_bytes=v.block_n * chain.k * ELEMENT * chain.branches,
        middle_bytes=v.rows * width * ELEMENT,
        second_bytes=(chain.l * v.block_n if whole else v.block_l * width) * ELEMENT,
        first_chip_bytes=ELEMENT * chain.n * chain.k * chain.branches,
        second_chip_bytes=ELEMENT * chain.n * chain.l,
        result=chain.m * chain.l,
        first_steps=-(-chain.k // v.depth),
        second_steps=-(-(v.block_n if whole else width) // v.depth2),
        left_ring=v.ring,
        weight_ring=v.weight_ring(chain.branches),
        middle=v.middle,
        tail=v.tail,
        cluster=v.multicast,
        multicast=1 if v.tail is Tail.DSM or whole else v.multicast,
        slots=v.slots,
    )
