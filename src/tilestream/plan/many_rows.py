"""The candidate for a feed-forward block, or one layer, on many rows that is too wide for a row stream: tiles."""

from __future__ import annotations

from tilestream.ir.pipeline import Pipeline
from tilestream.ir.verify import WIDEST
from tilestream.kernels.product.block import MOST_ROWS
from tilestream.kernels.product.finder import is_block, is_projection
from tilestream.kernels.product.tiled_block.model import is_tileable
from tilestream.options import Options
from tilestream.plan.passes.tile_block import tile_block
from tilestream.plan.recipes import Recipe

STRATEGY = "vertical"


TILED = Recipe(STRATEGY, tile_block, detail="wide layers as tiles over the grid", dealt=True)
"""The candidate."""


def recipes(program: Pipeline, rows: int, options: Options) -> list[Recipe]:
    """The recipe where ``program`` is a block or a layer on many rows whose result no fragment holds; else none.

    Narrower results are sums that stay in registers (``plan.passes.forms.chunk_hidden``).
    """
    if options.strategy not in ("auto", STRATEGY) or rows <= MOST_ROWS:
        return []
    if not is_block(program) or (is_projection(program) and not is_tileable(program)):
        return []
    stored = [op.ins[0] for op in program.stages[0].ops if op.kind == "store"]
    return [TILED] if any(program.tiles()[t].features > WIDEST[0] for t in stored) else []
