"""Whole blocks and models on few rows through ``torch.compile``: eager, Inductor, max-autotune, tilestream.

    python benchmarks/decoders.py                            blocks (norm, FFN, residual), then models
    python benchmarks/decoders.py blocks --rows 1 128        some numbers of rows; --only gpt2 some of them
    python benchmarks/decoders.py models --layers 2          decoders at batch 1 to 32, BERT, ResNet-50
    python benchmarks/decoders.py models --layers 0          all layers, of decoders also embedding and head
    python benchmarks/decoders.py models --kernels FOLDER    the kernels of one call of every arm, a file each
    python benchmarks/decoders.py blocks --rows 1 --seconds 540              what ends in time
    python benchmarks/decoders.py models --batch 1 32 --layers 2 --seconds 540
    python benchmarks/decoders.py --cpu                      every step at tiny sizes, no GPU: times mean nothing

Needs an H100 or H200, but for ``--cpu``. bf16, random weights and data; every arm a CUDA graph, all arms in turn,
medians. A block goes ``--calls`` times over different weights in one graph, so that those of small blocks are in the L2
and those of large ones are not, as in a model. Decoders take one token of each sequence behind 255 that a static cache
holds. Layers are cut to ``--layers`` (said in the row): all are alike, so ratios stay; ResNet-50 is whole. Errors are
against float64. An arm that would not end in time is left out and said; rows of a case replace those of earlier runs,
models at another depth are another case.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from block_models import BLOCKS, TINY, Bert, Repeated, ResNet
from budget import Budget
from kernel_times import kernels_of
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tilestream.apps import llama
from tilestream.bench.environment import environment
from tilestream.run import prepare
from tilestream.run.backend import tilestream
from tilestream.run.timing import capture, interleaved

RESULTS = Path(__file__).parent / "results"
ROUNDS = 15
ARMS: dict[str, dict[str, Any]] = {
    "inductor": {},
    "tilestream": {"backend": tilestream},
    "max-autotune": {"mode": "max-autotune-no-cudagraphs"},
}
"""The slowest to compile comes last: it is the first to be left out."""
GUESS_S = {"eager": 1.0, "inductor": 10.0, "max-autotune": 50.0, "tilestream": 15.0}
"""What the first call of an arm takes at most, until one was seen: a little more than the longest on an H200's host."""
SOURCES = ("eager", "inductor", "max-autotune")
"""What tilestream is held against: the best of them."""


@dataclass
class Row:
    """One arm of one case: microseconds of one call, error against float64 (of models: against eager)."""

    case: str
    rows: int
    arm: str
    us: float
    error: float
    first_call_s: float
    detail: str = ""


@dataclass(frozen=True)
class Run:
    """What is asked for, and on what."""

    given: argparse.Namespace
    budget: Budget

    @property
    def device(self) -> str:
        return "cpu" if self.given.cpu else "cuda"

    def ready(self, module: nn.Module) -> nn.Module:
        return module.to(self.device).bfloat16().eval()

    def data(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).bfloat16()

    def compiled(self, module: nn.Module, arm: str) -> Callable[..., Any]:
        options: dict[str, Any] = {"options": {"target": "reference"}} if self.given.cpu and arm == "tilestream" else {}
        return torch.compile(module, dynamic=False, **ARMS[arm], **options)

    def times_us(self, name: str, runs: Mapping[str, Callable[[], object]]) -> list[float]:
        """Of one call of each arm: on a GPU captured and in turn, on a CPU a single call."""
        if not self.given.cpu:
            graphs = [capture(run, 1000.0, 20) for run in runs.values()]
            times = [statistics.median(samples) for samples in interleaved(graphs, ROUNDS)]
            for arm, run in runs.items() if self.given.kernels else ():
                file = self.given.kernels / f"{name}, {arm}.txt".replace(" ", "_")
                file.write_text("\n".join(map(str, kernels_of(capture(run, 1.0)))) + "\n", encoding="utf-8")
            return times
        times = []
        for run in runs.values():
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e6)
        return times

    def wait(self) -> None:
        if not self.given.cpu:
            torch.cuda.synchronize()


def measured(case: str, rows: int, module: nn.Module, inputs: tuple[Tensor, ...], run: Run, how: str) -> list[Row]:
    """``module`` in every arm that ends in time, all timed together."""
    calls: dict[str, Callable[..., Any]] = {"eager": module}
    firsts, errors, details = {"eager": 0.0}, {}, dict.fromkeys(run.given.arms, how)
    torch._dynamo.reset()  # here alone: it would drop what an arm before has compiled
    with torch.no_grad():
        want = pytree.tree_leaves(module(*inputs))[0].double()
        if isinstance(module, Repeated):
            exact = module.exact(*inputs)
            errors["eager"] = error(want, exact)
            want = exact
        for arm in run.given.arms:
            if arm == "eager":
                continue
            if not run.budget.affords(arm, GUESS_S[arm]):
                print(f"{case} {rows} rows: {arm} left out, {run.budget.left_s:.0f} s are left", flush=True)
                continue
            before, start = len(prepare.analyses()), time.perf_counter()
            with run.budget.step(arm):
                calls[arm] = run.compiled(module, arm)
                got = pytree.tree_leaves(calls[arm](*inputs))[0]
                run.wait()
            firsts[arm] = time.perf_counter() - start
            errors[arm] = error(got, want)
            if arm == "tilestream":
                details[arm] = how + "; ".join(chosen(before))
        runs = {arm: lambda call=call: call(*inputs) for arm, call in calls.items()}
        times = run.times_us(f"{case} {rows}", runs)
    count = module.calls if isinstance(module, Repeated) else 1
    made = [
        Row(case, rows, arm, us / count, errors.get(arm, 0.0), firsts[arm], details.get(arm, ""))
        for arm, us in zip(calls, times, strict=True)
    ]
    best = min(r.us for r in made if r.arm in SOURCES)
    for r in sorted(made, key=lambda r: r.us):
        print(
            f"{case:14} {rows:5} rows {r.us:9.2f} us  x{best / r.us:.2f}  {r.error:.1e}  {r.arm} {r.detail}", flush=True
        )
    return made


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def chosen(since: int) -> list[str]:
    """What the planner took for each region that was compiled since then, with its candidates' times."""
    found = []
    for region in prepare.analyses()[since:]:
        plan = region.plan
        if plan is None:
            found.append(region.problem)
            continue
        times = ", ".join(f"{c.name} {c.measured_us:.1f}" for c in plan.candidates if c.measured_us is not None)
        found.append(f"{plan.chosen.name} of [{times}]")
    return list(dict.fromkeys(found))


def wanted(name: str, run: Run) -> bool:
    return not run.given.only or name in run.given.only


def blocks(run: Run) -> Iterator[list[Row]]:
    sizes = TINY if run.given.cpu else BLOCKS
    for rows in run.given.rows:
        for name in filter(lambda n: wanted(n, run), BLOCKS):
            torch.manual_seed(0)
            module = run.ready(Repeated(sizes[name], run.given.calls))
            x = run.data(rows, sizes[name].width)
            yield guarded(name, rows, module, (x,), run, f"{run.given.calls} blocks; ")


DECODERS = {
    "qwen3-0.6b": llama.Sizes(
        layers=28, width=1024, hidden=3072, heads=16, kv_heads=8, vocabulary=151_936, head_features=128, head_norms=True
    ),
    "llama-3.2-1b": llama.Sizes(layers=16, width=2048, hidden=8192, heads=32, kv_heads=8),
}
CONTEXT = 255
TINY_DECODER = llama.Sizes(layers=3, width=48, hidden=520, heads=4, kv_heads=2, vocabulary=600)
BERT_LAYERS = 12


def decoder(name: str, batch: int, run: Run) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A decoder of ``--layers`` layers, whole with 0, and a token of each sequence with full caches."""
    whole = replace(TINY_DECODER, context=7) if run.given.cpu else replace(DECODERS[name], context=CONTEXT)
    s = replace(whole, batch=batch, tokens=1, sdpa=True)
    if run.given.layers:
        s = replace(s, layers=run.given.layers, layers_only=True)
    values = [v.to(run.device) for v in llama.inputs(s)]
    inputs = tuple(v.bfloat16() if v.is_floating_point() else v for v in values)
    with torch.device(run.device):
        return llama.module(s).bfloat16().eval(), inputs


def models(run: Run) -> Iterator[list[Row]]:
    depth = run.given.layers
    suffix, how = ("", f"{depth} layers; ") if depth else (", whole", "all layers; ")
    for batch in run.given.batch:
        for name in filter(lambda n: wanted(n, run), DECODERS):
            torch.manual_seed(0)
            module, inputs = decoder(name, batch, run)
            yield guarded(f"decode {name}{suffix}", batch, module, inputs, run, how)
        if wanted("bert-base", run) and batch in (1, 32):
            sizes, tokens = (TINY if run.given.cpu else BLOCKS)["bert-base"], 8 if run.given.cpu else 128
            module = run.ready(Bert(depth or BERT_LAYERS, sizes))
            x = run.data(batch, tokens, sizes.width)
            yield guarded(f"encode bert-base{suffix}", batch * tokens, module, (x,), run, how)
        if wanted("resnet-50", run) and batch in (1, 32):
            made = ResNet((1, 1), 8) if run.given.cpu else ResNet()
            module = run.ready(made).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
            edge = 32 if run.given.cpu else 224
            x = run.data(batch, 3, edge, edge).to(memory_format=torch.channels_last)
            yield guarded("resnet-50", batch, module, (x,), run, "all layers, channels last; ")


def guarded(case: str, rows: int, module: nn.Module, inputs: tuple[Tensor, ...], run: Run, how: str) -> list[Row]:
    """A case that fails costs no other; one that would not end in time is left out."""
    if not run.budget.affords("case", 10.0):
        print(f"{case} {rows} rows: left out, {run.budget.left_s:.0f} s are left", flush=True)
        return []
    try:
        return measured(case, rows, module, inputs, run, how)
    except Exception as failure:
        print(f"{case} {rows} rows FAILED: {type(failure).__name__}: {failure}", flush=True)
        return []


def merged(before: Sequence[dict[str, Any]], made: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows of earlier runs, but for the cases that were timed anew."""
    again = {(r.case, r.rows) for r in made}
    return [r for r in before if (r["case"], r["rows"]) not in again] + [asdict(r) for r in made]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["blocks", "models"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--layers", type=int, default=4, help="0: all of them")
    parser.add_argument("--calls", type=int, default=2)
    parser.add_argument("--arms", nargs="+", default=["eager", *ARMS])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="leave out what would end later")
    parser.add_argument("--kernels", type=Path, help="a folder for the kernels of a call, arm by arm")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the reference machine")
    parser.add_argument("--out", type=Path, default=RESULTS / "decoders.json")
    given = parser.parse_args(words)
    run = Run(given, Budget(given.seconds))
    before = json.loads(given.out.read_text(encoding="utf-8"))["rows"] if given.out.exists() else []
    made: list[Row] = []
    for part in given.parts:
        for found in {"blocks": blocks, "models": models}[part](run):
            made += found
            text = json.dumps({"environment": environment(), "rows": merged(before, made)}, indent=1)
            given.out.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
