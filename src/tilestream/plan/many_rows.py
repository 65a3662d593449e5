"""The candidate for a feed-forward block, or one layer, on many rows that is too wide for a row stream: tiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tilestream.devices import Device
from tilestream.ir.pipeline import Pipeline
from tilestream.ir.verify import WIDEST
from tilestream.kernels.product.block import MOST_ROWS
from tilestream.kernels.product.finder import is_block, is_projection
from tilestream.kernels.product.tiled_block.model import is_tileable
from tilestream.options import Options
from tilestream.plan.passes import merge_common_ops, remove_dead_ops, tile_block
from tilestream.plan.passes.verified import Pass, verified

STRATEGY = "vertical"


@dataclass(frozen=True)
class TiledRecipe:
    """How the candidate is made."""

    strategy: str = STRATEGY
    detail: str = "wide layers as tiles over the grid"

    def passes(self, device: Device, queue_depth: int | None = None) -> tuple[Pass, ...]:
        """What turns a program into this candidate; the last one raises where it is not legal."""
        del queue_depth  # there are no queues
        return (
            remove_dead_ops,
            merge_common_ops,
            partial(tile_block, device=device),
            partial(verified, device=device),
        )


def recipes(program: Pipeline, rows: int, options: Options) -> list[TiledRecipe]:
    """The recipe where ``program`` is a block or a layer on many rows whose result no fragment holds; else none.

    Narrower results are sums that stay in registers (``plan.passes.chunk_hidden``).
    """
    if options.strategy not in ("auto", STRATEGY) or rows <= MOST_ROWS:
        return []
    if not is_block(program) or (is_projection(program) and not is_tileable(program)):
        return []
    stored = [op.ins[0] for op in program.stages[0].ops if op.kind == "store"]
    return [TiledRecipe()] if any(program.tiles()[t].features > WIDEST[0] for t in stored) else []
