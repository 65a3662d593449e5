"""Whole blocks and models on few rows through ``torch.compile``: eager, Inductor, max-autotune, tilestream.

    python -m benchmarks.run.decoders                               blocks (norm, FFN, residual), then models
    python -m benchmarks.run.decoders blocks --rows 1 128           some numbers of rows; --only gpt2 some of them
    python -m benchmarks.run.decoders models --layers 2             decoders at batch 1 to 32, BERT, ResNet-50
    python -m benchmarks.run.decoders models --layers 0             all layers, of decoders also embedding and head
    python -m benchmarks.run.decoders models --kernels FOLDER       the kernels of one call of every arm, a file each
    python -m benchmarks.run.decoders models --side-by-side qwen3-0.6b:1 bert-base:32 --seconds 300  cases at once
    python -m benchmarks.run.decoders blocks --rows 1 --seconds 540  what ends in time
    python -m benchmarks.run.decoders models --batch 1 32 --layers 2 --seconds 540
    python -m benchmarks.run.decoders --cpu                         every step at tiny sizes, no GPU: times mean nothing

Needs an H100 or H200, but for ``--cpu``. bf16, random weights and data; every arm a CUDA graph, all arms in turn,
medians. A block goes ``--calls`` times over different weights in one graph, so that those of small blocks are in the L2
and those of large ones are not, as in a model. Decoders take one token of each sequence behind 255 that a static cache
holds. Layers are cut to ``--layers`` (said in the row): all are alike, so ratios stay; ResNet-50 is whole. Errors are
against float64. An arm that would not end in time is left out and said; rows of a case replace those of earlier runs,
models at another depth are another case. Side by side, each case has a process of its own and another for each arm that
takes minutes to compile; they take turns at the GPU, and first calls are as long as that makes them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import lzma
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.lib.block_models import BLOCKS, TINY, Bert, Repeated, ResNet
from benchmarks.lib.budget import Budget
from benchmarks.lib.kernel_times import kernels_of
from benchmarks.lib.places import RESULTS
from benchmarks.lib.turns import Turns
from benchmarks.run import side_by_side
from tilestream.apps import llama
from tilestream.bench.environment import environment
from tilestream.run import prepare
from tilestream.run.backend import tilestream
from tilestream.run.timing import capture, interleaved

ROUNDS = 15
TUNED = "max-autotune-no-cudagraphs"
ARMS: dict[str, dict[str, Any]] = {
    "inductor": {},
    "tilestream": {"backend": tilestream},
    "tilestream, library's attention": {"backend": tilestream, "options": {"attention": False}},
    "tilestream, no early launch": {"backend": tilestream, "options": {"early_launch": False}},
    "tilestream, neither": {"backend": tilestream, "options": {"attention": False, "early_launch": False}},
    "tilestream, combo kernels": {"backend": tilestream, "options": {"combo_kernels": True}},
    "tilestream, dependent Triton kernels": {"backend": tilestream, "options": {"triton.enable_pdl": True}},
    "tilestream, max-autotune": {"backend": tilestream, "options": {"mode": TUNED}},
    "max-autotune": {"mode": TUNED},
}
"""The slowest to compile comes last: it is the first to be left out. With an option of ours only where asked for."""
USUAL = ["eager", "inductor", "tilestream", "max-autotune"]
GUESS_S = {"eager": 1.0, "inductor": 10.0, "max-autotune": 50.0, "tilestream": 15.0}
"""What the first call of an arm takes at most, until one was seen: a little more than the longest on an H200's host."""
LOADED_S = 5.0
"""The same where Inductor's caches have the arm."""
ANOTHER_RUN = "another run; "
NOT_ALONE = "compiled beside others; "
LOADED = "tuned in another run, loaded from its caches; "
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
        wanted = dict(ARMS[arm])
        if self.given.cpu and is_ours(arm):
            wanted["options"] = {"target": "reference"}
        return torch.compile(module, dynamic=False, **wanted)

    def turn(self) -> contextlib.AbstractContextManager[None]:
        """Alone on the GPU, where other processes use it too."""
        return Turns(self.given.turns).turn() if self.given.turns else contextlib.nullcontext()

    def times_us(self, name: str, runs: Mapping[str, Callable[[], object]]) -> tuple[list[float], list[Tensor]]:
        """Of one call of each arm: on a GPU captured and in turn, on a CPU a single call; and their last results."""
        if not self.given.cpu:
            graphs = [capture(run, 1000.0, 20) for run in runs.values()]
            with self.turn():
                times = [statistics.median(samples) for samples in interleaved(graphs, ROUNDS)]
            last = [pytree.tree_leaves(graph.outputs)[0] for graph in graphs]
            for arm, run in runs.items() if self.given.kernels else ():
                file = self.given.kernels / f"{name}, {arm}.txt".replace(" ", "_")
                if not file.exists():
                    file.write_text("\n".join(map(str, kernels_of(capture(run, 1.0)))) + "\n", encoding="utf-8")
            return times, last
        times, last = [], []
        for run in runs.values():
            start = time.perf_counter()
            last.append(pytree.tree_leaves(run())[0])
            times.append((time.perf_counter() - start) * 1e6)
        return times, last

    @property
    def beside(self) -> str:
        return NOT_ALONE if self.given.turns else ""

    def waits_for(self, arm: str) -> bool:
        """Whether another process compiles this arm."""
        return bool(self.given.elsewhere) and arm in side_by_side.SLOW and not self.given.compile_only

    def compiled_elsewhere_s(self, arm: str) -> float | None:
        """Seconds that another process took to compile an arm, 0 where this one is to; None where it ends too late."""
        if self.waits_for(arm):
            return side_by_side.Elsewhere(self.given.elsewhere).wait(arm, lambda: self.budget.left_s)
        guess_s = LOADED_S if self.is_kept(arm) else GUESS_S.get(arm, GUESS_S["tilestream"])
        return 0.0 if self.budget.affords(arm, guess_s) else None

    def tell(self, arm: str, first_call_s: float) -> None:
        """Tell the process that waits for an arm that it is there."""
        if self.given.compile_only:
            side_by_side.Elsewhere(self.given.elsewhere).say(arm, first_call_s)

    def caches(self, arm: str) -> Path | None:
        """The file of Inductor's caches for an arm of the one model that this process has."""
        g = self.given
        if not g.caches or len(g.only) != 1 or len(g.batch) != 1:
            return None
        return g.caches / f"{g.only[0]}-{g.batch[0]}-{g.layers}-{arm}.xz".replace(" ", "_")

    def is_kept(self, arm: str) -> bool:
        """Whether an earlier run has left its caches for this arm."""
        return arm in self.given.kept

    def take_caches(self) -> list[str]:
        """Load what earlier runs, on other machines, have compiled; the arms."""
        kept = []
        for arm in side_by_side.SLOW:
            file = self.caches(arm)
            if file and file.exists():
                torch.compiler.load_cache_artifacts(lzma.decompress(file.read_bytes()))
                kept.append(arm)
        return kept

    def leave_caches(self, arm: str) -> None:
        file = self.caches(arm) if self.given.compile_only else None
        made = torch.compiler.save_cache_artifacts() if file else None
        if file and made and not file.exists():
            file.write_bytes(lzma.compress(made[0], preset=1))

    def wait(self) -> None:
        if not self.given.cpu:
            torch.cuda.synchronize()


def measured(
    case: str, rows: int, module: nn.Module, inputs: tuple[Tensor, ...], run: Run, how: str
) -> Iterator[list[Row]]:
    """``module`` in every arm that ends in time, all timed together; without those of other processes before."""
    calls: dict[str, Callable[..., Any]] = {"eager": module}
    firsts, errors, details = {"eager": 0.0}, {}, dict.fromkeys(run.given.arms, how + run.beside)
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
            if run.waits_for(arm) and not any(map(run.waits_for, calls)):
                yield timed(case, rows, calls, inputs, want, run, (firsts, errors, details))
            elsewhere_s = run.compiled_elsewhere_s(arm)
            if elsewhere_s is None:
                print(f"{case} {rows} rows: {arm} left out, {run.budget.left_s:.0f} s are left", flush=True)
                continue
            before, start = len(prepare.analyses()), time.perf_counter()
            try:
                with run.budget.step(arm):
                    call = run.compiled(module, arm)
                    got = pytree.tree_leaves(call(*inputs))[0]
                    run.wait()
            except Exception as failure:
                print(f"{case} {rows} rows: {arm} FAILED, {type(failure).__name__}: {failure}", flush=True)
                continue
            calls[arm] = call
            firsts[arm] = elsewhere_s or time.perf_counter() - start
            details[arm] += LOADED if run.is_kept(arm) else ""
            errors[arm] = error(got, want)
            if is_ours(arm):
                details[arm] = details[arm] + "; ".join(chosen(before))
            run.tell(arm, firsts[arm])
            run.leave_caches(arm)
        if not run.given.compile_only:
            yield timed(case, rows, calls, inputs, want, run, (firsts, errors, details))


def timed(
    case: str,
    rows: int,
    calls: Mapping[str, Callable[..., Any]],
    inputs: tuple[Tensor, ...],
    want: Tensor,
    run: Run,
    known: tuple[Mapping[str, float], Mapping[str, float], Mapping[str, str]],
) -> list[Row]:
    """Rows of the arms that are there; ``known``: seconds of first calls, errors, details. Errors are the larger of the
    first call's and of the last one's that was timed."""
    firsts, errors, details = known
    runs = {arm: lambda call=call: call(*inputs) for arm, call in calls.items()}
    times, last = run.times_us(f"{case} {rows}", runs)
    module = calls["eager"]
    count = module.calls if isinstance(module, Repeated) else 1
    made = [
        Row(case, rows, arm, us / count, max(errors.get(arm, 0.0), error(got, want)), firsts[arm], details.get(arm, ""))
        for arm, us, got in zip(calls, times, last, strict=True)
    ]
    best = min(r.us for r in made if r.arm in SOURCES)
    for r in sorted(made, key=lambda r: r.us):
        print(
            f"{case:14} {rows:5} rows {r.us:9.2f} us  x{best / r.us:.2f}  {r.error:.1e}  {r.arm} {r.detail}", flush=True
        )
    return made


def is_ours(arm: str) -> bool:
    return arm.startswith("tilestream")


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
            yield from guarded(name, rows, module, (x,), run, f"{run.given.calls} blocks; ")


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
            yield from guarded(f"decode {name}{suffix}", batch, module, inputs, run, how)
        if wanted("bert-base", run) and batch in (1, 32):
            sizes, tokens = (TINY if run.given.cpu else BLOCKS)["bert-base"], 8 if run.given.cpu else 128
            module = run.ready(Bert(depth or BERT_LAYERS, sizes))
            x = run.data(batch, tokens, sizes.width)
            yield from guarded(f"encode bert-base{suffix}", batch * tokens, module, (x,), run, how)
        if wanted("resnet-50", run) and batch in (1, 32):
            made = ResNet((1, 1), 8) if run.given.cpu else ResNet()
            module = run.ready(made).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
            edge = 32 if run.given.cpu else 224
            x = run.data(batch, 3, edge, edge).to(memory_format=torch.channels_last)
            yield from guarded("resnet-50", batch, module, (x,), run, "all layers, channels last; ")


def apart(run: Run) -> Iterator[list[Row]]:
    """Each model that is asked for in a process of its own."""
    given, options = run.given, ["--layers", str(run.given.layers)]
    options += ["--cpu"] if given.cpu else []
    for name in ("kernels", "caches"):
        options += [f"--{name}", str(getattr(given, name))] if getattr(given, name) else []
    wanted = side_by_side.cases(given.side_by_side)
    for rows in side_by_side.run(wanted, given.arms, run.budget.left_s, options, given.turns):
        yield [Row(**r) for r in rows]


def guarded(
    case: str, rows: int, module: nn.Module, inputs: tuple[Tensor, ...], run: Run, how: str
) -> Iterator[list[Row]]:
    """A case that fails costs no other; one that would not end in time is left out."""
    if not run.budget.affords("case", 10.0):
        print(f"{case} {rows} rows: left out, {run.budget.left_s:.0f} s are left", flush=True)
        return
    try:
        yield from measured(case, rows, module, inputs, run, how)
    except Exception as failure:
        print(f"{case} {rows} rows FAILED: {type(failure).__name__}: {failure}", flush=True)


def merged(before: Sequence[dict[str, Any]], made: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows of earlier runs, but for the cases that were timed anew; of those just arms that were not, which is said."""
    again, arms = {(r.case, r.rows) for r in made}, {(r.case, r.rows, r.arm) for r in made}
    kept = []
    for r in before:
        if (r["case"], r["rows"], r["arm"]) in arms:
            continue
        others = (r["case"], r["rows"]) in again and not r["detail"].startswith(ANOTHER_RUN)
        kept.append({**r, "detail": ANOTHER_RUN + r["detail"]} if others else r)
    return kept + [asdict(r) for r in made]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["blocks", "models"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--layers", type=int, default=4, help="0: all of them")
    parser.add_argument("--calls", type=int, default=2)
    parser.add_argument("--arms", nargs="+", default=USUAL)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="leave out what would end later")
    parser.add_argument("--until", type=float, help="the same as a time, in seconds since 1970")
    parser.add_argument("--kernels", type=Path, help="a folder for the kernels of a call, arm by arm")
    parser.add_argument("--side-by-side", nargs="+", metavar="NAME:BATCH", help="these models, each in a process")
    parser.add_argument("--turns", type=Path, help="the folder of locks that processes on one GPU share")
    parser.add_argument("--elsewhere", type=Path, help="a folder where processes that compile say so")
    parser.add_argument("--caches", type=Path, help="a folder for Inductor's caches of slow arms, side by side")
    parser.add_argument("--compile-only", action="store_true", help="leave caches, and time nothing")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the reference machine")
    parser.add_argument("--out", type=Path, default=RESULTS / "decoders.json")
    given = parser.parse_args(words)
    if given.turns:
        Turns(given.turns).take_part()
    if given.caches:
        given.caches.mkdir(parents=True, exist_ok=True)
    run = Run(given, Budget(given.until - time.time() if given.until else given.seconds))
    before = json.loads(given.out.read_text(encoding="utf-8"))["rows"] if given.out.exists() else []
    made: dict[tuple[str, int, str], Row] = {}
    given.kept = run.take_caches()
    parts = [{"blocks": blocks, "models": models}[part](run) for part in given.parts]
    for found in itertools.chain(*([apart(run)] if given.side_by_side else parts), [[]]):  # a file in any case
        made |= {(r.case, r.rows, r.arm): r for r in found}
        text = json.dumps({"environment": environment(), "rows": merged(before, list(made.values()))}, indent=1)
        given.out.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
