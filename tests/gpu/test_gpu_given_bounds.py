"""Bags, segments and experts on the GPU: against float64, the same bits, replayed with other bounds, bad input."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from given_bounds import Bag, Csr, Jagged, Reduced, run
from torch import Tensor, nn

from benchmarks.lib.masked_models import Experts
from tilestream.plan import messages, ragged
from tilestream.run import oracle
from tilestream.run.backend import tilestream

HELPERS = Path(__file__).parents[1] / "lib"
OURS = {"target": "cuda", "measure": False}


@pytest.fixture(autouse=True)
def _forced(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """Kernels of ours, however small the sizes."""
    asked = ragged.question
    monkeypatch.setattr(ragged, "question", lambda *given, **more: replace(asked(*given, **more), forced=True))
    monkeypatch.setattr(messages, "atomics_us", lambda _: 1e9)


def compiled(module: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, backend=tilestream, options=OURS | options)


def check(module: nn.Module, inputs: tuple[Tensor, ...], training: bool) -> None:
    """As near to float64 as twice what eager is, and the same bits twice."""
    fast, wide = compiled(module), copy.deepcopy(module).double()
    doubles = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    exact = run(wide, wide, doubles, training).nan_to_num(0, 0, 0)
    ours, again, own = (run(f, module, inputs, training).nan_to_num(0, 0, 0) for f in (fast, fast, module))
    assert torch.equal(ours, again)
    assert oracle.error(ours, exact) <= max(2 * oracle.error(own, exact), 1e-6)


def bags(count: int = 300, rows: int = 30) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    lengths = torch.randint(0, 30, (count,), device="cuda")
    lengths[7] = 2000
    indices = torch.randint(rows, (int(lengths.sum()),), device="cuda")
    return indices, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)[:-1]])


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("how", [{}, {"padding_idx": 3}], ids=str)
def test_bags(mode: str, dtype: torch.dtype, how: dict[str, Any]) -> None:
    module, inputs = Bag(mode, **how).cuda().to(dtype), bags()
    check(module, inputs, False)
    check(module, (inputs[0].int(), inputs[1].int()), False)
    if mode == "sum":
        check(module, (*inputs, torch.randn(len(inputs[0]), device="cuda").to(dtype)), False)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["sum", "mean", "max", "min", "prod"])
def test_segments(how: str) -> None:
    lengths = torch.tensor([3, 0, 500, 7, 0], device="cuda")
    check(Reduced(how, "lengths"), (torch.rand(510, 24, device="cuda") + 0.5, lengths), False)


@pytest.mark.gpu
def test_csr_and_jagged() -> None:
    torch.manual_seed(0)
    dense = torch.randn(200, 90) * (torch.rand(200, 90) < 0.2)
    for select in (False, True):
        check(Csr(dense.to_sparse_csr(), select).cuda(), (torch.randn(90, 33, device="cuda"),), False)
    offsets = torch.tensor([0, 3, 3, 80, 90], device="cuda")
    for how in ("sum", "amax"):
        check(Jagged(how), (torch.randn(90, 16, device="cuda"), offsets), False)


def surely_routed(module: Experts, x: Tensor) -> Tensor:
    """Tokens whose last chosen expert leads by more than the router's rounding: close scores go either way."""
    scores = module.router(x).float().sort(descending=True).values
    sure = scores[:, module.top - 1] - scores[:, module.top] > 0.02 * scores.abs().amax(1)
    assert sure.float().mean() > 0.8
    return sure


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True])
def test_experts(training: bool) -> None:
    """Tokens go elsewhere at each call, and between replays of one graph."""
    torch.manual_seed(0)
    module = Experts(16, 128, 64, 2).cuda().bfloat16()
    fast = compiled(module)
    x = torch.randn(400, 128, device="cuda").bfloat16()
    for _ in range(2):
        own, ours = (run(f, module, (x,), training) for f in (module, fast))
        sure = slice(None) if training else surely_routed(module, x)
        assert (ours - own)[sure].norm() <= 2e-2 * own[sure].norm()
        assert torch.equal(ours, run(fast, module, (x,), training))
        x = x.flip(0) * 0.7
    if training:
        return
    graph, still = torch.cuda.CUDAGraph(), x.clone()
    with torch.no_grad(), torch.cuda.graph(graph):
        got = fast(still)
    still.copy_(torch.randn_like(x))
    graph.replay()
    with torch.no_grad():
        assert torch.equal(got, fast(still))


BAD = """
import sys
import torch
sys.path[:0] = {paths}
from given_bounds import lookup
from tilestream import cuda
from tilestream.errors import InputError

table = torch.randn(3000, 64)
indices, offsets = torch.arange(2000), torch.arange(0, 2001, 10)
program, given = lookup(table, indices, offsets)
given = {{name: t.cuda() for name, t in given.items()}}
indices, offsets = given["src"], given["starts"]
compiled = cuda.build(program)
compiled(given, 200)
torch.cuda.synchronize()
{change}
compiled(given, 200)
try:
    torch.cuda.synchronize()
except RuntimeError:
    pass
try:
    compiled(given, 200)
except InputError as error:
    print("found:", error)
"""
CHANGES = {
    "offsets[1] = 25": "those of position 1 are 25 to 20",
    "offsets[199] = 2010": "those of position 19[89] are",
    "indices[7] = -1": "is -1 at edge 7",
    "indices[7] = 3000": "is 3000 at edge 7",
    "indices[7] = 2**32": "is 4294967296 at edge 7",
}


@pytest.mark.gpu
@pytest.mark.traps
@pytest.mark.parametrize("change", CHANGES)
def test_bad_input_ends_the_kernel_and_is_named(change: str) -> None:
    code = BAD.format(paths=[str(HELPERS)], change=change)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert re.search(f"found: .*{CHANGES[change]}", done.stdout), done.stdout + done.stderr[-2000:]
