"""Whole blocks and models on few rows through ``torch.compile``: eager, Inductor, max-autotune, tilestream.

    python benchmarks/decoders.py                       blocks (norm, FFN, residual), then models
    python benchmarks/decoders.py blocks --rows 1 128   some numbers of rows; --only gpt2 some of them
    python benchmarks/decoders.py models --layers 2     decoders at batch 1 to 32, BERT

Needs an H100 or H200. bf16, random weights and data; every arm a CUDA graph, all arms in turn, medians. A block goes
``--calls`` times over different weights in one graph, so that those of small blocks are in the L2 and those of large
ones are not, as in a model. Decoders take one token of each sequence behind 255 that a static cache holds. Layers are
cut to ``--layers`` (said in the row): all are alike, so ratios stay. Errors are against float64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
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
    "max-autotune": {"mode": "max-autotune-no-cudagraphs"},
    "tilestream": {"backend": tilestream},
}
SOURCES = ("eager", "inductor", "max-autotune")
"""What tilestream is held against: the best of them."""


class RMSNorm(nn.Module):
    """As Hugging Face's models have it: in fp32, rounded, then weighted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


@dataclass(frozen=True)
class Sizes:
    """``act``: silu is gated, as in Llama; gelu and gelu_tanh are plain and have biases. ``post``: the norm is behind
    the residual, as in BERT."""

    width: int
    hidden: int
    act: str = "silu"
    post: bool = False

    @property
    def weight_bytes(self) -> int:
        return 2 * self.width * self.hidden * (3 if self.act == "silu" else 2)


BLOCKS = {
    "qwen3-0.6b": Sizes(1024, 3072),
    "llama-3.2-1b": Sizes(2048, 8192),
    "gpt2": Sizes(768, 3072, "gelu_tanh"),
    "bert-base": Sizes(768, 3072, "gelu", post=True),
}


class Block(nn.Module):
    """``x + FFN(norm(x))``, or ``norm(x + FFN(x))``: [rows, width] to [rows, width]."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        gated = s.act == "silu"
        self.sizes = s
        self.norm = RMSNorm(s.width) if gated else nn.LayerNorm(s.width)
        self.up, self.down = nn.Linear(s.width, s.hidden, not gated), nn.Linear(s.hidden, s.width, not gated)
        self.gate = nn.Linear(s.width, s.hidden, bias=False) if gated else None

    def ffn(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        return self.down(F.gelu(self.up(x), approximate="tanh" if self.sizes.act == "gelu_tanh" else "none"))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.ffn(x)) if self.sizes.post else x + self.ffn(self.norm(x))


class Bert(nn.Module):
    """Layers of BERT-base on hidden states [B, T, 768]: attention of 12 heads, then ``Block``."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(BertLayer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class BertLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(768, 768) for _ in range(4))
        self.norm, self.block = nn.LayerNorm(768), Block(BLOCKS["bert-base"])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (12, 64)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.block(self.norm(x + self.o(mixed)))


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


def measured(
    case: str, rows: int, module: nn.Module, inputs: tuple[Tensor, ...], arms: list[str], how: str
) -> list[Row]:
    """``module`` in every arm; CUDA graphs, all in turn."""
    runs: dict[str, Callable[..., Any]] = {"eager": module}
    firsts, errors, details = {"eager": 0.0}, {}, dict.fromkeys(arms, how)
    with torch.no_grad():
        want = pytree.tree_leaves(module(*inputs))[0].double()
        if isinstance(module, Repeated):
            exact = module.exact(*inputs)
            errors["eager"] = error(want, exact)
            want = exact
        for arm in arms:
            if arm == "eager":
                continue
            torch._dynamo.reset()
            before, start = len(prepare.analyses()), time.perf_counter()
            runs[arm] = torch.compile(module, dynamic=False, **ARMS[arm])
            got = pytree.tree_leaves(runs[arm](*inputs))[0]
            torch.cuda.synchronize()
            firsts[arm] = time.perf_counter() - start
            errors[arm] = error(got, want)
            if arm == "tilestream":
                details[arm] = how + "; ".join(chosen(before))
        graphs = [capture(lambda run=run: run(*inputs), 1000.0, 20) for run in runs.values()]
        times = [statistics.median(samples) for samples in interleaved(graphs, ROUNDS)]
    count = module.calls if isinstance(module, Repeated) else 1
    made = [
        Row(case, rows, arm, us / count, errors.get(arm, 0.0), firsts[arm], details.get(arm, ""))
        for arm, us in zip(runs, times, strict=True)
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


class Repeated(nn.Module):
    """A block several times over weights of its own, one call behind the other."""

    def __init__(self, sizes: Sizes, calls: int) -> None:
        super().__init__()
        self.calls = calls
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(calls))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def exact(self, x: Tensor) -> Tensor:
        x = x.double()
        for block in self.blocks:
            x = block.double()(x)
            block.bfloat16()
        return x


def blocks(given: argparse.Namespace) -> Iterator[list[Row]]:
    for rows in given.rows:
        for name in given.only or BLOCKS:
            torch.manual_seed(0)
            module = Repeated(BLOCKS[name], given.calls).cuda().bfloat16().eval()
            x = torch.randn(rows, BLOCKS[name].width, device="cuda", dtype=torch.bfloat16)
            yield guarded(name, rows, module, (x,), given, f"{given.calls} blocks; ")


def models(given: argparse.Namespace) -> Iterator[list[Row]]:
    decoders = {
        "qwen3-0.6b": {"width": 1024, "hidden": 3072, "heads": 16, "kv_heads": 8},
        "llama-3.2-1b": {"width": 2048, "hidden": 8192, "heads": 32, "kv_heads": 8},
    }
    for batch in given.batch:
        for name, sizes in decoders.items():
            if given.only and name not in given.only:
                continue
            s = llama.Sizes(
                batch=batch, tokens=1, context=255, layers=given.layers, sdpa=True, layers_only=True, **sizes
            )
            module = llama.module(s).cuda().bfloat16().eval()
            x, turn, mask, *caches = llama.inputs(s)
            halves = [t.cuda().bfloat16() for t in (x, mask, *caches)]
            inputs = (halves[0], turn.cuda(), *halves[1:])
            yield guarded(f"decode {name}", batch, module, inputs, given, f"{given.layers} layers; ")
        if not given.only or "bert-base" in given.only:
            if batch in (1, 32):
                module = Bert(given.layers).cuda().bfloat16().eval()
                x = torch.randn(batch, 128, 768, device="cuda", dtype=torch.bfloat16)
                yield guarded("bert-base", batch * 128, module, (x,), given, f"{given.layers} layers; ")


def guarded(
    case: str, rows: int, module: nn.Module, inputs: tuple[Tensor, ...], given: argparse.Namespace, how: str
) -> list[Row]:
    """A case that fails costs no other."""
    try:
        return measured(case, rows, module, inputs, given.arms, how)
    except Exception as failure:
        print(f"{case} {rows} rows FAILED: {type(failure).__name__}: {failure}", flush=True)
        return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["blocks", "models"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--calls", type=int, default=2)
    parser.add_argument("--arms", nargs="+", default=["eager", *ARMS])
    parser.add_argument("--out", type=Path, default=RESULTS / "decoders.json")
    given = parser.parse_args()
    rows: list[Row] = []
    for part in given.parts:
        for found in {"blocks": blocks, "models": models}[part](given):
            rows += found
            given.out.write_text(
                json.dumps({"environment": environment(), "rows": [asdict(r) for r in rows]}, indent=1) + "\n"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
