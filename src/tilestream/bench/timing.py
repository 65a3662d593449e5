"""GPU timing: one process, CUDA graphs for every arm, interleaved rounds, medians, poisoned outputs.

L2 is warm: a replay reads the inputs of the replay before it, which stay in L2 where they fit. All
arms have that in common. Between two rounds of an arm the other arms have run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilestream.bench.accuracy import tensors
from tilestream.run import timing
from tilestream.run.timing import Captured, capture

ROUNDS = 30
BURST_US = 2000.0
MOST_CALLS = 64
PROTOCOL = {
    "clock": "CUDA events around one graph replay of several calls, divided by their number",
    "graphs": True,
    "interleaved": True,
    "statistic": "median over rounds",
    "rounds": ROUNDS,
    "data": "random",
    "l2": "warm: every call reads the same inputs, which stay in L2 where they fit",
    "outputs": "filled with NaN before the replay that is checked",
}


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: median, extremes over the rounds, and calls to a graph replay."""

    us: float
    us_min: float
    us_max: float
    calls: int


def captured(run: Callable[[], object]) -> Captured:
    """``run`` as a CUDA graph that fills about ``BURST_US``."""
    return capture(run, BURST_US, MOST_CALLS)


def poisoned_replay(arm: Captured) -> object:
    """Fill the outputs with NaN (integers: with ones), replay, and return them."""
    poison(tensors(arm.outputs))
    arm.graph.replay()
    torch.cuda.synchronize()
    return arm.outputs


def poison(outputs: Sequence[Tensor]) -> None:
    for x in outputs:
        x.fill_(float("nan") if x.is_floating_point() else 1)


def interleaved(arms: Mapping[str, Captured], rounds: int = ROUNDS) -> dict[str, Timing]:
    """Time every arm once a round, starting each round with another arm."""
    samples = timing.interleaved(list(arms.values()), rounds)
    return {
        name: Timing(statistics.median(us), min(us), max(us), arms[name].calls)
        for name, us in zip(arms, samples, strict=True)
    }
