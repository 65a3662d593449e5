"""Rows that come through an index, on the GPU: against the reference machine, and through ``torch.compile``."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from gathers import everywhere, message, tensors, with_index
from gpu_pipelines import one_stage
from oracle_runs import assert_close, assert_same_bits, cut, reference_run, run_poisoned, to_gpu
from places import HELPERS
from torch import Tensor, nn

from tilestream import cuda, devices
from tilestream.bench.accuracy import Oracle, repeatable
from tilestream.ir.pipeline import Pipeline, Residency, Role
from tilestream.kernels.fits import verify_on
from tilestream.run.backend import tilestream

MOST, NODES = 2048, 300
ROWS = (0, 1, 63, 65, 300, MOST)
CASES: Mapping[str, Callable[[], Pipeline]] = {
    "message128": lambda: one_stage(message(128)),
    "message128_resident": lambda: one_stage(message(128, 2), residency=Residency.RESIDENT),
    "message512": lambda: one_stage(message(512, 2, "silu"), 1),
    "message72": lambda: one_stage(message(72)),
    "i32": lambda: one_stage(with_index(message(128, 2), "i32")),
    "f32": lambda: one_stage(message(64, 2, dtype="f32")),
    "f16": lambda: one_stage(message(128, 2, dtype="f16")),
    "everywhere": lambda: one_stage(everywhere()),
    "everywhere_by_columns": lambda: one_stage(everywhere(), 1),
}


@functools.cache
def expected(name: str) -> tuple[Mapping[str, Tensor], ...]:
    pipeline = CASES[name]()
    given = tensors(pipeline, MOST, seed=1, nodes=NODES)
    return given, *reference_run(pipeline, given)


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(3)
def test_are_legal_and_compile_without_spills(name: str) -> None:
    pipeline = CASES[name]()
    verify_on(pipeline, devices.get("h200"))
    assert [r.spills for r in cuda.compile_only(pipeline)] == [0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_against_the_reference_machine(name: str) -> None:
    pipeline = CASES[name]()
    given, exact, working = expected(name)
    inputs = [t.name for t in pipeline.by_role(Role.INPUT)]
    compiled = cuda.build(pipeline)
    largest: dict[str, Tensor] = {}
    for rows in sorted(ROWS, reverse=True):
        here = cut(given, rows, *inputs)
        here = to_gpu({n: t for n, t in here.items() if t.is_floating_point()}) | {
            n: t.cuda() for n, t in here.items() if not t.is_floating_point()
        }
        got = run_poisoned(compiled, here, rows)
        assert_close(pipeline, got, cut(exact, rows), cut(working, rows))
        assert_same_bits(got, run_poisoned(compiled, here, rows))
        largest = largest or got
        assert_same_bits(got, cut(largest, rows))


@pytest.mark.gpu
def test_tables_and_indices_anywhere() -> None:
    """A table with gaps between its rows, an index at an odd address, one with gaps: as contiguous copies."""
    pipeline = one_stage(message(128, 2))
    compiled = cuda.build(pipeline)
    given = {n: t.cuda() for n, t in tensors(pipeline, 500, nodes=NODES).items()}
    wanted = compiled(given, 500)
    wide = torch.randn(NODES, 160, device="cuda").bfloat16()
    wide[:, 16:144] = given["v"]
    odd = torch.zeros(501, dtype=torch.int64, device="cuda")[1:]
    odd.copy_(given["senders"])
    apart = torch.zeros(500, 2, dtype=torch.int64, device="cuda")[:, 1]
    apart.copy_(given["receivers"])
    assert_same_bits(compiled(given | {"v": wide[:, 16:144], "senders": odd, "receivers": apart}, 500), wanted)


OUTSIDE = """
import sys
sys.path[:0] = {paths!r}
import torch
from gathers import message, tensors
from gpu_pipelines import one_stage
from tilestream import cuda
from tilestream.errors import InputError
pipeline = one_stage(message(128, 2))
compiled = cuda.build(pipeline)
given = {{n: t.cuda() for n, t in tensors(pipeline, 500).items()}}
given["senders"][321] = 37
compiled(given, 500)
try:
    torch.cuda.synchronize()
except RuntimeError:
    pass
try:
    compiled(given, 500)
except InputError as error:
    print("found:", error)
"""


@pytest.mark.gpu
@pytest.mark.traps
def test_an_index_outside_of_its_table_ends_the_kernel_and_is_named() -> None:
    """In a process of its own: the context is lost, as with torch's own assertion."""
    code = OUTSIDE.format(paths=[str(HELPERS)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "index 'senders' is 37 at row 321, and table 'v' has 37 rows" in done.stdout, done.stdout + done.stderr


class Messages(nn.Module):
    """An edge update with gathers, as PyG and MeshGraphNets write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        parts = [nn.Linear(3 * width, width), nn.ReLU(), nn.Linear(width, width), nn.LayerNorm(width)]
        self.net = nn.Sequential(*parts)

    def forward(self, v: Tensor, e: Tensor, edges: Tensor) -> Tensor:
        return e + self.net(torch.cat([e, v[edges[0]], v[edges[1]]], -1))


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("width", [64, 128])
def test_through_torch_compile(width: int, dynamic: bool) -> None:
    torch._dynamo.reset()
    module = Messages(width).to("cuda", torch.bfloat16)
    options = {"target": "cuda", "strategy": "vertical", "measure": False}
    fast: Any = torch.no_grad()(torch.compile(module, backend=tilestream, options=options, dynamic=dynamic))
    for nodes, edges in ((300, 2000), (1111, 4097)):
        inputs = (
            torch.randn(nodes, width, device="cuda").bfloat16(),
            torch.randn(edges, width, device="cuda").bfloat16(),
            torch.randint(-nodes, nodes, (2, edges), device="cuda"),
        )
        oracle = Oracle(module, inputs)
        assert oracle.judge(fast(*inputs)).ok
        assert repeatable(lambda given=inputs: fast(*given))
