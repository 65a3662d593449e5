"""The kernel of a decode step on the host, a thread a lane and a process a CTA, and compiled."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from decode_steps import made_up, on_host

from tilestream.cuda.compile import compile_text
from tilestream.cuda.host.build import HostRun, Mutation
from tilestream.errors import CompileError, InputError, QueueTimeout
from tilestream.kernels.step.kernel import NAME, StepKernel
from tilestream.kernels.step.shape import Shape

gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

PATIENT = 120_000_000_000
SMALL = Shape(2, 64, 72, 4, 2, 64, 160, 40, warps=4)
CASES = {
    "two shares of the cache": (SMALL, 150),
    "norms of heads, three queries a head of keys": (Shape(2, 72, 64, 3, 1, 128, 9, 24, head_norms=True, warps=8), 3),
    "no mask": (replace(SMALL, masked=False, positions=40), 17),
    "rows of two pieces": (Shape(1, 1032, 1040, 2, 2, 64, 8, 16, warps=4), 0),
}


@gxx
@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    shape, place = CASES[name]
    given = made_up(shape, place)
    exact, plain, got = given.to(torch.float64), given.to(torch.float32), given
    (logits,) = on_host(got, StepKernel(shape, timeout_ns=PATIENT), 5)
    want = exact.run()
    assert torch.isfinite(logits).all()
    error = ((logits.double() - want).norm() / want.norm()).item()
    assert error < 6e-3, error
    plain.run()
    assert all(int(n) == place + 1 for n in got.lengths)
    for mine, theirs in zip(got.caches, plain.caches, strict=True):
        assert torch.equal(mine[:, :, place + 1 :], theirs[:, :, place + 1 :].to(mine.dtype))
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", CASES)
def test_compiles(name: str) -> None:
    kernel = StepKernel(CASES[name][0])
    try:
        report = compile_text(kernel.text, NAME, kernel.shape.shared_bytes)
    except CompileError as missing:
        pytest.skip(missing.cause)
    assert report.registers <= 128
