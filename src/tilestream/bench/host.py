"""Where the host's time of a call goes: a plain loop without CUDA graphs, eager, Inductor and tilestream, by parts.

A kernel of a few microseconds is bound by what Python does around it. Parts are differences of loops: what Dynamo takes
to check its guards, what AOTAutograd adds, what a region's call takes, and of that its launches.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tilestream.apps.load import Workload
from tilestream.bench import arms
from tilestream.bench.environment import environment
from tilestream.graph.capture import boxed
from tilestream.options import Options
from tilestream.run import operator
from tilestream.run.call import RegionCall

CALLS, ROUNDS = 200, 5
Arms = dict[str, Callable[[], object]]


def run(workload: Workload, options: Options, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Wall microseconds a call of every arm, and of the regions in one call of tilestream's.

    ``eager``, ``inductor`` and ``tilestream`` are what a user's loop sees, each also as ``reduce-overhead``.
    ``dynamo`` and ``aot`` run no kernel at all: what ``torch.compile`` takes before any back end of it does something.
    """
    made: Arms = {}
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        for name, how in _ways(workload, options).items():
            progress(f"compiling {name}")
            # One code object serves every arm: each gets a module of its own, which Dynamo's guards tell apart.
            module = copy.deepcopy(workload.module)
            function = module if how is None else torch.compile(module, dynamic=False, **how)
            made[name] = _call(function, workload)
            for _ in range(20):
                made[name]()
        progress("timing")
        found: dict[str, list[float]] = {name: [] for name in made}
        for _ in range(ROUNDS):
            for name, call in made.items():
                found[name].append(_loop_us(call))
        regions = _regions_us(made["tilestream"]) if workload.tensors[0].is_cuda else []
    return {
        "schema": 1,
        "model": workload.name,
        "rows": workload.rows,
        "environment": environment(),
        "calls": CALLS,
        "us": {name: statistics.median(us) for name, us in found.items()},
        "regions": regions,
    }


def _ways(workload: Workload, options: Options) -> Mapping[str, dict[str, Any] | None]:
    from torch._dynamo.backends.common import aot_autograd

    with torch.no_grad():
        results = pytree.tree_leaves(workload.module(*workload.inputs, **workload.keywords))

    def given(graph: fx.GraphModule) -> list[Any]:
        (output,) = graph.graph.find_nodes(op="output")
        return results[: len(output.args[0])]

    def dynamo(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        made = given(graph)
        return lambda *_: made

    def nothing(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        made = given(graph)
        return boxed(lambda args: args.clear() or made)

    def aot(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return aot_autograd(fw_compiler=nothing, inference_compiler=nothing)(graph, inputs)

    ours = {"backend": arms.backend(), "options": vars(options)}
    ways: dict[str, dict[str, Any] | None] = {"eager": None, "dynamo": {"backend": dynamo}, "aot": {"backend": aot}}
    ways |= {"inductor": {}, "tilestream": ours}
    if workload.tensors[0].is_cuda:
        ways["inductor, reduce-overhead"] = {"mode": "reduce-overhead"}
        ways["tilestream, reduce-overhead"] = {**ours, "options": {**vars(options), "mode": "reduce-overhead"}}
    return ways


def _call(function: Callable[..., object], workload: Workload) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return function(*workload.inputs, **workload.keywords)

    return call


def _loop_us(call: Callable[[], object], calls: int = CALLS) -> float:
    _wait()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    _wait()
    return (time.perf_counter() - start) / calls * 1e6


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _regions_us(call: Callable[[], object]) -> list[float]:
    """Host microseconds of every region's call within one call of the model, until it is enqueued."""
    seen: list[tuple[RegionCall, Sequence[torch.Tensor], Sequence[int]]] = []
    right = RegionCall.__call__

    def noted(self: RegionCall, tensors: Sequence[torch.Tensor], sizes: Sequence[int] = ()) -> list[torch.Tensor]:
        seen.append((self, list(tensors), list(sizes)))
        return right(self, tensors, sizes)

    RegionCall.__call__ = noted
    try:
        call()
    finally:
        RegionCall.__call__ = right
    return [_enqueue_us(region, tensors, sizes) for region, tensors, sizes in seen]


def _enqueue_us(region: RegionCall, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> float:
    """The median over short bursts: the queue of launches must not fill up, or the host waits for the GPU."""
    inputs = (tensors, sizes, operator.text_of(region))
    bursts = []
    for _ in range(20):
        _wait()
        start = time.perf_counter()
        for _ in range(10):
            operator.region(*inputs)
        bursts.append((time.perf_counter() - start) / 10 * 1e6)
    _wait()
    return statistics.median(bursts)
