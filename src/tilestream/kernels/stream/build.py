"""How one stage runs on one CTA: its steps, what stays in registers, and its shared memory."""

from __future__ import annotations

from functools import lru_cache

from tilestream.ir.pipeline import Pipeline, Stage
from tilestream.kernels.stream.model import Schedule
from tilestream.kernels.stream.partition import partition


@lru_cache(maxsize=4096)
def build(stage: Stage, pipeline: Pipeline) -> Schedule:
    """Order a stage's ops into steps and give every tile a place.

    Raises:
        VerifyError: if a tile is wider than the placement allows or products have different dtypes; the message names
            the user's line.
    """
    return partition(stage, pipeline)
