"""Times of steps that several processes take together: every process does the same number of everything."""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tilestream.run import timing

ROUNDS, STEPS = 7, 10
SETTLE_S = 0.4
"""Replays of a graph until the clocks of a GPU that has waited are up."""
Call = Callable[[], object]


class Clock:
    """Of one process; ``dry``: on the CPU, one round."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry

    def ended(self) -> None:
        """Wait for the GPU."""
        if not self.dry:
            torch.cuda.synchronize()

    def loop_us(self, call: Call, rounds: int = ROUNDS) -> float:
        """Median microseconds of a call, all processes in step; the first round does not count."""
        samples = [self._round_us(call) for _ in range(1 + (1 if self.dry else rounds))]
        return statistics.median(samples[1:])

    def captured(self, call: Call) -> timing.Captured | None:
        """A CUDA graph of one call; None on the CPU, and where it cannot be captured, which is said."""
        if self.dry:
            return None
        try:
            return timing.capture(call, most_calls=1)
        except RuntimeError as error:  # the other times stand
            print(f"no CUDA graph: {error}", flush=True)
            return None

    def graph_us(self, graph: torch.cuda.CUDAGraph) -> float:
        """Median microseconds of a replay, all processes in step, once the clocks are up."""
        rounds = torch.tensor(math.ceil(SETTLE_S * 1e6 / STEPS / self._round_us(graph.replay)), device="cuda")
        dist.all_reduce(rounds, op=dist.ReduceOp.MAX)
        for _ in range(int(rounds)):
            self._round_us(graph.replay)
        return self.loop_us(graph.replay, 2 * ROUNDS)

    def _round_us(self, call: Call) -> float:
        dist.barrier()
        self.ended()
        start = time.perf_counter()
        for _ in range(STEPS):
            call()
        self.ended()
        return (time.perf_counter() - start) / STEPS * 1e6


def collectives(call: Call) -> list[dict[str, Any]]:
    """NCCL's kernels in one call of several: name, CTAs, and microseconds, which the wait for the others is part of."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        return kernels_of_nccl(json.loads(path.read_text())["traceEvents"])


def kernels_of_nccl(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of a trace, in order."""
    mine = [e for e in events if e.get("cat") == "kernel" and e["name"].startswith("nccl")]
    return [
        {"name": e["name"].split("(")[0], "ctas": e["args"]["grid"][0], "us": e["dur"]}
        for e in sorted(mine, key=lambda e: e["ts"])
    ]
