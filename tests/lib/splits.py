"""The passes that split a program, and those behind them."""

from __future__ import annotations

from functools import partial

from tilestream import devices
from tilestream.ir.pipeline import Pipeline
from tilestream.ir.verify import verify
from tilestream.plan.passes.cuts import cut_vertical, split_bulk, split_spatial
from tilestream.plan.passes.settings import (
    balance,
    choose_in_flight,
    choose_placement,
    choose_residency,
    set_queue_depth,
)

H200 = devices.get("h200")
SPLITS = {
    "bulk": split_bulk,
    "vertical": cut_vertical,
    "spatial": split_spatial,
    "spatial2": partial(split_spatial, layers_per_stage=2),
}


def after_split(p: Pipeline) -> Pipeline:
    """The passes behind a split, each followed by the verifier; balance and depth only make sense together."""
    for step in (choose_placement, choose_residency):
        p = step(p, H200)
        verify(p)
    p = choose_in_flight(p)
    p = set_queue_depth(balance(p, H200))
    verify(p)
    return p
