"""Hypothesis strategies over ``random_pipelines``: legal pipelines, and pairs of a program and a cut of it."""

from __future__ import annotations

import random

from hypothesis import strategies as st
from random_pipelines import cut, random_pipeline, tensors_for
from random_programs import ANYTHING, Limits, program

from tilestream.ir.pipeline import Pipeline

__all__ = ["Limits", "cuts", "pipelines", "programs", "random_pipeline", "row_counts", "tensors_for"]


def _randoms() -> st.SearchStrategy[random.Random]:
    return st.randoms(use_true_random=False)


def programs(limits: Limits = ANYTHING) -> st.SearchStrategy[Pipeline]:
    """One-stage pipelines."""
    return _randoms().map(lambda rng: program(rng, limits))


def cuts(limits: Limits = ANYTHING) -> st.SearchStrategy[tuple[Pipeline, Pipeline]]:
    """A one-stage pipeline, and the same ops spread over stages, queues and launches."""

    def both(rng: random.Random) -> tuple[Pipeline, Pipeline]:
        one = program(rng, limits)
        return one, cut(one, rng, limits)

    return _randoms().map(both)


def pipelines(limits: Limits = ANYTHING) -> st.SearchStrategy[Pipeline]:
    """Legal pipelines of one or several stages and launches."""
    return cuts(limits).map(lambda pair: pair[1])


def row_counts(most: int = 600) -> st.SearchStrategy[int]:
    """Rows: none, one, around a tile and around a step, and anything up to ``most``."""
    return st.sampled_from((0, 1, 63, 64, 65, 127, 128, 129, 257)) | st.integers(0, most)
