"""Kernels of ragged pipelines, compiled by g++ and run a fiber a lane, beside float64: any width, dtype and graph."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from given_bounds import lookup
from ragged_programs import Case, Graph, aggregators, attention, dot_products, error, gather_sum, uniform, weighted
from torch import Tensor as T

from tilestream import cuda
from tilestream.cuda import sorted_keys
from tilestream.cuda.host.build import HostRace, HostRun, Mutation, run_on_host
from tilestream.cuda.launch import addressable, readable
from tilestream.errors import InputError
from tilestream.graph.rewrites import operators
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.pipeline import Pipeline, Role
from tilestream.kernels.parts.params import Where
from tilestream.kernels.parts.source import Call
from tilestream.kernels.segments.kernel import SegmentsKernel
from tilestream.run import device_ops

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def check(case: Case, graph: Graph, dtype: str, busy: bool = True, options: HostRun | None = None) -> None:
    given = case.given(graph)
    pipeline = case.pipeline(busy)
    if not busy:
        given.pop("starts.busy")
    got = run_on_host(pipeline, given, options)
    for name, wanted in case.wanted(graph, given).items():
        exact = 4 * torch.finfo(TORCH_DTYPES[dtype]).eps
        assert error(got[name], wanted) < max(exact, 2e-6), name


PROGRAMS: dict[str, tuple[Callable[[], Case], str]] = {
    "sum, 64 bf16": (lambda: gather_sum(64, "bf16"), "bf16"),
    "sum, 1 f32": (lambda: gather_sum(1, "f32"), "f32"),
    "sum, 33 bf16": (lambda: gather_sum(33, "bf16"), "bf16"),
    "sum, 300 f16": (lambda: gather_sum(300, "f16", base=False), "f16"),
    "max, 20 f32": (lambda: gather_sum(20, "f32", "max"), "f32"),
    "min, 7 bf16": (lambda: gather_sum(7, "bf16", "min"), "bf16"),
    "four aggregators, 75 bf16": (lambda: aggregators(75, "bf16"), "bf16"),
    "four aggregators, 40 f32": (lambda: aggregators(40, "f32"), "f32"),
    "weights of edges, 24 bf16": (lambda: weighted(24, "bf16"), "bf16"),
    "weights of edges and heads, 3 x 17 f32": (lambda: weighted(17, "f32", 3), "f32"),
    "softmax, 4 x 64 bf16": (lambda: attention(4, 64, "bf16", fused=True), "bf16"),
    "softmax in three passes, 4 x 64 bf16": (lambda: attention(4, 64, "bf16", fused=False), "bf16"),
    "softmax with its weights, 16 x 6 f32": (lambda: attention(16, 6, "f32", fused=False, alpha=True), "f32"),
    "softmax in three passes, and a maximum, 3 x 24 bf16": (
        lambda: attention(3, 24, "bf16", fused=False, highest=True),
        "bf16",
    ),
    "scores of products, 2 x 16 bf16": (lambda: dot_products(2, 16, "bf16"), "bf16"),
    "scores of products, 3 x 20 f32": (lambda: dot_products(3, 20, "f32"), "f32"),
    "scores of products, 1 x 300 f16": (lambda: dot_products(1, 300, "f16"), "f16"),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.every(8)
def test_programs(name: str) -> None:
    torch.manual_seed(len(name))
    make, dtype = PROGRAMS[name]
    check(make(), uniform(40, 400, busy=150), dtype)


@pytest.mark.parametrize("edges", [0, 5, 3000])
def test_graphs(edges: int) -> None:
    """No edges; hardly any; and a node whose edges several CTAs share."""
    torch.manual_seed(edges)
    graph = uniform(30, edges, busy=edges * 9 // 10)
    check(gather_sum(24, "bf16"), graph, "bf16")
    check(attention(2, 8, "f32", fused=True), graph, "f32")
    check(attention(2, 8, "f32", fused=False, alpha=True), graph, "f32")


def test_bounds_that_list_no_busy_nodes() -> None:
    torch.manual_seed(0)
    check(gather_sum(16, "f32"), uniform(20, 500, busy=300), "f32", busy=False)


def test_rows_that_lie_apart_are_read_in_place_where_loads_stay_aligned() -> None:
    ragged, rows = gather_sum(36, "bf16").pipeline(), torch.zeros(8, 80, dtype=torch.bfloat16)
    assert readable(rows[:, :36], ragged) and readable(rows[:, :36].contiguous(), ragged)
    apart = torch.zeros(8, 37, dtype=torch.bfloat16)[:, :36]
    assert addressable(apart) and not readable(apart, ragged)
    assert not readable(torch.zeros(8, 4, 16).transpose(0, 1), ragged) and not readable(torch.zeros(8, 40).t(), ragged)


def test_no_race(tmp_path: Path) -> None:
    torch.manual_seed(0)
    graph, case = uniform(20, 500, busy=400), attention(2, 8, "f32", fused=False)
    check(case, graph, "f32", options=HostRun(sanitize=True))
    barrier = ("bits_of(s.v[k]));\n    lanes::all_together();", "bits_of(s.v[k]));")
    with pytest.raises(HostRace):
        run_on_host(
            case.pipeline(),
            case.given(graph),
            HostRun(sanitize=True, mutations=(Mutation("segments.cuh", *barrier),), folder=tmp_path),
        )


def test_a_sum_waits_for_a_pass_that_reads_its_rows_anyway() -> None:
    kernel = SegmentsKernel(attention(3, 24, "bf16", fused=False, highest=True).pipeline())
    assert [list(each.reads) for each in kernel.program.passes] == [["bj"], ["bj"], ["bj", "xj"]]


def test_same_bits() -> None:
    torch.manual_seed(0)
    graph, case = uniform(30, 2500, busy=2300), weighted(24, "bf16")
    given = case.given(graph)
    first = run_on_host(case.pipeline(), given)["y"]
    again = Graph(graph.nodes, graph.index)  # lists its busy pieces in another order
    assert not torch.equal(again.busy, graph.busy)
    assert torch.equal(first, run_on_host(case.pipeline(), given | {"starts.busy": again.busy})["y"])


class OnHost:
    """What binds a pipeline to tensors and runs it by the host's build."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline

    def bind(self, tensors: Mapping[str, T], rows: int, moving: Sequence[str]) -> Callable[[Sequence[T]], None]:
        def enqueue(given: Sequence[T]) -> None:
            found = {**tensors, **dict(zip(moving, given, strict=True))}
            result = found.pop("y")
            result.copy_(run_on_host(self.pipeline, found)["y"])

        return enqueue


@pytest.mark.parametrize(
    ("how", "base", "shape", "dtype"),
    [("sum", False, (33,), "bf16"), ("sum", True, (1100,), "bf16"), ("max", False, (2, 3), "f32"),
     ("max", True, (5,), "f16"), ("min", False, (), "f32"), ("mul", False, (4,), "f32"), ("mul", True, (8,), "f32")],
)  # fmt: skip
@pytest.mark.every(2)
def test_the_operator(
    how: str, base: bool, shape: tuple[int, ...], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the operator's own definition, which its kernel stands for on a GPU."""
    monkeypatch.setattr(device_ops, "executable", lambda pipeline, *_: OnHost(pipeline))
    monkeypatch.setattr(sorted_keys, "explained", lambda _: nullcontext())
    torch.manual_seed(0)
    graph = uniform(20, 200, busy=100)
    rows = 0.5 + torch.rand(graph.edges + 3, *shape).to(TORCH_DTYPES[dtype])
    rows = rows / (1.0 if how != "mul" else 1.01)
    before = torch.randn(graph.nodes, *shape).to(TORCH_DTYPES[dtype]) if base else None
    given = (before, rows, graph.order, graph.starts, graph.busy, how)
    got, wanted = device_ops.segment_reduce(*given), operators.segment_reduce(*given)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    assert error(got, wanted.double()) < max(2 * torch.finfo(rows.dtype).eps, 2e-6)


@pytest.mark.parametrize(("how", "base", "shape", "dtype"), [("sum", False, (40,), "bf16"), ("max", True, (3,), "f32")])
def test_bounds_that_are_given(
    how: str, base: bool, shape: tuple[int, ...], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows side by side, and rows by an order: neither has a list of busy nodes."""
    monkeypatch.setattr(device_ops, "executable", lambda pipeline, *_: OnHost(pipeline))
    monkeypatch.setattr(sorted_keys, "explained", lambda _: nullcontext())
    torch.manual_seed(0)
    graph = uniform(20, 200, busy=100)
    rows = torch.randn(graph.edges, *shape).to(TORCH_DTYPES[dtype])
    before = torch.randn(graph.nodes, *shape).to(TORCH_DTYPES[dtype]) if base else None
    for order in (None, graph.order):
        given = (before, rows, order, graph.starts, None, how)
        got, wanted = device_ops.segment_reduce(*given), operators.segment_reduce(*given)
        assert error(got, wanted.double()) < max(2 * torch.finfo(rows.dtype).eps, 2e-6)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.every(2)
def test_bags(dtype: str, weighted: bool) -> None:
    torch.manual_seed(0)
    table = torch.randn(50, 24).to(TORCH_DTYPES[dtype])
    starts, indices = torch.tensor([0, 4, 4, 90, 100]), torch.randint(50, (100,))
    shares = torch.randn(100).to(TORCH_DTYPES[dtype]) if weighted else None
    program, given = lookup(table, indices, starts, shares)
    exact = torch.nn.functional.embedding_bag(
        indices, table.double(), starts, mode="sum", include_last_offset=True,
        per_sample_weights=None if shares is None else shares.double(),
    )  # fmt: skip
    (result,) = program.by_role(Role.OUTPUT)
    assert error(run_on_host(program, given)[result.name], exact) < max(2 * torch.finfo(table.dtype).eps, 2e-6)
    for bad in (-1, 50, 2**32):
        wrong = indices.clone()
        wrong[17] = bad
        with pytest.raises(InputError, match=f"is {bad} at edge 17"):
            run_on_host(program, given | {"src": wrong})
    wrong = given["starts"].clone()
    wrong[2] = 95
    with pytest.raises(InputError, match="those of position 2 are 95 to 90"):
        run_on_host(program, given | {"starts": wrong})


def test_rows_too_far_apart_are_refused() -> None:
    torch.manual_seed(0)
    case = gather_sum(8, "bf16", base=False)
    kernel = SegmentsKernel(case.pipeline())
    given = case.given(uniform(20, 100))
    where = {t.name: Where(0, 8, given[t.name].shape[0] if t.name in given else 20) for t in case.pipeline().tensors}
    where["x"] = Where(0, 2**31, 20)
    at = dict.fromkeys(("partials", "arrived", "merged"), 0)
    call = Call(where, at, dump=0, part=kernel.parts(20)[0], encode=lambda *_: b"")
    with pytest.raises(InputError, match="rows of tensor 'x' of pipeline 'ragged' lie 4294967296 bytes apart"):
        kernel.pack(kernel.source(), call)


def test_four_rows_are_under_way_beside_their_weights() -> None:
    kernels = [SegmentsKernel(case.pipeline()) for case in (gather_sum(128, "bf16"), weighted(128, "bf16"))]
    assert [k.code.passes[0].in_flight for k in kernels] == [4, 4]


@pytest.mark.nvrtc
def test_a_last_batch_keeps_no_rows_of_the_one_before() -> None:
    """What it leaves open was kept in local memory: 40 bytes of it for this sum."""
    (report,) = cuda.compile_only(gather_sum(72, "bf16", base=False).pipeline())
    assert report.spills == 0


def test_rows_that_do_not_exist() -> None:
    torch.manual_seed(0)
    graph, case = uniform(20, 100), gather_sum(8, "bf16")
    given = case.given(graph)
    for bad in (20, -1):
        given["src"][37] = bad
        found = f"index 'src' of pipeline 'ragged' is {bad} at edge 37, and the rows .* are 20"
        with pytest.raises(InputError, match=found):
            run_on_host(case.pipeline(), given)
    given["src"][37] = 0
    given["starts"][20] = 1000  # the last: of two positions beside it, either may be found first
    with pytest.raises(InputError, match="bounds 'starts' of pipeline 'ragged': those of position 19 are .* to 1000"):
        run_on_host(case.pipeline(), given)


MUTANTS = {
    "a node's first edge": (
        "over_edges<Pass>(p, t, f, n, s, from + t.edge",
        "over_edges<Pass>(p, t, f, n, s, from + 1 + t.edge",
    ),
    "the last batch": ("if (Pass::IN_FLIGHT > 1 && at < to)", "if (Pass::IN_FLIGHT > 1 && at + 1 < to)"),
    "a part of the teams of a busy node": (
        "first + lanes::thread() / LANES, last",
        "first + lanes::thread() / LANES + 1, last",
    ),
    "the sums of the other warps": ("for (int w = 0; w < WARPS; ++w)", "for (int w = 0; w < 1; ++w)"),
    "the last piece": (
        "for (int k = lanes::thread() / LANES; k < pieces;",
        "for (int k = lanes::thread() / LANES; k < pieces - 1;",
    ),
}


@pytest.mark.parametrize("what", MUTANTS)
@pytest.mark.every(2)
def test_mutants_show(what: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    index = torch.randint(30, (2500,))
    index[:900], index[900:1900] = 3, 4  # two nodes of several pieces
    graph, case = Graph(30, index), gather_sum(16, "f32", base=False)
    given, pipeline = case.given(graph), case.pipeline()
    options = HostRun(mutations=(Mutation("segments.cuh", *MUTANTS[what]),), folder=tmp_path)
    got = run_on_host(pipeline, given, options)["y"]
    assert error(got, case.wanted(graph, given)["y"]) > 1e-3
