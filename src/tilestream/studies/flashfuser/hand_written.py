"""Hand-written kernels that were timed, and what the model of kernels that share a tile says of them.

The constants of that model (``kernels.coefficients.shared_tile``) were fitted on them before there were generated ones.
They are no choices of any search.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilestream.devices import Device
from tilestream.ir.axes import Level
from tilestream.kernels.coefficients.shared_tile import H200_SHARED_TILE, Coefficients
from tilestream.kernels.costs import Counts
from tilestream.kernels.product.sharing import Middle, Sharing, Tail, phases
from tilestream.studies.flashfuser.dataflow.chain import ELEMENT, Chain
from tilestream.studies.flashfuser.dataflow.schedule import Cluster, Dataflow, Schedule, Tiles


@dataclass(frozen=True)
class HandWritten:
    """``groups`` x ``columns`` CTAs a tile of ``rows`` rows. CTA (g, s) makes ``block_n`` columns of C, then owns
    ``block_l`` columns of E over its group's columns of C; so each byte of a weight is read once.

    Attributes:
        multicast: CTAs of a cluster that load A (and C) once; with DSM, the cluster that exchanges.
        depth: of a step of the first product; ``depth2`` of the second.
        stages: of the ring of A and C; ``weight_stages`` of the ring of B and D.
        slots: parts of C that a CTA can receive at once through DSM.
    """

    rows: int
    groups: int
    columns: int
    block_n: int
    block_l: int
    middle: Middle
    tail: Tail
    multicast: int = 1
    depth: int = 64
    depth2: int = 64
    stages: int = 4
    weight_stages: int = 4
    slots: int = 0

    @property
    def ring(self) -> int:
        """Bytes of the ring of A and C."""
        return self.stages * self.depth * self.rows * ELEMENT

    def weight_ring(self, branches: int) -> int:
        """Bytes of the ring of B and D."""
        return self.weight_stages * weight_stage(self, branches)

    def padded(self, chain: Chain) -> Chain:
        """``chain`` with as many rows and middle columns as its CTAs take."""
        tiles = -(-chain.m // self.rows)
        return replace(chain, m=tiles * self.rows, n=self.groups * self.columns * self.block_n)

    def ctas(self, chain: Chain) -> int:
        """Of the launch: a grid for each tile of rows, side by side."""
        return -(-chain.m // self.rows) * self.groups * self.columns

    def flow(self, chain: Chain) -> Dataflow:
        """The same as schedule, cluster and tiles; of ``padded(chain)``. Multicast is no part of it: it moves the same
        values, and fewer bytes of the L2.
        """
        over = self.columns
        across = self.groups if self.tail in (Tail.PARTIALS, Tail.CLUSTER) else 1
        schedule = Schedule("m" + "n" * (across == 1 and self.groups > 1), "")
        loops = "nlk" if "n" not in schedule.spatial else "lk"
        cluster = Cluster(1, over * across, 1, over)
        tiles = Tiles(self.rows, self.block_n, self.depth, self.block_l)
        return Dataflow(
            Schedule(schedule.spatial, loops),
            cluster,
            tiles,
            Level.CLUSTER if self.middle is Middle.DSM else Level.GRID,
            Level.CLUSTER if self.tail is Tail.CLUSTER else Level.GRID,
        )

    def __str__(self) -> str:
        exchange = {
            Middle.NONE: "no exchange",
            Middle.L2: "C through the L2",
            Middle.DSM: f"C through DSM, {self.slots} slots",
        }[self.middle]
        shared = f", A multicast to {self.multicast}" if self.multicast > 1 and self.middle is not Middle.DSM else ""
        return (
            f"{self.groups} x {self.columns} CTAs, {self.block_n} columns of C and {self.block_l} of E each, {exchange}"
            f"{shared}, tail {self.tail}, k {self.depth}/{self.depth2}, rings {self.stages}+{self.weight_stages}"
        )


def weight_stage(v: HandWritten, branches: int) -> int:
    """Bytes of one stage of weights: ``depth`` of B or ``depth2`` of D, whichever is more."""
    return ELEMENT * max(v.block_n * branches * v.depth, v.block_l * v.depth2)


def cost(
    chain: Chain, v: HandWritten, device: Device, cold: bool = False, rates: Coefficients = H200_SHARED_TILE
) -> Counts:
    """Predicted phases of ``chain`` under ``v``.

    Args:
        cold: weights come from DRAM; they do in any case where they are larger than the L2.
    """
    return phases(sharing(chain, v), device, cold, rates)


def sharing(chain: Chain, v: HandWritten) -> Sharing:
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
        multicast=1 if v.tail is Tail.CLUSTER or whole else v.multicast,
        slots=v.slots,
    )
