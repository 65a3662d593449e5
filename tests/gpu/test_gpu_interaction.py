"""Lookups and products of pairs on the GPU: against float64, the same bits every time, in graphs and in models."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from interactions import F16, Case, Recommender, inputs

from tilestream.cuda.interaction import backward, forward
from tilestream.plan import chooser
from tilestream.plan.cache import sealed
from tilestream.run import oracle
from tilestream.run.backend import tilestream

pytestmark = pytest.mark.gpu

CASES = [
    Case(27, 128, 1),
    Case(27, 128, 7),
    Case(27, 128, 5000),
    Case(27, 128, 2048, dtype=F16),
    Case(27, 64, 130, diagonal=True, twice=True),
    Case(2, 8, 33, head=-1),
    Case(18, 24, 1000, head=5),
    Case(40, 40, 700),
    Case(63, 256, 300, diagonal=True),
    Case(64, 8, 300, head=-1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(case: Case) -> None:
    got, back = forward(*case.operands("cuda"), case.head), backward(*case.operands("cuda"), case.given("cuda"))
    for made, (eager, exact) in ((got, case.forward("cuda")), (back, case.backward("cuda"))):
        error, own, good = oracle.judge([made], [eager], [exact])
        assert good, f"error {error:.2e}, eager's {own:.2e}"
    assert torch.equal(got, forward(*case.operands("cuda"), case.head))
    assert torch.equal(back, backward(*case.operands("cuda"), case.given("cuda")))


def test_rows_with_gaps_and_rows_that_start_anywhere() -> None:
    """Rows of a wider tensor are read in place; those that start on no 16 bytes are copied; gradients have gaps."""
    case = Case(5, 24, 300)
    sources, indices, *pairs = case.operands("cuda")
    wide = [torch.randn(len(s), 40, device="cuda").to(s.dtype) for s in sources]
    for at in (8, 3):
        parts = [w[:, at : at + 24] for w in wide]
        plain = [p.contiguous() for p in parts]
        assert torch.equal(forward(parts, indices, *pairs, 0), forward(plain, indices, *pairs, 0))
    given = torch.randn(300, 13, device="cuda").bfloat16()[:, 2:12]
    want = backward(sources, indices, *pairs, given.contiguous())
    assert torch.equal(backward(sources, indices, *pairs, given), want)


def test_in_a_cuda_graph() -> None:
    case = Case(27, 128, 3000)
    operands = case.operands("cuda")
    want = forward(*operands, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = forward(*operands, 0)
    got.fill_(float("nan"))
    for _ in range(100):
        graph.replay()
    assert torch.equal(got, want)


OUTSIDE = """
import torch
from tilestream.cuda.interaction import forward
from tilestream.errors import InputError
z = [torch.randn(9, 16, device="cuda").bfloat16() for _ in range(3)]
i = [None, torch.tensor([0, 1, 2, {bad}, 4, 5, 6, 7, 8], device="cuda"), None]
p = torch.tensor([1, 2], device="cuda"), torch.tensor([0, 1], device="cuda")
forward(z, i, *p, 0)
try:
    torch.cuda.synchronize()
except RuntimeError:
    print("ended")
try:
    forward(z, i, *p, 0)
except InputError as error:
    print(error)
"""


@pytest.mark.traps
@pytest.mark.parametrize("bad", [9, -1, 2**40])
def test_an_index_that_names_no_row(bad: int) -> None:
    code = OUTSIDE.format(bad=bad)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "ended" in done.stdout, done.stdout + done.stderr
    assert f"the index of sample 3 into table 1 of an interaction is {bad}, and it has 9 rows" in done.stdout


@pytest.mark.parametrize("training", [False, True])
def test_in_a_model(training: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed, checked and kept on disk; then, wherever it won, as near to float64 as eager."""
    chooser.forget()
    module = Recommender(features=128, tables=26).bfloat16().cuda()
    given = tuple(x.cuda() for x in inputs(4096, tables=26))
    options = {"interactions": True, "cache_dir": tmp_path}
    fast = torch.compile(module, backend=tilestream, options=options, dynamic=False)
    wide = copy.deepcopy(module).double()

    def results(m, x, i) -> list[torch.Tensor]:
        if not training:
            with torch.no_grad():
                return [m(x, i)]
        m.zero_grad(set_to_none=True)
        m(x, i).double().square().sum().backward()
        return [p.grad for p in m.parameters()]

    got, eager, exact = results(fast, *given), results(module, *given), results(wide, given[0].double(), given[1])
    assert oracle.judge(got, eager, exact)[2]
    kept = [sealed(json.loads(path.read_text())) for path in (tmp_path / "plans").iterdir()]
    assert [plan["region"] for plan in kept].count("interaction") == 1
