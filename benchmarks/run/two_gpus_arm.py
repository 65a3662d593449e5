"""What a process of an arm of ``two_gpus.py`` does: compile, and take the times that it is asked for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from copy import deepcopy
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.lib.exchanges import exchanging, step
from benchmarks.lib.turns import Turns
from benchmarks.run.two_gpus_times import Clock, collectives
from tilestream.apps.models import find
from tilestream.bench.environment import environment
from tilestream.run import oracle, prepare, stopwatch
from tilestream.run.backend import tilestream

if TYPE_CHECKING:
    from benchmarks.run.two_gpus import Row, Run

COMPILED: dict[str, dict[str, Any]] = {
    "inductor": {},
    "tilestream": {"backend": tilestream},
}
"""Keywords of ``torch.compile``; eager has none."""


def serve(rank: int, run: Run, parent: Connection) -> None:
    """Answer every word, which is followed by its case, with a part of the row; all processes are told the same.

    Raises:
        RuntimeError: there is no GPU.
    """
    if run.dry:
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        raise RuntimeError(f"process {rank} of {run.gpus} sees no GPU: each needs one of the same host")
    else:
        Turns(Path(run.folder) / f"turn{rank}").take_part()
    meet(run, rank)
    task: Task | None = None
    while (asked := parent.recv()) != "end":
        word, name = asked.rsplit(" ", 1)
        if task is None or task.name != name:
            task = Task(run, rank, name)
        parent.send(task.do(word))
    dist.destroy_process_group()


def meet(run: Run, rank: int) -> None:
    """Join the arm's process group."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(run.port)}
    dist.init_process_group("gloo" if run.dry else "nccl", rank=rank, world_size=run.gpus)


def compiled(run: Run, module: nn.Module) -> nn.Module:
    if (how := COMPILED.get(run.arm)) is None:
        return module
    if run.dry and how:
        how = {**how, "options": {"target": "reference"}}
    return torch.compile(module, dynamic=False, **how)  # type: ignore[return-value]


def mean_gradients(module: nn.Module, inputs: tuple[Tensor, ...], processes: int) -> list[Tensor]:
    """In float64: this process's gradients, then their mean over the processes."""
    wide = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    exact = deepcopy(module).double()
    with oracle.Float64():
        step(exact, exact, wide)
    made = [p.grad for p in exact.parameters() if p.grad is not None]
    for grad in made:
        dist.all_reduce(grad)
    return [grad / processes for grad in made]


def plans() -> dict[str, str]:
    """What this process chose for each region: processes of one arm may choose differently."""
    return {f"{i} {a.name}": a.plan.chosen.name if a.plan else "none" for i, a in enumerate(prepare.analyses())}


class Task:
    """A case as one arm's process has it: the same weights everywhere, a batch of its own, the exact gradients."""

    def __init__(self, run: Run, rank: int, name: str) -> None:
        self.run, self.rank, self.name, self.clock = run, rank, name, Clock(run.dry)
        self.said("has begun")
        self.module, inputs = find(name).make(device=self.device, training=True, seed=0, **run.sizes(name))
        torch.manual_seed(100 + rank)
        self.inputs = tuple(torch.randn_like(x) if x.is_floating_point() else x for x in inputs)
        self.exact = mean_gradients(self.module, self.inputs, run.gpus)
        self.said("has exact gradients")

    @property
    def device(self) -> str:
        return "cpu" if self.run.dry else "cuda"

    def said(self, words: str) -> None:
        self.run.say(f"{self.name}, process {self.rank} {words}")

    def do(self, word: str) -> Row:
        """A piece of work, by ``two_gpus.pieces``."""
        if word in ("compile", "wrap"):
            return self.compile(word == "wrap")
        call = lambda: step(self.function, self.own, self.inputs)  # noqa: E731
        if word == "whole":
            return {"ways": {word: {"us": self.clock.loop_us(call), "error": self.error()}}}
        if word == "alone":
            return {"alone_us": self.clock.loop_us(call)}
        if word == "graph":
            return {"graph_us": self.as_graph(call).get("graph_us")}
        if word == "collectives":
            with exchanging("ddp", self.function, self.own, self.inputs) as call:
                return {"collectives": [] if self.run.dry else collectives(call)}
        way, captured = word.removesuffix(" graph"), word.endswith(" graph")
        with exchanging(way, self.function, self.own, self.inputs, captured) as call:
            made = self.as_graph(call) if captured else {"us": self.clock.loop_us(call), "error": self.error()}
        return {"ways": {way: made}}

    def compile(self, wrapped: bool) -> Row:
        """Make and call the model that is timed next."""
        torch.compiler.reset()  # else a wrapped model and a plain one run what was compiled for the first of them
        self.own = deepcopy(self.module)  # the wrapper leaves hooks on its parameters
        on = None if self.run.dry else [0]
        self.function = compiled(self.run, DistributedDataParallel(self.own, device_ids=on) if wrapped else self.own)
        start = time.perf_counter()
        step(self.function, self.own, self.inputs)
        self.clock.ended()
        first_s = time.perf_counter() - start
        self.said(f"has compiled in {first_s:.1f} s")
        if wrapped:
            return {"first_wrapped_s": first_s}
        parts = {part: round(seconds, 2) for part, seconds in stopwatch.spent().items()}
        return {"first_step_s": first_s, "parts_s": parts, "plans": plans(), "environment": environment()}

    def as_graph(self, call: Callable[[], object]) -> Row:
        """Its time, and the error of gradients that a replay wrote over NaN; empty where it cannot be captured."""
        captured = self.clock.captured(call)
        if captured is None:
            return {}
        made: Row = {"graph_us": self.clock.graph_us(captured.graph)}
        for p in self.own.parameters():
            if p.grad is not None:
                p.grad.fill_(float("nan"))
        captured.graph.replay()
        return made | {"graph_error": self.error()}

    def error(self) -> float:
        """Of the gradients that the module holds."""
        grads = [p.grad for p in self.own.parameters() if p.grad is not None]
        return max(oracle.error(g, e) for g, e in zip(grads, self.exact, strict=True))
