"""Kernels that share a tile of few rows: groups of CTAs that exchange the middle, and sum what the groups have."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from tilestream.ir.axes import Level
from tilestream.kernels.product.sharing import Middle, Tail
from tilestream.studies.flashfuser.dataflow.chain import ELEMENT, Chain, Gate
from tilestream.studies.flashfuser.dataflow.schedule import Cluster, Dataflow, Schedule, Tiles

TILE = 128
"""Most rows of a CTA: two consumer warpgroups of 64."""


@dataclass(frozen=True)
class SharedTile:
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

    @property
    def deterministic(self) -> bool:
        return self.tail not in (Tail.ADD, Tail.ATOMICS)

    @property
    def built(self) -> bool:
        """Whether there is a kernel; else it can only be predicted, as an arm of the paper's ablation."""
        return self.tail is not Tail.ATOMICS

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
        across = self.groups if self.tail in (Tail.PARTIALS, Tail.DSM) else 1
        schedule = Schedule("m" + "n" * (across == 1 and self.groups > 1), "")
        loops = "nlk" if "n" not in schedule.spatial else "lk"
        cluster = Cluster(1, over * across, 1, over)
        tiles = Tiles(self.rows, self.block_n, self.depth, self.block_l)
        return Dataflow(
            Schedule(schedule.spatial, loops),
            cluster,
            tiles,
            Level.CLUSTER if self.middle is Middle.DSM else Level.GRID,
            Level.CLUSTER if self.tail is Tail.DSM else Level.GRID,
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

    def json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def read(data: dict[str, Any]) -> SharedTile:
        """What ``json`` wrote."""
        return SharedTile(**{**data, "middle": Middle(data["middle"]), "tail": Tail(data["tail"])})


def weight_stage(v: SharedTile, branches: int) -> int:
    """Bytes of one stage of weights: ``depth`` of B or ``depth2`` of D, whichever is more."""
    return ELEMENT * max(v.block_n * branches * v.depth, v.block_l * v.depth2)


def sequential(chain: Chain) -> Chain:
    """``chain`` with its gate as these kernels run it: both branches in one CTA."""
    return replace(chain, gate=Gate.SEQUENTIAL) if chain.gate is Gate.SPATIAL else chain
