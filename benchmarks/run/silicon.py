"""Time single kernels on the GPU that is there: what the simulator's predictions are held against (``truth.py``).

    python -m benchmarks.run.silicon                  everything, about a minute and a half on an H200
    python -m benchmarks.run.silicon --set validation  other sizes and other models, which no constant was fitted on
    python -m benchmarks.run.silicon --set widths     GEMMs whose rows are no multiple of 16 bytes, and their neighbours
    python -m benchmarks.run.silicon --set others     reductions, gathers, scatters, concatenations, copies
    python -m benchmarks.run.silicon --set backward   gradients of tables, of indices, of LayerNorm
    python -m benchmarks.run.silicon --set indexed    rows by an index: gathers, atomics of Inductor's and of PyTorch's
    python -m benchmarks.run.silicon --set fresh      the fresh set's kernels and pipelines, drawn by a seed, for once
    python -m benchmarks.run.silicon --kernels        which kernel cuBLAS takes for each GEMM of all sets, by name
    python -m benchmarks.run.silicon --quick          every third case
    python -m benchmarks.run.silicon --compile 2/8    compile what the third of eight processes has, and time nothing
    python -m benchmarks.run.silicon --out FILE       instead of benchmarks/results/silicon.json (silicon_SET.json)

PyTorch's own kernels (cuBLAS, elementwise, reductions, gathers) one at a time, and tilestream's vertical and spatial
pipelines. bf16, random data. A time is the median over rounds of one CUDA graph replay of several calls, between two
events, divided by the calls: launch gaps are part of it, as they are in a model. ``warm`` repeats one set of tensors;
``cold`` goes round sets that are together over twice the L2, so that every call finds its data in DRAM.
A case that fails is reported in the file and does not stop the others.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib import fresh_cases
from benchmarks.lib.places import RESULTS
from benchmarks.lib.silicon_cases import OURS, OURS_VALIDATION, Call, Case, cases, model_of, size
from benchmarks.lib.silicon_indexed import indexed
from benchmarks.lib.silicon_more import SETS as MORE
from tilestream.bench.environment import environment

SETS = {**MORE, "indexed": indexed, "fresh": fresh_cases.kernels}
WARM_ONLY = ("launch", "indexed")
"""Kinds whose operands are the same in every call."""
ROUNDS = 15
BURST_US = 1500.0
MOST_CALLS = 160
BUDGET_S = 92.0


@dataclass
class Row:
    """Microseconds a call: median and extremes. ``bytes`` are those of the operands, read and written once."""

    name: str
    kind: str
    shape: dict[str, Any]
    state: str
    us: float
    us_min: float
    us_max: float
    bytes: int
    calls: int
    extra: dict[str, Any] = field(default_factory=dict)


def capture(calls: int, function: Callable[[int], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            function(i)
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, calls: int, rounds: int) -> list[float]:
    taken = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) * 1000 / calls)
    return taken


def timed(calls: int, function: Callable[[int], object]) -> tuple[float, float, float]:
    graph = capture(calls, function)
    replay_us(graph, calls, 2)
    taken = replay_us(graph, calls, ROUNDS)
    return statistics.median(taken), min(taken), max(taken)


def estimate_us(function: Call) -> float:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = capture(4, lambda _: function())
    replay_us(graph, 4, 1)
    return min(replay_us(graph, 4, 2))


def measure(case: Case, l2_bytes: int) -> list[Row]:
    """Warm, and cold where the sets that fit into one graph are over twice the L2."""
    run, moved = case.make()
    one = max(0.5, estimate_us(run))
    calls = max(2, min(MOST_CALLS, math.ceil(BURST_US / one)))
    rows = [Row(case.name, case.kind, case.shape, "warm", *timed(calls, lambda _: run()), moved, calls)]
    sets = math.ceil(2.2 * l2_bytes / moved) if moved else MOST_CALLS + 1
    if sets <= MOST_CALLS and case.kind not in WARM_ONLY:
        runs = [run, *(case.make()[0] for _ in range(max(sets, 2) - 1))]
        calls = len(runs) * max(1, math.ceil(min(calls, MOST_CALLS) / len(runs)))
        kept: dict[int, object] = {}

        def turn(i: int) -> None:
            kept[i % len(runs)] = runs[i % len(runs)]()

        rows.append(Row(case.name, case.kind, case.shape, "cold", *timed(calls, turn), moved, calls))
    return rows


def ours(model: str, rows: int, strategy: str) -> Row:
    """A pipeline of tilestream's, and what ran: its IR goes into the file, so that it can be simulated as it is."""
    from tilestream.bench import arms
    from tilestream.errors import PlanError
    from tilestream.ir.serialise import pipeline_to_json
    from tilestream.options import parse
    from tilestream.run import prepare

    torch.compiler.reset()
    before = len(prepare.analyses())
    module, inputs = model_of(model, rows)
    options = parse({"strategy": strategy, "measure": False, "fallback": True})
    arm = arms.make("tilestream", module, inputs, options)
    regions = prepare.analyses()[before:]
    pipelines = [r.plan.chosen.pipeline for r in regions if r.plan is not None]
    if len(pipelines) != len(regions) or not pipelines or any(p is None for p in pipelines):
        raise PlanError(f"{model} has no {strategy} pipeline", "; ".join(r.problem for r in regions))
    one = max(1.0, estimate_us(arm.run))
    calls = max(2, min(64, math.ceil(BURST_US / one)))
    extra = {
        "strategy": strategy,
        "compile_s": arm.compile_s,
        "pipelines": [pipeline_to_json(p) for p in pipelines if p is not None],
    }
    return Row(
        f"{model} {strategy} {rows}",
        "pipeline",
        {"model": model, "rows": rows, "strategy": strategy},
        "warm",
        *timed(calls, lambda _: arm.run()),
        size(*inputs),
        calls,
        extra,
    )


def compile_part(chosen: Sequence[Case], ours_too: Sequence[tuple[str, int, str]], part: str) -> None:
    """Run every case of a share once: what it compiles is found on disk by the process that times it."""
    number, of = map(int, part.split("/"))
    with torch.no_grad():
        for work in [*(case.make for case in chosen), *(partial(ours, *one) for one in ours_too)][number::of]:
            try:
                work()
            except Exception as failure:  # the process that times says so
                print(f"{type(failure).__name__}: {failure}", file=sys.stderr)
            torch.cuda.empty_cache()


def report(row: Row) -> None:
    print(f"{row.name:34s} {row.state:5s} {row.us:10.2f} us  {row.bytes / row.us / 1e6:7.2f} TB/s", flush=True)


def kernels_of(chosen: Sequence[Case]) -> dict[str, list[str]]:
    """The kernels that each case launches, by the names that the profiler gives them."""
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for case in chosen:
            run, _ = case.make()
            with record_function(f"case {case.name}"):
                run()
        torch.cuda.synchronize()
    found: dict[str, list[str]] = {}
    for event in seen.events() or ():
        if event.name.startswith("case ") and event.device_type.name == "CPU":
            found[event.name.removeprefix("case ")] = launched(event)
    return found


def launched(event: Any) -> list[str]:
    """Names of the kernels of a profiler's event and of those inside of it."""
    return [k.name for k in event.kernels] + [name for child in event.cpu_children for name in launched(child)]


def measured(chosen: Sequence[Case], ours_too: Sequence[tuple[str, int, str]], budget_s: float) -> dict[str, Any]:
    """All cases: rows, and what failed or was left out."""
    started = time.perf_counter()
    properties = torch.cuda.get_device_properties(0)
    rows: list[Row] = []
    failed: dict[str, str] = {}

    def attempt(name: str, work: Callable[[], list[Row]], until_s: float) -> None:
        if time.perf_counter() - started > until_s:
            failed[name] = "not measured: out of time"
            return
        try:
            found = work()
        except Exception as failure:  # one kernel must not cost the others; the file says what failed
            failed[name] = f"{type(failure).__name__}: {failure}"
            print(f"{name:34s} failed: {failed[name][:200]}", flush=True)
            return
        rows.extend(found)
        for row in found:
            report(row)

    with torch.no_grad():
        share = budget_s * (0.5 if ours_too else 1.0)  # the rest is for tilestream's own
        for case in chosen:
            attempt(case.name, lambda case=case: measure(case, properties.L2_cache_size), share)
            torch.cuda.empty_cache()
        print(f"PyTorch's kernels: {time.perf_counter() - started:.0f} s", flush=True)
        for model, count, strategy in ours_too:
            attempt(f"{model} {strategy} {count}", lambda m=model, c=count, s=strategy: [ours(m, c, s)], budget_s)
    return {
        "schema": 2,
        "environment": environment(),
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "seconds": time.perf_counter() - started,
        "protocol": {
            "statistic": f"median over {ROUNDS} rounds of one CUDA graph replay of several calls, divided by the calls",
            "warm": "every call has the same tensors",
            "cold": "calls go round sets of tensors over twice the size of the L2",
        },
        "rows": [asdict(row) for row in rows],
        "failed": failed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--set", choices=("validation", *SETS), help="another set of cases")
    parser.add_argument("--kernels", action="store_true", help="names of the kernels of all GEMMs; nothing is timed")
    parser.add_argument("--compile", metavar="PART/OF", help="compile a share of the cases, and time nothing")
    parser.add_argument("--quick", action="store_true", help="every third case")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds; what is left over is not measured")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing to measure", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    if given.kernels:
        every = [*cases(False), *cases(True), *SETS["widths"]()]
        with torch.no_grad():
            names = kernels_of([c for c in every if c.kind in ("linear", "matmul", "bmm")])
        data = {"schema": 1, "environment": environment(), "kernels": names}
        out = given.out or RESULTS / "silicon_kernels.json"
        told = f"{len(names)} GEMMs"
    else:
        step = 3 if given.quick else 1
        chosen = SETS[given.set]() if given.set in SETS else cases(given.set == "validation")
        ours_too = () if given.set in SETS else OURS_VALIDATION if given.set else OURS
        if given.set == "fresh":
            ours_too = fresh_cases.pipelines()
        if given.compile:
            compile_part(chosen, ours_too, given.compile)
            return 0
        data = measured(chosen[::step], ours_too[::step], given.budget)
        out = given.out or RESULTS / (f"silicon_{given.set}.json" if given.set else "silicon.json")
        told = f"{len(data['rows'])} rows, {len(data['failed'])} failed, {data['seconds']:.0f} s"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(data, indent=1) + "\n")
    print(f"{told}: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
