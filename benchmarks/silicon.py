"""Time single kernels on the GPU that is there: what the simulator's predictions are held against (``truth.py``).

    python benchmarks/silicon.py                 everything, about a minute and a half on an H200
    python benchmarks/silicon.py --quick         every third case
    python benchmarks/silicon.py --out FILE      instead of benchmarks/results/silicon.json

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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

OUT = Path(__file__).parent / "results" / "silicon.json"
BF16 = torch.bfloat16
ROUNDS = 15
BURST_US = 1500.0
MOST_CALLS = 160
BUDGET_S = 92.0

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One kernel. ``shape`` is what a model of it needs; ``make`` gives a call on its own tensors, and their bytes."""

    name: str
    kind: str
    shape: dict[str, int | str]
    make: Callable[[], tuple[Call, int]]


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


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def size(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def call(function: Callable[..., Tensor], *inputs: Tensor, **words: Any) -> tuple[Call, int]:
    out = function(*inputs, **words)
    return lambda: function(*inputs, **words), size(*inputs, out)


def linears() -> Iterator[Case]:
    shapes = [
        (262144, 256, 256),
        (65536, 256, 256),
        (16384, 256, 256),
        (262144, 128, 128),
        (32768, 384, 128),
        (262144, 384, 128),
        (65536, 1536, 512),
        (65536, 512, 512),
        (16384, 512, 512),
        (2048, 512, 256),
        (2048, 479, 1024),
        (2048, 1024, 1024),
        (32768, 1024, 1024),
        (1024, 4096, 4096),
        (1024, 4096, 1024),
        (1024, 4096, 14336),
        (1024, 14336, 4096),
        (8192, 4096, 4096),
        (1, 4096, 4096),
        (1, 4096, 14336),
        (16, 4096, 14336),
        (64, 4096, 4096),
        (128, 1024, 1024),
        (4096, 2048, 2048),
        (10242, 1024, 512),
        (81900, 1536, 512),
    ]
    for m, k, n in shapes:
        shape: dict[str, int | str] = {"m": m, "k": k, "n": n}
        yield Case(
            f"linear {m}x{k}x{n}",
            "linear",
            shape,
            lambda m=m, k=k, n=n: call(F.linear, randn(m, k), randn(n, k), randn(n)),
        )


def matmuls() -> Iterator[Case]:
    for s in (256, 512, 1024, 2048, 3072, 4096, 6144, 8192):
        shape: dict[str, int | str] = {"m": s, "k": s, "n": s}
        yield Case(f"matmul {s}", "matmul", shape, lambda s=s: call(torch.mm, randn(s, s), randn(s, s)))
    for k, m, n in ((65536, 256, 256), (262144, 128, 128), (2048, 1024, 1024), (16384, 512, 512), (65536, 512, 1536)):
        shape = {"m": m, "k": k, "n": n}
        yield Case(
            f"weight gradient {m}x{k}x{n}",
            "matmul",
            shape | {"layout": "tn"},
            lambda m=m, k=k, n=n: call(lambda dy, x: dy.t() @ x, randn(k, m), randn(k, n)),
        )
    for b, m, k, n in ((32, 1024, 128, 1024), (32, 1024, 1024, 128), (2048, 27, 128, 27), (512, 128, 128, 128)):
        shape = {"b": b, "m": m, "k": k, "n": n}
        yield Case(
            f"bmm {b}x{m}x{k}x{n}",
            "bmm",
            shape,
            lambda b=b, m=m, k=k, n=n: call(torch.bmm, randn(b, m, k), randn(b, k, n)),
        )


def elementwise() -> Iterator[Case]:
    unary: dict[str, Callable[..., Tensor]] = {
        "relu": F.relu,
        "gelu": F.gelu,
        "silu": F.silu,
        "sigmoid": torch.sigmoid,
        "exp": torch.exp,
        "clone": torch.clone,
    }
    binary: dict[str, Callable[..., Tensor]] = {
        "add": torch.add,
        "mul": torch.mul,
        "relu_backward": lambda dy, y: torch.ops.aten.threshold_backward(dy, y, 0),
        "gelu_backward": torch.ops.aten.gelu_backward,
    }
    for name, function, inputs in [(n, f, 1) for n, f in unary.items()] + [(n, f, 2) for n, f in binary.items()]:
        small = (2**16, 2**20, 2**23) if name in ("relu", "add") else ()
        for n in (*small, 2**22, 2**26):
            yield Case(
                f"{name} {n}",
                "elementwise",
                {"op": name, "elements": n, "inputs": inputs},
                lambda f=function, n=n, i=inputs: call(f, *(randn(n) for _ in range(i))),
            )


def reductions() -> Iterator[Case]:
    for rows, features in ((262144, 128), (65536, 512), (8192, 4096), (1024, 4096), (32768, 1024)):
        shape: dict[str, int | str] = {"rows": rows, "features": features}
        yield Case(
            f"layer_norm {rows}x{features}",
            "reduction",
            shape | {"op": "layer_norm"},
            lambda r=rows, f=features: call(
                lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b), randn(r, f), randn(f), randn(f)
            ),
        )
        yield Case(
            f"softmax {rows}x{features}",
            "reduction",
            shape | {"op": "softmax"},
            lambda r=rows, f=features: call(torch.softmax, randn(r, f), dim=-1),
        )
    for rows, features in ((262144, 256), (65536, 1024), (2048, 1024), (8192, 4096)):
        for dim, name in ((0, "sum_rows"), (1, "sum_features")):
            yield Case(
                f"{name} {rows}x{features}",
                "reduction",
                {"op": name, "rows": rows, "features": features},
                lambda r=rows, f=features, d=dim: call(torch.sum, randn(r, f), dim=d),
            )


def movement() -> Iterator[Case]:
    def gather(nodes: int, edges: int, f: int) -> tuple[Call, int]:
        table, index = randn(nodes, f), torch.randint(nodes, (edges,), device="cuda")
        return lambda: table.index_select(0, index), size(table, index) + edges * f * 2

    def scatter(nodes: int, edges: int, f: int) -> tuple[Call, int]:
        values, index = randn(edges, f), torch.randint(nodes, (edges,), device="cuda")
        out = torch.zeros(nodes, f, device="cuda", dtype=BF16)
        return lambda: out.index_add_(0, index, values), size(values, index, out)

    for nodes, edges, f in ((10242, 81900, 512), (1900, 11000, 128), (40962, 327660, 512)):
        shape: dict[str, int | str] = {"nodes": nodes, "edges": edges, "features": f}
        yield Case(f"gather {edges}x{f}", "gather", shape, lambda n=nodes, e=edges, f=f: gather(n, e, f))
        yield Case(f"scatter {edges}x{f}", "scatter", shape, lambda n=nodes, e=edges, f=f: scatter(n, e, f))
    for rows, a, b in ((262144, 256, 63), (65536, 512, 512), (2048, 128, 351)):
        yield Case(
            f"cat {rows}x{a}+{b}",
            "cat",
            {"rows": rows, "a": a, "b": b},
            lambda r=rows, a=a, b=b: call(lambda x, y: torch.cat([x, y], -1), randn(r, a), randn(r, b)),
        )
    for rows, columns in ((8192, 8192), (1024, 4096)):
        yield Case(
            f"transpose {rows}x{columns}",
            "transpose",
            {"rows": rows, "columns": columns},
            lambda r=rows, c=columns: call(lambda x: x.t().contiguous(), randn(r, c)),
        )
    for heads, tokens, width in ((32, 1024, 128), (32, 4096, 128), (16, 512, 64)):
        yield Case(
            f"sdpa {heads}x{tokens}x{width}",
            "sdpa",
            {"heads": heads, "tokens": tokens, "width": width},
            lambda h=heads, t=tokens, w=width: call(
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
                *(randn(1, h, t, w) for _ in range(3)),
            ),
        )


def empty() -> Iterator[Case]:
    yield Case("one element", "launch", {}, lambda: call(lambda x: x.add_(1), randn(1)))


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
    if sets <= MOST_CALLS and case.kind != "launch":
        runs = [run, *(case.make()[0] for _ in range(max(sets, 2) - 1))]
        calls = len(runs) * max(1, math.ceil(min(calls, MOST_CALLS) / len(runs)))
        kept: dict[int, object] = {}

        def turn(i: int) -> None:
            kept[i % len(runs)] = runs[i % len(runs)]()

        rows.append(Row(case.name, case.kind, case.shape, "cold", *timed(calls, turn), moved, calls))
    return rows


OURS = [
    ("chain", 262144, "vertical"),
    ("chain", 65536, "vertical"),
    ("chain", 16384, "vertical"),
    ("chain", 262144, "spatial"),
    ("chain", 65536, "spatial"),
    ("nerf", 262144, "vertical"),
    ("nerf", 16384, "vertical"),
    ("nerf", 262144, "spatial"),
    ("meshgraphnets", 262144, "vertical"),
    ("meshgraphnets", 32768, "vertical"),
    ("meshgraphnets", 262144, "spatial"),
    ("autoencoder", 131072, "vertical"),
    ("mixer", 131072, "vertical"),
    ("two_tower", 131072, "vertical"),
    ("gated_ffn", 131072, "vertical"),
    ("dlrm_bottom", 65536, "spatial"),
]


def ours(model: str, rows: int, strategy: str) -> Row:
    """A pipeline of tilestream's, and what ran: its IR goes into the file, so that it can be simulated as it is."""
    from tilestream import runtime
    from tilestream.apps import APPS
    from tilestream.bench import arms
    from tilestream.errors import PlanError
    from tilestream.options import parse
    from tilestream.serialise import pipeline_to_json

    torch.compiler.reset()
    before = len(runtime.analyses())
    module, inputs = APPS[model].make(rows, device="cuda")
    options = parse({"strategy": strategy, "measure": False, "fallback": True})
    arm = arms.make("tilestream", module, inputs, options)
    regions = runtime.analyses()[before:]
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


def report(row: Row) -> None:
    print(f"{row.name:34s} {row.state:5s} {row.us:10.2f} us  {row.bytes / row.us / 1e6:7.2f} TB/s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--quick", action="store_true", help="every third case")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds; what is left over is not measured")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing to measure", file=sys.stderr)
        return 1
    started = time.perf_counter()
    torch.manual_seed(0)
    properties = torch.cuda.get_device_properties(0)
    rows: list[Row] = []
    failed: dict[str, str] = {}

    def attempt(name: str, work: Callable[[], list[Row]]) -> None:
        if time.perf_counter() - started > given.budget:
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

    every = 3 if given.quick else 1
    cases = [*empty(), *linears(), *matmuls(), *elementwise(), *reductions(), *movement()]
    share = given.budget * 0.5  # the rest is for tilestream's own
    with torch.no_grad():
        for case in cases[::every]:
            if time.perf_counter() - started > share:
                failed[case.name] = "not measured: out of time"
                continue
            attempt(case.name, lambda case=case: measure(case, properties.L2_cache_size))
            torch.cuda.empty_cache()
        print(f"PyTorch's kernels: {time.perf_counter() - started:.0f} s", flush=True)
        for model, count, strategy in OURS[::every]:
            attempt(f"{model} {strategy} {count}", lambda m=model, c=count, s=strategy: [ours(m, c, s)])
    data = {
        "schema": 1,
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
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(data, indent=1) + "\n")
    print(f"{len(rows)} rows, {len(failed)} failed, {data['seconds']:.0f} s: {given.out}")
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
