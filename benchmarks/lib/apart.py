"""Arms of one case, each in a process of its own: they compile side by side, and are timed in turn.

First calls of a training step of MeshGraphNets take half a minute in every arm, one after the other in one process.
The protocol is CONTRIBUTING's otherwise: CUDA graphs, interleaved rounds, medians; a replay begins when that of the
process before it is over, and nothing is counted until replays have kept the GPU busy for a second.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

Calls = Mapping[str, Callable[[], object]]
Ready = tuple[dict[str, Any], Calls]
"""What is known of an arm once it is compiled, and what is to be timed of it, by name."""
ROUNDS = 20
SETTLE_S = 1.0


def timed(build: Callable[..., Ready], arms: Sequence[str], *given: Any) -> dict[str, dict[str, Any]]:
    """Of each arm what ``build(arm, *given)`` says, and microseconds of its calls.

    Args:
        build: importable, since it is called in new processes.

    Raises:
        EOFError: an arm's process has failed; its own words are on stderr.
    """
    context = get_context("spawn")
    ends: dict[str, Connection] = {}
    processes = []
    for arm in arms:
        ends[arm], theirs = context.Pipe()
        processes.append(context.Process(target=of_arm, args=(theirs, build, arm, given), daemon=True))
        processes[-1].start()
        theirs.close()
    try:
        found: dict[str, dict[str, Any]] = {arm: end.recv() for arm, end in ends.items()}
        for name in found[arms[0]]["calls"]:
            for arm, us in in_turn(ends, name).items():
                found[arm][name] = us
        for end in ends.values():
            end.send(None)
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.terminate()
    return {arm: {k: v for k, v in made.items() if k != "calls"} for arm, made in found.items()}


def in_turn(ends: Mapping[str, Connection], name: str) -> dict[str, float]:
    """Median microseconds of a call in every process, over rounds that each begins in its turn."""
    samples: dict[str, list[float]] = {arm: [] for arm in ends}
    order = list(ends)
    settled_s = time.perf_counter() + SETTLE_S
    while len(samples[order[0]]) < ROUNDS:
        counts = time.perf_counter() >= settled_s
        for arm in order:
            ends[arm].send(name)
            us = ends[arm].recv()
            if counts:
                samples[arm].append(us)
        order.append(order.pop(0))
    return {arm: statistics.median(us) for arm, us in samples.items()}


def of_arm(parent: Connection, build: Callable[..., Ready], arm: str, given: tuple[Any, ...]) -> None:
    """What an arm's process does: compile, then replay what it is asked for."""
    from tilestream.run import timing

    made, calls = build(arm, *given)
    captured = {name: timing.capture(call) for name, call in calls.items()}
    for one in captured.values():
        timing.replay_us(one.graph)  # the first replay of a graph also uploads it
    parent.send({**made, "calls": list(calls)})
    while (name := parent.recv()) is not None:
        parent.send(timing.replay_us(captured[name].graph) / captured[name].calls)
