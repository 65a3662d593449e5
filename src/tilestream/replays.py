"""Replays of CUDA graphs: how long one takes, and work until a GPU that was idle has reached its clocks."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

MOST_S = 1.0
STRETCH_S = 0.1
SETTLED = 0.98


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of one replay, between two events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000


def settle(graphs: Sequence[torch.cuda.CUDAGraph]) -> None:
    """Replay the graphs in turn, by stretches, until one takes no less than ``SETTLED`` of the time of the one before.

    Ends after ``MOST_S`` in any case. On an H200 that waited for a compiler the first stretch took twice its time, and
    the clocks were up after six tenths of a second.
    """
    _stretch(graphs, 1)  # the first replay of a graph also uploads it
    turns = max(1, round(STRETCH_S / max(1e-6, _stretch(graphs, 1))))
    before_s, end_s = math.inf, time.perf_counter() + MOST_S
    while time.perf_counter() < end_s:
        took_s = _stretch(graphs, turns)
        if took_s >= SETTLED * before_s:
            return
        before_s = took_s


def _stretch(graphs: Sequence[torch.cuda.CUDAGraph], turns: int) -> float:
    """Seconds that so many replays of every graph take."""
    start_s = time.perf_counter()
    for _ in range(turns):
        for graph in graphs:
            graph.replay()
    torch.cuda.synchronize()
    return time.perf_counter() - start_s
