"""Values that are easily wrong: truth values as numbers, dtypes, rows of masks and of operands that hold nothing."""

import pytest
import torch
import torch.nn.functional as F
from sparse_modules import Call, agree, rand

from tilestream.errors import SparseError
from tilestream.sparse import Schedule, compile
from tilestream.sparse.cpu import CpuProgram
from tilestream.sparse.spec.arithmetic import rounded

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

N = 6
X, Q = rand(N, N, seed=3), rand(N, 4, seed=4)
A, B = rand(N, N, seed=1) > 0, rand(N, N, seed=2) > 0.3
A[2] = B[2] = A[4] = False
A[:, 0] = False
NONE = torch.zeros(N, N, dtype=torch.bool)
FULL = A | torch.eye(N, dtype=torch.bool)
SPARSE = (X * A).abs()


def attend(q, mask):
    return F.scaled_dot_product_attention(q[None], q[None], q[None], attn_mask=mask[None])[0]


def by_hand(x):
    powers = (x - x.amax(-1, keepdim=True)).exp()
    return powers / powers.sum(-1, keepdim=True)


TRUTHS = {
    "attention": (lambda q, a, b: attend(q, a + b), Q, A, B),
    "sum": (lambda a, b: (a + b).sum(1), A, B),
    "times": (lambda x, a, b: (a + b) * x, X, A, B),
    "product": (lambda x, a, b: (a * b) * x + (a | b), X, A, B),
    "three": (lambda x, a, b: (a + b + a).float().double() @ x, X, A, B),
    "folds": (lambda a, b, x: (a + b).any(1) * x[:, 0] + (a + b).all(0) * 1.0 + (a ^ b).sum(0) / 2, A, B, X),
    "where": (lambda x, a, b: torch.where(a + b, x, 1.0).softmax(-1), X, A, B),
    "joined": (lambda a, b, x: torch.cat([a, b], 1).sum(1) * x[:, 0] + torch.stack([a, b]).sum(0).sum(0), A, B, X),
    "whole numbers": (lambda a, b, x: (a.int() + b.long()) * x, A, B, X),
    "in place": (lambda a, b, x: a.clone().logical_or_(b).double().add_(a) * x, A, B, X),
    "made": (lambda a, x: (~torch.zeros_like(a) & a).double() * x, A, X),
    "type_as": (lambda a, b, x: (a + b).type_as(x) @ x, A, B, X),
}


@pytest.mark.parametrize("name", TRUTHS)
@pytest.mark.every(3)
def test_sums_of_truth_values_are_truth_values(name):
    function, *inputs = TRUTHS[name]
    agree(Call(function), *inputs)


EMPTIED = {
    "attention": (attend, Q, A),
    "attention of nothing": (attend, Q, NONE),
    "attention, added": (lambda q, a: attend(q, torch.zeros_like(a, dtype=q.dtype).masked_fill(~a, -torch.inf)), Q, A),
    "infinite": (lambda x, a: x.masked_fill(~a, -torch.inf).softmax(-1), X, A),
    "infinite, all": (lambda x, a: x.masked_fill(~a, -torch.inf).softmax(-1) @ x, X, NONE),
    "of two": (lambda x, a, b: x.masked_fill(~(a | b), -torch.inf).softmax(-1), X, A, B),
    "columns": (lambda x, a: x.masked_fill(~a, -torch.inf).softmax(0), X, A),
    "large": (lambda x, a: x.masked_fill(~a, -1e9).softmax(-1), X, A),
    "large, all": (lambda x, a: x.masked_fill(~a, -1e9).softmax(-1) @ x, X, NONE),
    "large, logarithm": (lambda x, a: x.masked_fill(~a, -1e9).log_softmax(-1), X, A),
    "logarithm": (lambda x, a: x.masked_fill(~a, -torch.inf).log_softmax(-1), X, A),
    "by hand": (lambda x, a: by_hand(x.masked_fill(~a, -torch.inf)), X, A),
    "twice": (lambda x, a, b: x.masked_fill(~a, -torch.inf).masked_fill(~b, -torch.inf).softmax(-1), X, FULL, FULL.T),
    "twice, large": (lambda x, a, b: x.masked_fill(~a, -1e9).masked_fill(~b, -1e9).softmax(-1), X, A, B),
    "twice, both ways": (lambda x, a, b: x.masked_fill(~a, -torch.inf).masked_fill(b, -torch.inf).softmax(-1), X, A, B),
    "scaled": (lambda x, a: (x.masked_fill(~a, -torch.inf) * 0.3).softmax(-1), X, A),
    "added": (lambda x, a: (x + torch.zeros_like(x).masked_fill(~a, -torch.inf)).softmax(-1), X, A),
    "heads": (lambda x, a: (x[None].repeat(2, 1, 1)).masked_fill(~a, -torch.inf).softmax(-1), X, A),
    "padding": (lambda x, a: x.masked_fill(~a[:1], -torch.inf).softmax(-1), X, NONE),
    "whole rows": (lambda x, a: x.masked_fill(~a[:, :1], -torch.inf).softmax(-1), X, A),
    "largest": (lambda x, a: x.masked_fill(~a, -torch.inf).amax(-1), X, A),
    "logsumexp": (lambda x, a: x.masked_fill(~a, -torch.inf).logsumexp(-1), X, A),
    "nothing over nothing": (lambda a: a / a.sum(1, keepdim=True), SPARSE.to_sparse()),
    "over one": (lambda a: a / a.sum(1, keepdim=True).clamp(min=1), SPARSE.to_sparse_csr()),
    "a mask's own sum": (
        lambda x, m: x.masked_fill(~m, -torch.inf).softmax(-1) + m.double() / m.sum(1, keepdim=True), X, A
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EMPTIED)
@pytest.mark.every(3)
def test_rows_that_a_mask_empties_are_what_pytorch_makes_of_them(name):
    function, *inputs = EMPTIED[name]
    agree(Call(function), *inputs, equal_nan=True)


@pytest.mark.parametrize("name", ["attention", "infinite", "large"])
def test_emptied_rows_by_the_specification_and_in_compiled_loops(name):
    function, *inputs = EMPTIED[name]
    program = compile(Call(function), *inputs, schedule=Schedule(fuse="all"))
    found = [program.run(*inputs, engine="spec").output]
    found += [CpuProgram(program).run(*inputs).output] if name == "large" else []
    for got in found:
        torch.testing.assert_close(got, function(*inputs), rtol=1e-9, atol=1e-9, equal_nan=True)


def test_sparse_softmax_of_rows_that_store_nothing():
    stored = (X * A).to_sparse()
    for fuse in ("none", "all"):
        program = compile(Call(lambda a: torch.sparse.softmax(a, 1)), stored, schedule=Schedule(fuse=fuse))
        wanted = torch.sparse.softmax(stored, 1).to_dense()
        for got in (program.run(stored).output, CpuProgram(program, compiled=False).run(stored).output):
            torch.testing.assert_close(got, wanted)


def test_a_mask_that_empties_rows_wants_a_program_that_expects_it():
    function, x, _ = EMPTIED["infinite"]
    filled = compile(Call(function), x, FULL)
    assert filled.run(x, FULL).tensors["softmax"].nnz == int(FULL.sum())  # nothing is stored but what the mask keeps
    with pytest.raises(SparseError, match="leaves nothing of a row"):
        filled.run(x, A)
    with pytest.raises(SparseError, match="leaves nothing of a row"):
        CpuProgram(filled, compiled=False).run(x, A)
    emptied = compile(Call(function), x, A)
    for mask in (A, FULL, B, NONE):
        torch.testing.assert_close(emptied.run(x, mask).output, function(x, mask), equal_nan=True)


def test_a_quotient_stays_sparse_where_the_divisor_cannot_be_zero():
    stored = SPARSE.to_sparse()
    program = compile(Call(lambda a: a / (a.abs().sum(1, keepdim=True) + 1e-6)), stored)
    assert program.run(stored).tensors[program.outputs[0].tensor].nnz == stored._nnz()


CASTS = {
    "half": (lambda x: (x.half() * 3).to(x.dtype), 2e-3),
    "bfloat16": (lambda x: torch.relu(x.bfloat16() + 1).double(), 2e-2),
    "overflow": (lambda x: (x * 1e5).half(), 0),
    "float": (lambda x: x.float(), 0),
    "to": (lambda x: x.to(torch.float16) @ x.t().to(torch.float16), 4e-3),
}


@pytest.mark.parametrize("name", CASTS)
def test_casts_round(name):
    function, tolerance = CASTS[name]
    x = rand(5, 4, seed=9)
    x[0, 0] = torch.nan
    for fuse in ("none", "all"):
        program = compile(Call(function), x, schedule=Schedule(fuse=fuse))
        for got in (program.run(x).output, CpuProgram(program, compiled=False).run(x).output):
            torch.testing.assert_close(got, function(x).double(), rtol=tolerance, atol=0, equal_nan=True)


def test_rounding_is_that_of_pytorch():
    x = rand(2000, seed=1) * 10.0 ** torch.randint(-12, 8, (2000,), generator=torch.Generator().manual_seed(1))
    edges = [0.0, torch.inf, -torch.inf, torch.nan, 65519.99, 65520, 6e-8, 2.9e-8, 1e-45, 1e-40, 3.39e38, 3.4e38, 1e300]
    x = torch.cat([x, torch.tensor(edges, dtype=torch.float64)])
    for bits, dtype in ((24, torch.float32), (11, torch.float16), (8, torch.bfloat16)):
        wanted = x.to(dtype).double()
        torch.testing.assert_close(torch.from_numpy(rounded(x.numpy(), bits)), wanted, rtol=0, atol=0, equal_nan=True)


REFUSED = {
    "overflow": (lambda x, a: (a.to(torch.int8) + a.to(torch.int8)) * x, "overflow"),
    "dropout": (lambda x, a: F.dropout(x, 0.5, True) * a, "eval"),
    "masked twice": (lambda x, a: (x.masked_fill(~a, -torch.inf) * 2).masked_fill(~a, -torch.inf).softmax(-1), "&"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused(name):
    function, words = REFUSED[name]
    with pytest.raises(SparseError, match=words):
        compile(Call(function), X, A)
