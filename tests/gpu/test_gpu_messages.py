"""Sums of messages by node on the GPU: against float64, and the same bits every time."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from tilestream.apps.models import MODELS
from tilestream.cuda import sorted_keys
from tilestream.cuda.compile import compile_text
from tilestream.kernels.segments.kernel import SegmentsKernel
from tilestream.kernels.segments.reduce import reduction
from tilestream.run import device_ops as segments
from tilestream.run.backend import tilestream

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", ["bf16", "f16", "f32"])
def test_compiles_without_spills(name: str) -> None:
    source = SegmentsKernel(reduction("sum", 128, name, True)).source()
    assert compile_text(source.text, source.name, source.shared_bytes).spills < 256  # in the code of busy nodes


@pytest.mark.nvrtc
def test_kernels_that_sort_compile_without_spills() -> None:
    assert compile_text(sorted_keys.text(), "tilestream_count", sorted_keys.SHARED_BYTES).spills == 0


def sums(index: Tensor, rows: Tensor, base: Tensor | None, nodes: int) -> Tensor:
    return segments.segment_reduce(base, rows, *segments.segments(index, nodes))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("edges", "nodes", "features", "busy"),
    [(0, 7, 64, 0), (1, 1, 8, 0), (5000, 300, 128, 0), (4000, 90, 512, 3500), (3000, 5000, 72, 700), (999, 50, 8, 65)]
    + [(9000, 20, 64, 8000), (20_000, 300_000, 128, 3000)],  # pieces of a node; several nodes a group
)
def test_sums(edges: int, nodes: int, features: int, busy: int, dtype: torch.dtype) -> None:
    """``busy``: edges of the first node, which a whole CTA sums."""
    torch.manual_seed(edges)
    rows = torch.randn(edges, features, device="cuda").to(dtype)
    index = torch.randint(nodes, (edges,), device="cuda")
    index[:busy] = 0
    index = index[torch.randperm(edges, device="cuda")]
    for base in (None, torch.randn(nodes, features, device="cuda").to(dtype)):
        start = torch.zeros(nodes, features, device="cuda", dtype=torch.float64) if base is None else base.double()
        exact = start.index_add(0, index, rows.double())
        got = sums(index, rows, base, nodes)
        eps = torch.finfo(dtype).eps * (8 if dtype is torch.float32 else 1)  # of thousands of terms, added in fp32
        assert (got.double() - exact).norm() <= eps * exact.norm() + 1e-30
        assert torch.equal(got, sums(index, rows, base, nodes))
        assert torch.equal(got, sums(index.int() - nodes, rows, base, nodes))


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    rows, index = torch.randn(3000, 64, device="cuda").bfloat16(), torch.randint(200, (3000,), device="cuda")
    wanted = sums(index, rows, None, 200)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = sums(index, rows, None, 200)
    got.fill_(float("nan"))
    graph.replay()
    assert torch.equal(got, wanted)


OUTSIDE = """
import torch
from tilestream.errors import InputError
from tilestream.kernels.segments.kernel import SegmentsKernel
from tilestream.kernels.segments.reduce import reduction
from tilestream.run import device_ops as segments
index = torch.tensor([0, {bad}, 1], device="cuda")
for call in ("first", "second"):
    try:
        segments.segments(index, 5, False, {wraps})
        torch.cuda.synchronize()
    except InputError as error:  # of the second call, or of the first where torch's sort meets the lost context
        print(call, error)
    except RuntimeError as lost:
        print(call, str(lost).splitlines()[0])
"""


@pytest.mark.gpu
@pytest.mark.traps
@pytest.mark.parametrize(("bad", "wraps"), [(5, True), (-6, True), (2**32, True), (-1, False)])
def test_an_index_that_is_no_node_ends_the_kernel_and_is_named(bad: int, wraps: bool) -> None:
    code = OUTSIDE.format(bad=bad, wraps=wraps)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    first, second, *_ = [*done.stdout.splitlines(), "", ""]
    named = f"the index of row 1 of a sum of rows by their indices is {bad}, and the sum has 5 rows"
    assert named in first or "unspecified launch failure" in first, done.stdout + done.stderr
    assert named in second and "restart the process, with indices that exist" in second, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("edges", "nodes", "features"),
    [(3000, 400, 128), (2048, 100_000, 128), (4096, 3, 128)],  # rows of a table that nobody looked up; few rows
)
def test_rows_that_the_order_names_anyhow(edges: int, nodes: int, features: int, dtype: torch.dtype) -> None:
    """Every third row of a matrix, and each row twice, as sums of both ends of an edge and of tables take them."""
    torch.manual_seed(edges)
    matrix = torch.randn(3 * edges, features, device="cuda").to(dtype)
    index = torch.randint(nodes, (edges,), device="cuda")
    order, *starts = segments.segments(index, nodes)
    for rows in (3 * order + 2, order // 2):
        exact = torch.zeros(nodes, features, device="cuda", dtype=torch.float64)
        exact.index_add_(0, index[order], matrix[rows].double())
        got = segments.segment_reduce(None, matrix, rows, *starts)
        eps = torch.finfo(dtype).eps * (8 if dtype is torch.float32 else 1)
        assert (got.double() - exact).norm() <= eps * exact.norm()
        assert torch.equal(got, segments.segment_reduce(None, matrix, rows, *starts))
        assert not got[exact.abs().sum(1) == 0].any()


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("name", "sizes"), [("mgn", {"batch": 8, "steps": 2}), ("dlrm", {"max_rows": 100_000})])
def test_gradients_of_a_training_step(name: str, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As near to float64 as eager's, the same bits twice, by sorted sums."""
    module, inputs = MODELS[name].make(device="cuda", training=True, **sizes)
    launched: list[str] = []
    executable = segments.executable
    monkeypatch.setattr(segments, "executable", lambda *given: launched.append(name) or executable(*given))
    fast: Any = torch.compile(module, backend=tilestream, options={"target": "cuda", "measure": False})

    def gradients(function: Any, own: torch.nn.Module, given: tuple[Tensor, ...]) -> list[Tensor]:
        own.zero_grad(set_to_none=True)
        function(*given).double().square().mean().backward()
        return [p.grad.clone() for p in own.parameters() if p.grad is not None]

    got, again = gradients(fast, module, inputs), gradients(fast, module, inputs)
    assert launched
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    eager = gradients(module, module, inputs)
    wide = copy.deepcopy(module).double()
    exact = gradients(wide, wide, tuple(x.double() if x.is_floating_point() else x for x in inputs))
    error, own = (
        sum(float((g.double() - e).square().sum()) for g, e in zip(made, exact, strict=True)) for made in (got, eager)
    )
    assert error <= 4 * own  # squares
