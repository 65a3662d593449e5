"""A pipeline of every kind whose time is a closed form, with rows."""

from __future__ import annotations

import backward_chains
import stationary
from backward_chains import widths
from shared_tiles import Ffn

from tilestream import devices
from tilestream.ir.pipeline import Pipeline
from tilestream.options import Options
from tilestream.plan.few_rows import STRATEGY
from tilestream.plan.planner import proposals

H200 = devices.get("h200")
BLOCKS = {
    "ffn": (Ffn(768, 768, 768), 128),
    "one row": (Ffn(3072, 768, 768, act="gelu"), 1),
    "gated": (Ffn(1536, 512, 512, gated=True, act="silu", residual=True), 16),
    "behind a norm": (Ffn(1024, 512, 512, act="gelu", residual=True, norm="layer"), 64),
}
STATIONARY = stationary.gradients(
    stationary.Layer(128, 128, splits=60, groups="o"), stationary.Layer(256, 384, (2, 2), splits=18, groups="o")
)


def cases() -> dict[str, tuple[Pipeline, int]]:
    """By name: shared tiles of each way to hand over and each tail, a tiled block, sums, narrow and wide chains."""
    found: dict[str, tuple[Pipeline, int]] = {}
    for name, (block, rows) in BLOCKS.items():
        for c in proposals(block.program(), rows, H200, Options(any_order=True)):
            if c.strategy == STRATEGY and c.pipeline is not None:
                found[f"{name}, {c.detail}"] = (c.pipeline, rows)
    block = Ffn(3072, 768, 768, act="gelu", norm="layer").program()
    made = [c.pipeline for c in proposals(block, 16_384, H200, Options()) if "tiles over the grid" in c.detail]
    (tiled,) = [pipeline for pipeline in made if pipeline is not None]
    found["tiled block"] = (tiled, 16_384)
    found["stationary sums"] = (STATIONARY, 65_536)
    found["backward chain"] = (backward_chains.chain(*widths(2), ctas=132), 65_536)
    found["wide backward chain"] = (backward_chains.chain(128, 128, 128, ctas=132, dtype="bf16"), 65_536)
    return found
