"""What each node costs: the initiation interval and the latency of a token (Comal's table, FuseFlow section 4).

Every node has its own local clock ``t``. Taking a token sets ``t = max(t, the token's time)``; putting one out makes
it visible at ``t + latency``; then ``t`` advances by the initiation interval. A run's cycles are the largest final
``t``. There is no other clock: every node is a pipelined unit of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tilestream.errors import SparseError

Mode = Literal["scalar", "block", "block_scalar"]

_EVERY_STEP = frozenset(
    "scan repsig repeat intersect union locate array alu reduce spacc crd_hold fork join write_crd write_val".split()
)
_FREE = frozenset(("root", "broadcast", "crd_drop"))
_MULTIPLY = frozenset(("mul", "matmul"))


@dataclass(frozen=True)
class Timing:
    """The cost table.

    Attributes:
        mode: ``"scalar"``: values are scalars. ``"block"``: values are [n, n] tiles, of which the graph says the n;
            a graph of scalars then costs what ``"scalar"`` says. ``"block_scalar"``: scalars charged as if they were
            tiles of ``block`` (the released code's block-timing mode).
        block: the tile edge that ``"block_scalar"`` charges for.
        row_size: a scanner's element of which the running count is a multiple of ``row_size + 1`` leaves with
            ``miss_latency`` instead of ``output_latency``; the channel makes that 1 at least. The released code has 4
            and 0, so that this changes nothing; ``row_size=0`` turns it off.
        output_latency: latency of a scanner's elements.
        miss_latency: see ``row_size``.
        channel_latency: least cycles from the writer's clock to the reader's (DAM's send latency).
        response_latency: cycles until a writer sees that a full channel has room again (DAM's response latency).

    Raises:
        SparseError: a mode that is not one of these, or a cost below what is possible.
    """

    mode: Mode = "scalar"
    block: int = 1
    row_size: int = 4
    output_latency: int = 1
    miss_latency: int = 0
    channel_latency: int = 1
    response_latency: int = 1

    def __post_init__(self) -> None:
        if self.mode not in ("scalar", "block", "block_scalar"):
            raise SparseError(f"timing mode {self.mode!r}", "use scalar, block or block_scalar")
        least = {"block": 1, "row_size": 0, "output_latency": 0, "miss_latency": 0}
        least |= {"channel_latency": 0, "response_latency": 0}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise SparseError(f"timing {name}={getattr(self, name)}", f"use {low} or more")

    def of(self, kind: str, op: str = "", block: int = 1) -> tuple[int, int]:
        """(initiation interval, latency) in cycles of one step of a node.

        Args:
            kind: a kind of ``graph.NODES``.
            op: of an ``alu``, its operation; unary ones are asked for as ``"unary"``.
            block: the edge of the graph's tiles; 1 for scalars.
        """
        if kind not in _EVERY_STEP and kind not in _FREE:
            raise SparseError(f"no timing for a node of kind {kind!r}", "use a kind of sparse.graph.NODES")
        interval = 1 if kind in _EVERY_STEP else 0
        n = {"scalar": 1, "block": block, "block_scalar": self.block}[self.mode]
        if n == 1:
            return interval, 1
        if kind in ("array", "reduce"):
            return 1, n * n
        if kind != "alu":
            return interval, 1
        if op in _MULTIPLY:
            return n, n * n if self.mode == "block_scalar" else 2 * n - 1
        if op == "unary" and self.mode == "block":
            return 1, n
        return 1, n * n


COMAL = Timing()
"""The table of the released code."""
