"""What each node costs: the initiation interval and the latency of a token (Comal's table, FuseFlow section 4).

Every node has its own local clock ``t``. Taking (or looking at) a token sets ``t = max(t, the token's time)``; what
is put out then is visible at ``t + latency``; then ``t`` advances by the initiation interval. A run's cycles are the
largest final ``t``. There is no other clock: every node is a pipelined unit of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tilestream.errors import SparseError

Mode = Literal["scalar", "block", "block_scalar"]
Style = Literal["comal", "sam"]

CONTROL_LATENCY = 1
"""Stops, N and done leave with this latency, whatever the values of the node cost."""

_EVERY_STEP = frozenset(
    "root scan repsig repeat intersect union locate array alu reduce spacc crd_hold val_drop fork join "
    "write_crd write_val".split()
)
_FREE = frozenset(("broadcast", "crd_drop"))


@dataclass(frozen=True)
class Timing:
    """The cost table.

    ``mode``: ``"scalar"``: every element costs what a scalar does. ``"block"``: values are [n, n] tiles, of which
    the graph says the n. ``"block_scalar"``: values are scalars, charged as if they were tiles of edge ``block``
    (the released code's block-timing mode). ``channel_latency``: least cycles between a writer's clock and a token's
    arrival. ``response_latency``: cycles after a token is taken from a full channel until its writer may use the room.

    ``style``: whose reductions and accumulators. ``"comal"``: a sum and the stop after it leave in one step, and the
    end of every fiber above an accumulator's innermost one is a step. ``"sam"``: as SAM's simulator in Python has
    them: the stop leaves a step after the sum, and an accumulator of order 2 or more takes coordinates by points, so
    that only the innermost stream costs steps. All else is timed alike by the two.

    The released code's scanners have a row buffer too: an element in five leaves with latency 0 instead of 1. Its
    channels make that 1 again, so the buffer changes no cycle and is not here.

    Raises:
        SparseError: a mode or style that is not one of these, a block below 1, or a latency below 0.
    """

    mode: Mode = "block"
    block: int = 1
    channel_latency: int = 1
    response_latency: int = 1
    style: Style = "comal"

    def __post_init__(self) -> None:
        if self.mode not in ("scalar", "block", "block_scalar"):
            raise SparseError(f"timing mode {self.mode!r}", "use scalar, block or block_scalar")
        if self.style not in ("comal", "sam"):
            raise SparseError(f"timing style {self.style!r}", "use comal or sam")
        if self.block < 1:
            raise SparseError(f"timing for blocks of {self.block}", "use 1 for scalars, or the edge of the blocks")
        if self.channel_latency < 0 or self.response_latency < 0:
            raise SparseError("a latency below 0", "use 0 cycles or more (1 is what the released code has)")

    def of(self, kind: str, op: str = "", block: int = 1) -> tuple[int, int]:
        """(initiation interval, latency of an element) in cycles of one step of a node.

        Args:
            kind: a kind of ``stream.graph.NODES``.
            op: the operation of a binary ``alu``; ``"unary"`` for every unary one.
            block: the edge of the graph's tiles; 1 for scalars.

        Raises:
            SparseError: a kind that no node has.
        """
        if kind not in _EVERY_STEP and kind not in _FREE:
            raise SparseError(f"no timing for a node of kind {kind!r}", "use a kind of sparse.graph.NODES")
        interval = 1 if kind in _EVERY_STEP else 0
        n = {"scalar": 1, "block": block, "block_scalar": self.block}[self.mode]
        if n == 1:
            return interval, 1
        if kind in ("array", "reduce"):
            return interval, n * n
        if kind != "alu":
            return interval, 1
        if self.mode == "block_scalar" and op == "mul":
            return n, n * n
        if self.mode == "block" and op in ("matmul", "matmul_t"):
            return n, 2 * n - 1
        if op == "unary" and self.mode == "block":
            return interval, n
        return interval, n * n


COMAL = Timing()
"""The table of the released code: scalars in a graph of scalars, true block timings in a blocked one."""

SAM = Timing(style="sam")
"""SAM's reductions and accumulators; all else as ``COMAL``."""

TIMINGS = {"comal": COMAL, "sam": SAM}
"""By name."""
