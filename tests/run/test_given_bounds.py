"""Bags and segments whose bounds are given: what becomes one kernel, values and gradients as eager's, bad input."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from given_bounds import FEATURES, ROWS, Bag, Csr, Jagged, Reduced, run
from ragged_programs import Graph
from test_ragged_regions import H200, OPTIONS, Placed, found, ragged
from torch import Tensor, nn
from torch.nn import functional as F

from tilestream.errors import InputError
from tilestream.graph.rewrites.busy import busy_list
from tilestream.graph.rewrites.operators import SEGMENT_REDUCE, SEGMENTS
from tilestream.kernels.families import why_no_kernel
from tilestream.options import Options
from tilestream.plan import messages
from tilestream.plan.analyse import analyse
from tilestream.plan.ragged import plan
from tilestream.run import oracle
from tilestream.run.backend import tilestream
from tilestream.run.made_up import random_arguments

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sums pay, too."""
    monkeypatch.setattr(messages, "atomics_us", lambda _: 1e9)


def bags(dtype: torch.dtype = torch.int64, closed: bool = False) -> tuple[Tensor, Tensor]:
    """Indices, and where bags begin: some are empty, also the last; one has more than 64 rows."""
    torch.manual_seed(1)
    starts = [0, 3, 3, 10, 90, 100]
    return torch.randint(ROWS, (100,)).to(dtype), torch.tensor(starts if closed else starts[:-1] + [100]).to(dtype)


def check(module: nn.Module, inputs: tuple[Tensor, ...], training: bool, fast: Any = None) -> Any:
    """As near to float64 as twice what eager is."""
    fast = Placed(module, training) if fast is None else fast
    wide = copy.deepcopy(module).double()
    doubles = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    ours, own = run(fast, module, inputs, training), run(module, module, inputs, training)
    exact = run(wide, wide, doubles, training)
    assert torch.equal(ours.isnan(), exact.isnan()) and torch.equal(ours.isinf(), exact.isinf())
    errors = [oracle.error(x.nan_to_num(0, 0, 0), exact.nan_to_num(0, 0, 0)) for x in (ours, own)]
    assert errors[0] <= max(2 * errors[1], 3e-7), f"error {errors[0]:.2e}, eager's {errors[1]:.2e}"
    return fast


def test_a_bag_is_one_region_without_a_sort() -> None:
    f = found(Bag(), *bags())
    (cut,) = ragged(f)
    assert not f.graph.graph.find_nodes(op="call_function", target=SEGMENTS)
    assert {t.name: t.dtype for t in cut.region.program.tensors}["src"] == "i64"
    assert not why_no_kernel(plan(cut.region, H200, OPTIONS).chosen.pipeline)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("how", [{}, {"include_last_offset": True}, {"padding_idx": 3}], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.every(8)
def test_bags(mode: str, how: dict[str, Any], dtype: torch.dtype) -> None:
    module = Bag(mode, **how)
    inputs = bags(dtype, closed="include_last_offset" in how)
    if "padding_idx" in how:
        inputs[0][:3] = 3  # a bag of padding alone
    assert "segments" in check(module, inputs, False).runners
    check(module.bfloat16(), inputs, False)


@pytest.mark.parametrize("how", [{}, {"padding_idx": 3}], ids=str)
def test_weighted_bags(how: dict[str, Any]) -> None:
    inputs = (*bags(), torch.randn(100))
    check(Bag(**how), inputs, False)
    check(Bag(**how).bfloat16(), (*inputs[:2], inputs[2].bfloat16()), False)


def test_matrices_of_indices_and_empty_bags_alone() -> None:
    class Matrix(Bag):
        def forward(self, indices: Tensor) -> Tensor:
            return self.net(indices)

    check(Matrix("mean"), (torch.randint(ROWS, (7, 5)),), False)
    nothing = torch.zeros(0, dtype=torch.int64)
    check(Bag(), (nothing, torch.zeros(4, dtype=torch.int64)), False)


def test_dynamic_bags() -> None:
    module = Bag("mean")
    fast = Placed(module, False, dynamic=True)
    for count in (40, 57, 80):
        inputs = torch.randint(ROWS, (count,)), torch.arange(0, count, 5)
        check(module, inputs, False, fast)
    assert fast.runners == ["segments"]


KEPT = {
    "in training": (Bag("mean"), True),
    "of another dtype": (Bag().double(), False),
    "of more than 1024": (nn.EmbeddingBag(3, 1032), False),
}


@pytest.mark.parametrize("why", KEPT)
def test_what_stays_says_why(why: str) -> None:
    module, training = KEPT[why]
    torch._dynamo.reset()
    made = analyse(module, bags(), Options(), H200, training=training)
    assert any(why in e.reason and "_embedding_bag" in e.op for e in made.exclusions)


def test_bags_and_a_layer_compiled() -> None:
    """Beside Inductor's kernels; the gather between them is in the kernel."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.net = Bag("mean"), nn.Linear(FEATURES, 4)

        def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
            return self.net(self.bag(indices, offsets))

    module = Model()
    torch._dynamo.reset()
    fast = torch.compile(module, backend=tilestream, options={"target": "reference"})
    check(module, bags(), False, fast)
    torch._dynamo.reset()
    check(module, bags(), True, torch.compile(module, backend=tilestream, options={"target": "reference"}))


@pytest.mark.parametrize("offsets", [[0, 40, 20], [0, 40, 101]])
def test_bad_offsets(offsets: list[int]) -> None:
    fast = Placed(Bag(), False)
    with torch.no_grad(), pytest.raises(InputError, match="position 1|to 101|fall"):
        fast(bags()[0], torch.tensor(offsets))


@pytest.mark.parametrize("index", [-1, ROWS, 2**32])
def test_bad_indices(index: int) -> None:
    fast, (indices, offsets) = Placed(Bag(), False), bags()
    indices[7] = index
    with torch.no_grad(), pytest.raises((InputError, IndexError)):
        fast(indices, offsets)


@pytest.mark.parametrize("how", ["sum", "mean", "max", "min", "prod"])
@pytest.mark.parametrize("by", ["lengths", "offsets"])
@pytest.mark.parametrize("initial", [None, 0.25])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.every(8)
def test_segment_reduce(how: str, by: str, initial: float | None, dtype: torch.dtype) -> None:
    lengths = torch.tensor([3, 0, 70, 7, 0]).to(dtype)
    bounds = lengths if by == "lengths" else F.pad(lengths.cumsum(0, dtype=dtype), (1, 0))
    rows = torch.randn(80, 6)
    module = Reduced(how, by, **({} if initial is None else {"initial": initial}))
    fast = check(module, (rows, bounds), False)
    assert any(n.target is SEGMENT_REDUCE for n in fast.graphs[0].graph.nodes) or fast.runners
    check(module, (rows[:, 0], bounds), False)


@pytest.mark.parametrize("module", [Bag("mean"), Reduced("sum", "lengths")], ids=["bag", "segments"])
def test_in_training_they_are_pytorchs(module: nn.Module) -> None:
    inputs = bags() if isinstance(module, Bag) else (torch.randn(80, 6), torch.tensor([3, 10, 60, 7]))
    assert not check(module, inputs, True).runners


def test_long_segments_are_listed() -> None:
    """As the sort lists them, for whole CTAs; bounds of short ones have no list."""
    for segments in (5, 150):
        given = torch.randn(3000, 3), torch.full((segments,), 3000 // segments)
        (cut,) = ragged(found(Reduced("sum", "lengths"), *given))
        assert ("starts.busy" in [t.name for t in cut.region.program.tensors]) == (segments == 5)
    starts = F.pad(torch.tensor([0, 64, 65, 257, 2614]).cumsum(0), (1, 0)).int()
    made = busy_list(lambda target, *args, **more: target(*args, **more), starts, 3000 // 64, 4, starts.device)
    graph = Graph(5, torch.arange(5).repeat_interleave(starts.diff()))
    count = int(graph.busy[0])
    assert made[0] == count and len(made) <= len(graph.busy)
    items, wanted = (each[1 : 1 + 2 * count].view(-1, 2).tolist() for each in (made, graph.busy))
    assert sorted(items) == sorted(wanted)


def test_gathered_segments_count_from_the_end() -> None:
    class Gathered(nn.Module):
        def forward(self, x: Tensor, index: Tensor, lengths: Tensor) -> Tensor:
            return torch.segment_reduce(x[index] * 2, "max", lengths=lengths)

    inputs = torch.randn(9, 4), torch.tensor([0, -1, -9, 8, 3]), torch.tensor([2, 3])
    assert check(Gathered(), inputs, False).runners == ["segments"]


@pytest.mark.parametrize("lengths", [[3, -1, 78], [3, 0, 70], [3, 0, 90]])
def test_bad_lengths(lengths: list[int]) -> None:
    module = Reduced("sum", "lengths")
    fast = Placed(module, False)
    with torch.no_grad(), pytest.raises((InputError, RuntimeError)):
        fast(torch.randn(80, 6), torch.tensor(lengths))


@pytest.mark.parametrize("how", ["sum", "mean", "amax", "amin"])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.every(3)
def test_jagged_tensors_are_not_padded(how: str, keepdim: bool) -> None:
    """PyTorch pads each segment to as many rows as there are in all."""
    lengths = torch.tensor([3, 40, 7] if how == "mean" else [3, 0, 40, 7])
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    module = Jagged(how, keepdim and how != "mean")
    fast = check(module, (torch.randn(50, 6), offsets), False)
    assert fast.runners == ["segments"]
    assert not any("padded" in str(n.target) for g in fast.graphs for n in g.graph.nodes)


def sparse(rows: int = 12, columns: int = 9) -> Tensor:
    torch.manual_seed(0)
    dense = torch.randn(rows, columns) * (torch.rand(rows, columns) < 0.3)
    dense[4] = 0
    return dense.to_sparse_csr()


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("select", [False, True])
def test_a_csr_product_by_its_own_tensors(select: bool) -> None:
    """As ``A @ x``, which Dynamo does not capture; one region without a sort."""
    matrix, x = sparse(), torch.randn(9, 6)
    fast = check(Csr(matrix, select), (x,), False)
    assert fast.runners.count("segments") == 1
    torch.testing.assert_close(run(fast, Csr(matrix, select), (x,), False), matrix @ x)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("coo", [False, True])
def test_dynamo_captures_no_sparse_tensor(coo: bool) -> None:
    """What docs/gnn.md says: PyTorch runs such a function as it is, and no graph of it comes to a backend."""
    graphs: list[Any] = []

    def product(a: Tensor, x: Tensor) -> Tensor:
        return torch.relu(a @ torch.sin(x))

    matrix, x = sparse(), torch.randn(9, 6)
    given = matrix.to_sparse_coo().coalesce() if coo else matrix
    torch._dynamo.reset()
    made = torch.compile(product, backend=lambda graph, _: graphs.append(graph) or graph.forward)(given, x)
    torch.testing.assert_close(made, product(given, x))
    assert not graphs


def test_values_that_are_made_up_are_bags() -> None:
    (cut,) = ragged(found(Bag("mean"), *bags()))
    values = random_arguments(cut.region)
    (made,) = cut.region.graph(*values)
    assert made.isfinite().all() and made.abs().sum() > 0
