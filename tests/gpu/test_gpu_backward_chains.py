"""Backward chains on the GPU: values against float64, beside eager's; the same bits twice; in training steps."""

from __future__ import annotations

import copy

import pytest
import torch
from backward_chains import chain, data, eager, widths
from replays import check_replays
from torch import Tensor, nn

from tilestream import cuda
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.pipeline import Pipeline, Role
from tilestream.run.backend import tilestream

pytestmark = pytest.mark.gpu

CASES = {
    "two hidden layers": chain(*widths(2), ctas=132),
    "four hidden layers": chain(*widths(4), ctas=132),
    "biases": chain(*widths(3), ctas=132, bias=True, dtype="bf16", weight="f32"),
    "ragged, GELU": chain(24, 40, 64, 8, ctas=66, bias=True, slope="gelu"),
    "no dX": chain(*widths(2), ctas=132, dx=False),
    "GELU made again": chain(24, 40, 64, 8, ctas=132, bias=True, slope="made"),
    "128 wide, GELU made again": chain(128, 128, 16, ctas=132, bias=True, dtype="bf16", weight="f32", slope="made"),
    "128 wide": chain(*widths(2, 128), ctas=132),
    "128 wide, biases": chain(128, 128, 128, ctas=132, bias=True, dtype="bf16", weight="f32"),
    "up to 128 wide, ragged, no dX": chain(40, 128, 104, 72, ctas=66, bias=True, dx=False),
    "128 wide, residual": chain(128, 128, ctas=132, bias=True, dtype="bf16", residual=True),
    "residual": chain(64, 64, 64, ctas=132, residual=True),
    "odd rows": chain(63, 64, 64, 3, ctas=132, dx=False, bias=True, dtype="bf16"),
}
ROWS = (0, 1, 63, 1000, 40_000)


def poisoned(p: Pipeline, rows: int) -> dict[str, Tensor]:
    made = {}
    for t in p.by_role(Role.OUTPUT):
        shape = [rows if n is None else n for n in (a.size for a in t.axes)]
        made[t.name] = torch.full(shape, float("nan"), dtype=TORCH_DTYPES[t.dtype], device="cuda")
    return made


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    p = CASES[name]
    compiled = cuda.build(p)
    for rows in ROWS:
        inputs = data(p, rows, seed=rows, device="cuda")
        got = compiled(inputs, rows, out=poisoned(p, rows))
        torch.cuda.synchronize()
        own = eager(p, inputs)
        for what, want in eager(p, inputs, torch.float64).items():
            size = float(want.norm()) + 1e-30
            error = float((got[what].double() - want).norm()) / size
            allowed = 2 * float((own[what].double() - want).norm()) / size + 1e-5
            assert error <= allowed, f"{what}, {rows} rows: error {error:.2e}, eager's {allowed / 2:.2e}"
        again = compiled(inputs, rows, out=poisoned(p, rows))
        torch.cuda.synchronize()
        assert all(torch.equal(got[what], again[what]) for what in got), rows


def test_a_graph_is_replayed_without_a_reset() -> None:
    p, rows = CASES["two hidden layers"], 5000
    check_replays(cuda.build(p), data(p, rows, device="cuda"), rows, poisoned(p, rows))


@pytest.mark.parametrize("hidden", [2, 8])
def test_a_training_step(hidden: int) -> None:
    torch.manual_seed(0)
    layers = [m for _ in range(hidden) for m in (nn.Linear(64, 64), nn.ReLU())]
    module = nn.Sequential(*layers, nn.Linear(64, 16)).to("cuda", torch.float16)
    x = torch.randn(16_384, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    dy = torch.randn(16_384, 16, device="cuda", dtype=torch.float16)
    wide, x64 = copy.deepcopy(module).double(), x.detach().double().requires_grad_()
    compiled = torch.compile(module, backend=tilestream)
    got, own, want = (
        torch.autograd.grad(f(a), [a, *m.parameters()], g)
        for f, m, a, g in ((compiled, module, x, dy), (module, module, x, dy), (wide, wide, x64, dy.double()))
    )
    for mine, theirs, exact in zip(got, own, want, strict=True):
        allowed = 2 * (theirs.double() - exact).norm() + 1e-4 * exact.norm()
        assert (mine.double() - exact).norm() <= allowed
