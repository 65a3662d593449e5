"""The cost model of shared tiles against whole blocks that were timed: norm, FFN, residual on 128 rows."""

from __future__ import annotations

import pytest
from shared_tiles import Ffn

from tilestream import devices
from tilestream.kernels.product.shared_tile import build
from tilestream.kernels.product.shared_tile.cost import shared_tile_cost
from tilestream.plan.passes.share_tile import share_tile
from tilestream.studies.flashfuser.generated import split_of

BLOCKS = {
    "gpt2": Ffn(3072, 768, 768, act="gelu", bias=True, residual=True, norm="layer"),
    "bert": Ffn(3072, 768, 768, act="gelu", bias=True, residual=True),
    "qwen": Ffn(3072, 1024, 1024, gated=True, act="silu", residual=True, norm="rms"),
    "llama": Ffn(8192, 2048, 2048, gated=True, act="silu", residual=True, norm="rms"),
}
MEASURED_US = {
    "bert": {
        "2 x 64 rows, 6 groups of 8, partial sums in order": 9.63,
        "2 x 64 rows, 4 groups of 16, partial sums in order": 9.8,
        "2 x 64 rows, 8 groups of 8, partial sums in order": 9.94,
        "2 x 64 rows, 3 groups of 16, partial sums in order, stages of 256": 10.31,
        "12 groups of 8, partial sums in order": 10.66,
        "2 x 64 rows, 6 groups of 8, sums over a cluster": 10.68,
        "2 x 64 rows, 7 groups of 8, middle over a cluster, partial sums in order": 10.9,
        "6 groups of 16, sums over a cluster": 11.14,
        "16 groups of 8, partial sums in order": 11.22,
        "2 x 64 rows, 12 groups of 4, partial sums in order": 11.56,
        "2 x 64 rows, 15 groups of 4, middle over a cluster, partial sums in order": 11.83,
        "2 x 64 rows, 16 groups of 4, partial sums in order": 12.02,
        "4 x 32 rows, 4 groups of 8, partial sums in order": 12.43,
        "2 x 64 rows, 1 group of 48, sums in one place": 14.08,
        "4 x 32 rows, 1 group of 24, sums in one place": 16.06,
    },
    "qwen": {
        "2 x 64 rows, 4 groups of 16, partial sums in order": 13.51,
        "2 x 64 rows, 8 groups of 8, partial sums in order": 14.27,
        "8 groups of 16, partial sums in order": 14.96,
        "6 groups of 16, partial sums in order": 15.66,
        "2 x 64 rows, 2 groups of 24, partial sums in order": 16.39,
        "6 groups of 16, sums over a cluster": 16.8,
        "2 x 64 rows, 16 groups of 4, partial sums in order": 17.14,
        "4 groups of 24, sums over a cluster": 17.16,
        "16 groups of 8, partial sums in order": 17.21,
        "2 x 64 rows, 6 groups of 8, sums over a cluster": 17.25,
        "2 x 64 rows, 1 group of 64, sums in one place": 17.31,
        "12 groups of 8, partial sums in order": 17.79,
        "2 x 64 rows, 1 group of 48, sums in one place": 18.49,
    },
    "llama": {
        "4 groups of 32, partial sums in order": 39.63,
        "8 groups of 16, partial sums in order": 39.95,
        "5 groups of 24, partial sums in order": 40.56,
        "6 groups of 16, sums over a cluster": 42.16,
        "4 groups of 24, sums over a cluster": 43.89,
        "16 groups of 8, partial sums in order": 44.69,
        "2 groups of 64, partial sums in order": 45.89,
        "2 x 64 rows, 8 groups of 8, partial sums in order": 46.96,
        "1 group of 128, sums in one place": 57.57,
        "2 x 64 rows, 1 group of 64, sums in one place": 66.12,
    },
    "gpt2": {
        "2 x 64 rows, 8 groups of 8, partial sums in order": 12.24,
        "2 x 64 rows, 4 groups of 16, partial sums in order, stages of 256": 12.77,
        "2 x 64 rows, 6 groups of 8, partial sums in order": 13.4,
        "2 x 64 rows, 4 groups of 16, partial sums in order": 13.49,
        "4 x 32 rows, 4 groups of 8, partial sums in order": 14.19,
        "2 x 64 rows, 6 groups of 8, sums over a cluster": 14.22,
        "16 groups of 8, partial sums in order": 14.26,
        "2 x 64 rows, 16 groups of 4, partial sums in order": 14.27,
        "2 x 64 rows, 3 groups of 16, partial sums in order": 14.45,
        "4 x 32 rows, 8 groups of 4, partial sums in order": 14.46,
        "12 groups of 8, partial sums in order": 14.52,
        "6 groups of 16, sums over a cluster": 14.75,
        "2 x 64 rows, 12 groups of 4, partial sums in order": 14.79,
        "4 x 32 rows, 1 group of 32, sums in one place": 17.1,
        "4 x 32 rows, 6 groups of 4, sums over a cluster": 17.34,
        "2 x 64 rows, 1 group of 48, sums in one place": 17.83,
    },
}
"""Microseconds on one H200 in CUDA graphs, warm, all of a block in turn; kernels as they are generated."""


def pairs(name: str) -> list[tuple[float, float]]:
    """Predicted and measured microseconds of every kernel of a block that was timed."""
    made = []
    for arm, us in MEASURED_US[name].items():
        split = split_of(f"shared {arm}", 128)
        assert split is not None
        p = share_tile(BLOCKS[name].program(), split)
        made.append((1e6 * shared_tile_cost(build(p.stages[0], p), 128, devices.get("h200"), cold=False).seconds, us))
    return made


@pytest.mark.parametrize(
    ("name", "error", "lost"),
    [("gpt2", 0.06, 0.0), ("bert", 0.06, 0.0), ("qwen", 0.08, 0.06), ("llama", 0.09, 0.14)],
)
def test_the_model_tells_what_blocks_take(name: str, error: float, lost: float) -> None:
    """Mean error, and how much slower the kernel is that is predicted to be the fastest; GPT-2's had no part in the
    fit."""
    found = pairs(name)
    assert sum(abs(predicted / us - 1) for predicted, us in found) / len(found) <= error
    assert min(found)[1] <= (1 + lost) * min(us for _, us in found)
