"""Operators of ordinary models against eager PyTorch in float64, on sparse and dense inputs, fused and not."""

import pytest
import torch
import torch.nn.functional as F
from sparse_modules import Call, agree, rand
from torch import nn

from tilestream.errors import SparseError, TilestreamError
from tilestream.sparse import Schedule, compile

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support", "ignore:Sparse BSR", "ignore:Sparse invariant"
)


def causal(n, m):
    return torch.ones(n, m, dtype=torch.bool).tril()


ELEMENTWISE = {
    "elu": F.elu,
    "elu_alpha": lambda x: F.elu(x, 0.3),
    "celu": lambda x: F.celu(x, 0.7),
    "selu": F.selu,
    "softplus": F.softplus,
    "softplus_beta": lambda x: F.softplus(30 * x, beta=2, threshold=5),
    "log_sigmoid": F.logsigmoid,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "relu6": lambda x: F.relu6(9 * x),
    "softsign": F.softsign,
    "threshold": lambda x: F.threshold(x, 0.1, -2.0),
    "glu": F.glu,
    "glu_rows": lambda x: F.glu(x, 0),
    "log1p": lambda x: x.abs().log1p(),
    "expm1": torch.expm1,
    "sign": torch.sign,
    "pow3": lambda x: x**3,
    "pow_minus": lambda x: (x + 9) ** -2,
    "leaky": lambda x: F.leaky_relu(x, 2),
    "norm": lambda x: x.norm(),
    "norm_rows": lambda x: x.norm(dim=1, keepdim=True),
    "norm1": lambda x: x.norm(1, dim=0),
    "norm_inf": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=-1),
    "normalize": lambda x: F.normalize(x, dim=1),
    "var": lambda x: x.var(0),
    "std": lambda x: x.std(1, correction=0),
    "logsumexp": lambda x: x.logsumexp(1),
    "gt": lambda x: (x > 0.2).double(),
    "ge": lambda x: (x >= 0).double(),
    "eq": lambda x: (x == 0).double(),
    "lt_tensor": lambda x: x * (x < x.mean(0)),
    "and": lambda x: ((x > -1) & (x < 1)).double() * x,
    "or_not": lambda x: (~((x > 1) | (x < -1))).double(),
    "where": lambda x: torch.where(x > 0, x.exp(), x - 1),
    "where_numbers": lambda x: torch.where(x > 0, 2.0, -1.0),
    "where_fill": lambda x: torch.where(x > 0, x, 7.0),
    "masked_fill": lambda x: x.masked_fill(x < 0, 3.0),
    "fill_inf": lambda x: x.masked_fill(x < -1.5, -torch.inf).softmax(1),
    "any": lambda x: (x > 1).any(1).double(),
    "all": lambda x: (x > -1).all(0).double(),
    "clamp_tensor": lambda x: x.clamp(x.mean(), x.amax()),
    "group_norm": lambda x: F.group_norm(x, 2),
    "topk_mask": lambda x: x * torch.zeros_like(x).scatter(-1, x.topk(2, -1).indices, 1.0),
    "topk_values": lambda x: x.topk(3, dim=0).values,
    "topk_least": lambda x: x * (x >= x.topk(2, -1).values[:, -1:]),
    "fill_finite": lambda x: x.masked_fill(x < 0, -1e9),
    "in_place": lambda x: (x * 2).relu_().add_(1),
    "ones_row": lambda x: x @ torch.ones(x.shape[1], 1, dtype=x.dtype),
    "lerp": lambda x: x.lerp(x * x, 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x.exp(), value=2),
    "addcdiv": lambda x: torch.addcdiv(x, x, x.exp()),
    "flip": lambda x: x.flip(0, 1) + x,
    "cumsum": lambda x: x.cumsum(0) - x.cumsum(1),
    "tril": lambda x: x @ torch.ones(4, 4, dtype=x.dtype).tril(),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("layout", ["dense", "sparse"])
@pytest.mark.every(3)
def test_operators(name, layout):
    x = rand(6, 4, density=0.5) if name not in ("topk_mask", "topk_values", "topk_least") else rand(6, 4)
    agree(Call(ELEMENTWISE[name]), x if layout == "dense" else x.to_sparse())


def test_batch_norm_in_eval_mode():
    for module, x in ((nn.BatchNorm1d(4), rand(6, 4)), (nn.BatchNorm2d(3), rand(2, 3, 2, 2))):
        module = module.double()
        with torch.no_grad():
            module.running_mean.copy_(rand(len(module.running_mean)))
            module.running_var.copy_(rand(len(module.running_var)).abs() + 0.5)
        agree(module.eval(), x)


def test_multihead_attention():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=True).double().eval()
    mask = ~causal(5, 5)
    for need in (False, True):
        agree(Call(lambda x, need=need: module(x, x, x, attn_mask=mask, need_weights=need)[0]), rand(3, 5, 8))
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double().eval()
    agree(layer, rand(2, 5, 8))


@pytest.mark.parametrize("kind", ["constant", "input", "sparse", "causal"])
def test_attention_keeps_what_a_boolean_mask_keeps(kind):
    """A boolean mask is no number to be added: the error was 0.42."""
    q, k, v = rand(2, 5, 4), rand(2, 5, 4, seed=1), rand(2, 5, 4, seed=2)
    mask = causal(5, 5)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    if kind == "constant":
        module, given = Call(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)), (q, k, v)
    elif kind == "causal":
        module, given = Call(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)), (q, k, v)
    else:
        module = Call(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m))
        given = (q, k, v, mask.to_sparse() if kind == "sparse" else mask)
    for fuse in ("none", "all"):
        program = compile(module, *given, schedule=Schedule(fuse=fuse))
        torch.testing.assert_close(program.run(*given).output, wanted, rtol=1e-9, atol=1e-9)


def test_boolean_inputs_and_buffers():
    mask = rand(4, 4) > 0
    agree(Call(lambda x, m: x.masked_fill(m, -torch.inf).exp()), rand(4, 4), mask)
    agree(Call(lambda x, m: x * m + m.float()), rand(4, 4), mask)
    agree(Call(lambda x, m: torch.where(m.t()[None], x, -x)), rand(4, 4), mask)
    agree(Call(lambda x, m: x.masked_fill(~m.unsqueeze(0), -1e9).softmax(-1)), rand(4, 4), mask | torch.eye(4).bool())


def test_one_column_and_one_element():
    """``nn.Linear(n, 1)`` has a bias of one element; programs have no dimensions of size 1."""
    torch.manual_seed(0)
    agree(nn.Linear(5, 1).double(), rand(4, 5))
    agree(nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 3)).double(), rand(4, 5))
    agree(nn.Linear(1, 1).double(), rand(1, 1))
    agree(Call(lambda x, y: x * y + y), rand(3, 2), rand(1))
    agree(Call(lambda x, y: x @ y), rand(1, 1), rand(1, 4))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_layer_norm_of_a_sparse_product(layout):
    """A COO or CSC product stores no row for an empty one; the norm makes every row."""
    norm = nn.LayerNorm(3).double()
    a = rand(6, 6, density=0.3)
    a[2] = 0
    agree(Call(lambda a, x: norm(torch.sparse.mm(a, x))), a.to_sparse(layout=layout), rand(6, 3))


def test_sparse_functions():
    a, x, y = rand(5, 6, density=0.4), rand(5, 3), rand(3, 6, seed=2)
    stored = a.to_sparse_csr()
    wanted = torch.sparse.sampled_addmm(stored, x, y, beta=0.5, alpha=2.0).to_dense()
    function = Call(lambda a, x, y: torch.sparse.sampled_addmm(a, x, y, beta=0.5, alpha=2.0))
    for fuse in ("none", "all"):
        got = compile(function, stored, x, y, schedule=Schedule(fuse=fuse)).run(stored, x, y)
        torch.testing.assert_close(got.output, wanted)
    coo = a.to_sparse()
    for sparse in (lambda a: torch.sparse.sum(a, 0), torch.sparse.sum, lambda a: torch.sparse.softmax(a, 1)):
        wanted = sparse(coo)
        wanted = wanted.to_dense() if wanted.is_sparse else wanted
        torch.testing.assert_close(compile(Call(sparse), coo).run(coo).output, wanted)


def test_what_is_stored_as_zero_is_sampled_but_masks_nothing():
    a = torch.sparse_coo_tensor([[0, 0, 1], [0, 1, 1]], [1.0, 0.0, 2.0], (2, 2), dtype=torch.float64).coalesce()
    x, y = rand(2, 3), rand(3, 2)
    csr = a.to_sparse_csr()
    got = compile(Call(lambda a, x, y: torch.sparse.sampled_addmm(a, x, y)), csr, x, y).run(csr, x, y)
    torch.testing.assert_close(got.output, torch.sparse.sampled_addmm(csr, x, y).to_dense())
    wanted = (x @ y).masked_fill(a.to_dense() == 0, -torch.inf).softmax(1)
    got = compile(Call(lambda a, x, y: (x @ y).masked_fill(a == 0, -torch.inf).softmax(1)), a, x, y).run(a, x, y)
    torch.testing.assert_close(got.output, wanted)


def test_masks_that_are_added():
    x, mask = rand(4, 4), (rand(4, 4) > 0) | torch.eye(4).bool()
    agree(Call(lambda x, m: (x + torch.zeros_like(x).masked_fill(~m, -torch.inf)).softmax(-1)), x, mask)
    with pytest.raises(SparseError, match="minus infinity|-inf"):
        compile(
            Call(lambda x, m, n: x.masked_fill(~m, -torch.inf) + x.masked_fill(~n, -torch.inf)),
            rand(4, 4),
            mask,
            mask.t(),
        )


@pytest.mark.parametrize("block", [(2, 3), (3, 1), (2, 2)])
def test_blocks_that_are_not_square(block):
    a = rand(6, 6, density=0.3)
    agree(Call(lambda a, x: a @ x), a.to_sparse_bsr(block), rand(6, 4))


def test_writing_in_place_what_another_name_reads():
    def through_a_view(x):
        y = x * 1
        y[:, :2].mul_(2)
        return y

    agree(Call(through_a_view), rand(4, 4))
    agree(Call(lambda x: torch.relu_(x + 0).mul_(2)), rand(4, 4))


@pytest.mark.parametrize("wild", [lambda y, x: y / x, lambda y, x: y * (x * x).reciprocal()])
def test_nothing_times_what_is_not_finite(wild):
    """Where a union finds no operand of a quotient, a factor that is 0 there does not make 0 of 0 / 0."""
    a, x = torch.eye(5, dtype=torch.float64), rand(5).abs() + 1
    a[3] = 0
    agree(Call(lambda a, x: torch.minimum(wild(a @ x, x) * (x > 0), x - 5)), a.to_sparse(), x)


def filled(x):
    out = torch.zeros(3, dtype=x.dtype)
    out.index_add_(0, torch.tensor([0, 1, 2]), x)
    return x * 2 if out.sum() > 0 else x - 1


@pytest.mark.parametrize(
    ("function", "x", "message"),
    [
        (filled, rand(3), r"looks at a value.*test_sparse_operators.py:\d+"),
        (lambda x: x + torch.rand(3), rand(3), r"test_sparse_operators.py:\d+\) draws random numbers"),
        (lambda x: x[x > 0], rand(3), r"test_sparse_operators.py:\d+"),
        (lambda x: x * 2, rand(3).to(torch.complex128), "complex"),
        (lambda x: x * 1j, rand(3), "complex"),
    ],
)
def test_what_would_be_wrong_is_refused(function, x, message):
    with pytest.raises(TilestreamError, match=message):
        compile(Call(function), x)


def test_a_mask_that_is_returned_stays_minus_infinity():
    agree(Call(lambda x, m: x.masked_fill(m == 0, -torch.inf).reshape(2, 8)), rand(4, 4), (rand(4, 4) > 0).double())
    with pytest.raises(SparseError, match="minus infinity is in it"):
        compile(Call(lambda x, m: torch.cat([x.masked_fill(m == 0, -torch.inf), x])), rand(4, 4), rand(4, 4))
