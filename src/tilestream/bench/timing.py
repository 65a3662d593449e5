"""GPU timing: one process, CUDA graphs for every arm, interleaved rounds, medians, poisoned outputs.

L2 is warm: a replay reads the inputs of the replay before it, which stay in L2 where they fit. All
arms have that in common. Between two rounds of an arm the other arms have run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilestream.bench.accuracy import tensors
from tilestream.replays import replay_us, settle

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


@dataclass
class Captured:
    """An arm as a CUDA graph of ``calls`` equal calls; ``outputs`` are those of the last one."""

    graph: torch.cuda.CUDAGraph
    outputs: object
    calls: int
    keep: Callable[[], object]  # holds what the graph points to: packed weights, workspaces


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: median, extremes over the rounds, and calls to a graph replay."""

    us: float
    us_min: float
    us_max: float
    calls: int


def capture(run: Callable[[], object], burst_us: float = BURST_US) -> Captured:
    """Warm ``run`` up and capture it; as many calls as fill about ``burst_us``."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(3):
            run()
        end.record()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    # Launches from Python are slower than in a graph; the estimate only sizes the burst.
    one = max(1.0, start.elapsed_time(end) * 1000 / 3)
    calls = max(1, min(MOST_CALLS, math.ceil(burst_us / one)))
    graph = torch.cuda.CUDAGraph()
    outputs: object = None
    with torch.cuda.graph(graph):
        for _ in range(calls):
            outputs = run()
    return Captured(graph, outputs, calls, run)


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
    names = list(arms)
    taken: dict[str, list[float]] = {name: [] for name in names}
    settle([arm.graph for arm in arms.values()])
    for index in range(rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            arm = arms[name]
            taken[name].append(replay_us(arm.graph) / arm.calls)
    return {n: Timing(statistics.median(us), min(us), max(us), arms[n].calls) for n, us in taken.items()}
