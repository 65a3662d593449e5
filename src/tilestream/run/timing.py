"""Replays of CUDA graphs: how long one takes, and work until a GPU that was idle has reached its clocks."""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

MOST_S = 1.0
STRETCH_S = 0.05
KEPT_S = 2.0
"""A GPU that was timed no longer ago than this has kept its clocks: after 0.25, 0.5, 1 and 2 idle seconds the second
product of 4096 rows took 0.90 to 0.99 of what it took before on an H200, after 3 seconds 1.08."""
SETTLED = 0.98
ROUNDS = 20
FEW_ROUNDS = 7
"""So many rounds are enough for a choice that they leave no doubt of (``to_choose``)."""
APART = 1.1
"""No doubt: the slowest round of the fastest arm, so many times, is no longer than the fastest of every other."""
BURST_US = 1500.0
MOST_CALLS = 50
LAUNCHED_CYCLES = 5_000_000
"""Of a GPU that waits until Python has launched three calls: a burst of few calls has the start of a graph, of eight
microseconds, in the time of each."""
_timed_until_s = [-math.inf]


@dataclass
class Captured:
    """A function as a CUDA graph of ``calls`` equal calls; ``outputs`` are those of the last one."""

    graph: torch.cuda.CUDAGraph
    outputs: object
    calls: int
    keep: Callable[[], object]  # holds what the graph points to: packed weights, workspaces

    def replay(self) -> None:
        """Run it once more, and wait for it."""
        self.graph.replay()
        torch.cuda.synchronize()


def capture(run: Callable[[], object], burst_us: float = BURST_US, most_calls: int = MOST_CALLS) -> Captured:
    """Warm ``run`` up and capture it: as many calls as fill about ``burst_us`` microseconds, at most ``most_calls``."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
        torch.cuda._sleep(LAUNCHED_CYCLES)  # launches from Python are slower than in a graph: these are all there
        start.record()
        for _ in range(3):
            run()
        end.record()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    one_us = max(1.0, start.elapsed_time(end) * 1000 / 3)
    calls = max(1, min(most_calls, math.ceil(burst_us / one_us)))
    graph = torch.cuda.CUDAGraph()
    outputs: object = None
    # Other threads go on compiling, or loading data: what they call is none of this capture's business.
    with uncollected(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            outputs = run()
    return Captured(graph, outputs, calls, run)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's collector: a graph that it frees while another is captured makes that one invalid."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def timed_side_by_side(functions: Sequence[Callable[[], object]]) -> list[float]:
    """Microseconds of one call of each, captured: medians over rounds that take all in turn, at settled clocks."""
    arms = [capture(function) for function in functions]
    return [statistics.median(samples) for samples in interleaved(arms, ROUNDS)]


def at_most_us(function: Callable[[], object]) -> float:
    """Microseconds that one call takes at most: launched from Python, by a GPU whose clocks may still rise."""
    function()  # what is made at a first call, Inductor's choice of block sizes among it
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(1 + FEW_ROUNDS)]
    marks[0].record()
    for mark in marks[1:]:
        function()
        mark.record()
    marks[-1].synchronize()
    return min(start.elapsed_time(end) * 1000 for start, end in pairwise(marks))


def to_choose(arms: Sequence[Captured]) -> list[list[float]]:
    """``interleaved``, over ``FEW_ROUNDS`` where those leave no doubt of the fastest arm, else over ``ROUNDS``."""
    return interleaved(arms, ROUNDS, FEW_ROUNDS)


def one_by_one(arms: Sequence[Captured]) -> list[list[float]]:
    """Microseconds of calls as Python makes them, a list an arm: each from an idle GPU until its results are there."""
    warm_up([arm.graph for arm in arms])
    samples: list[list[float]] = [[] for _ in arms]
    for index in range(ROUNDS + FEW_ROUNDS):
        for arm, times in zip(arms, samples, strict=True):
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            arm.keep()
            torch.cuda.synchronize()
            if index >= FEW_ROUNDS:  # what the first calls make, later ones have
                times.append(1e6 * (time.perf_counter() - start_s))
    _timed_until_s[0] = time.perf_counter()
    return samples


def interleaved(arms: Sequence[Captured], rounds: int, least: int | None = None) -> list[list[float]]:
    """Microseconds of a call in every round, a list an arm: clocks change, but what they do to one they do to all.

    Args:
        least: the rounds after which it ends where there is no doubt of the fastest; never before ``rounds`` if None.
    """
    warm_up([arm.graph for arm in arms])
    samples: list[list[float]] = [[] for _ in arms]
    for index in range(rounds):
        if index == least and no_doubt(samples):
            break
        turn = list(range(len(arms)))
        for k in turn[index % len(arms) :] + turn[: index % len(arms)]:
            samples[k].append(replay_us(arms[k].graph) / arms[k].calls)
    _timed_until_s[0] = time.perf_counter()
    return samples


def no_doubt(samples: Sequence[Sequence[float]]) -> bool:
    """Whether every round of one arm was clearly faster than any of another; of one arm, whether all were alike."""
    if len(samples) == 1:
        return max(samples[0]) <= APART * min(samples[0])
    fastest, *others = sorted(samples, key=statistics.median)
    return APART * max(fastest) <= min(min(other) for other in others)


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of one replay, between two events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000


def warm_up(graphs: Sequence[torch.cuda.CUDAGraph]) -> None:
    """Replay the graphs in turn, by stretches, until one takes no less than ``SETTLED`` of the time of the one before.

    Ends after ``MOST_S`` in any case. On an H200 that waited for a compiler the first stretch took twice its time, and
    the clocks were up after six tenths of a second. One that was timed just before has them.
    """
    kept = time.perf_counter() < _timed_until_s[0] + KEPT_S
    _stretch(graphs, 1)  # the first replay of a graph also uploads it
    if kept:
        return
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
