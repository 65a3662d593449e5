"""What has no lowering of its own: taken apart by PyTorch, run by it between regions, or refused with a reason."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sparse_modules import Call, agree, rand

from tilestream.errors import SparseError, TilestreamError
from tilestream.sparse import compile
from tilestream.sparse.cpu import CpuProgram
from tilestream.sparse.orders.pog import PartialOrder

X, A = rand(6, 4), rand(6, 6, density=0.4)


def test_composite_operators_are_compiled_whole():
    program = agree(Call(lambda a, x: F.cosine_similarity(torch.sparse.mm(a, x), x)), A.to_sparse(), X)
    assert not program.eager
    assert not agree(Call(lambda x: F.cross_entropy(x, torch.tensor([0, 3, 1, 2, 2, 0]))), X).eager


def test_what_torch_runs_between_regions_is_announced():
    program = agree(Call(lambda a, x: torch.sparse.mm(a, x).sort(1).values.relu()), A.to_sparse(), X)
    (step,) = program.eager
    assert step.operator == "aten.sort.default" and step.source.startswith("test_sparse_decompose.py:")
    assert "aten.sort.default(mm) [6, 4], by PyTorch, dense and not timed" in str(program)


def test_a_step_of_torch_sees_what_a_mask_fills_with():
    mask = rand(6, 4, density=0.5) != 0
    mask[:, 0] = True
    agree(Call(lambda x, m: x.masked_fill(~m, -torch.inf).sort(1).values.exp()), X, mask)
    agree(Call(lambda x, m: x.masked_fill(~m, -torch.inf).argmax(1)), X, mask)


def test_a_step_of_torch_is_refused_where_a_tensor_is_too_large_to_be_dense():
    large = torch.sparse_coo_tensor(torch.tensor([[0, 99999], [0, 99999]]), torch.ones(2).double(), (100000, 100000))
    with pytest.raises(SparseError, match=r"aten.sort.default \(test_sparse_decompose.py:\d+\).*100000, 100000"):
        compile(Call(lambda x: x.sort(1).values), large)
    kept = compile(Call(lambda x: (x.triu() @ torch.ones(100000, 1, dtype=x.dtype)).sum()), large)
    assert kept.run(large).output == 2 and not kept.eager


def test_values_that_a_step_refuses_are_a_typed_error():
    program = compile(Call(lambda x, i: x.gather(1, i.long()[:, None])), X, torch.zeros(6))
    for run in (program.run, CpuProgram(program, compiled=False).run):
        with pytest.raises(SparseError, match=r"aten.gather.default \(test_sparse_decompose.py:\d+\): index"):
            run(X, torch.full((6,), 9.0))


def test_places_have_the_shape_of_places():
    """``values * (places == n)`` was refused with shapes that were not the user's."""

    def experts(scores):
        values, places = scores.topk(2)
        return torch.stack([(values * (places == n)).sum(-1) for n in range(4)], 1)

    agree(Call(experts), X)
    for k in (2, 4):
        gate = Call(lambda x, k=k: torch.zeros_like(x).scatter(1, x.topk(k).indices, x.topk(k).values.softmax(-1)))
        assert not agree(gate, X).eager
    agree(Call(lambda x: x.scatter(0, x.topk(3, 0).indices, x.topk(3, 0).values.exp())), X)
    square = rand(4, 4)
    agree(Call(lambda x: torch.zeros_like(x).scatter(0, x.topk(1 + 1, 1).indices.t().contiguous().t(), 1.0)), square)
    agree(Call(lambda x: torch.zeros(4, 9, dtype=x.dtype).scatter(1, x.topk(2, 1).indices, 1.0)), square)
    agree(Call(lambda x: torch.zeros_like(x).scatter(1, x.topk(2).indices, 2.0, reduce="add")), square)


def test_the_largest_and_where_it_is():
    """``x.max(-1).values`` was an exception: 'View' object is not subscriptable."""
    assert not agree(Call(lambda x: x.max(-1).values), X).eager
    agree(Call(lambda x: (x.max(0).indices, x.min(1, keepdim=True).values, torch.min(x, x * x))), X)


def test_random_numbers_are_not_frozen():
    """They were drawn once, when the program was compiled."""
    for draws in (lambda x: x + torch.randn(4), lambda x: F.gumbel_softmax(x), lambda x: x.bernoulli(0.5)):
        with pytest.raises(SparseError, match=r"test_sparse_decompose.py:\d+\) draws random numbers"):
            compile(Call(draws), X)


def test_the_epsilon_of_rms_norm_is_the_dtypes():
    x = rand(6, 4) * 1e-5
    agree(Call(lambda x: F.rms_norm(x, (4,))), x)


@pytest.mark.parametrize("heads", [(4, 2), (6, 1), (2, 2)])
def test_grouped_queries(heads):
    queries, keys = (rand(2, n, 5, 8, seed=n) for n in heads)
    for options in ({}, {"is_causal": True}, {"attn_mask": torch.ones(5, 5).tril().bool()}):
        module = Call(lambda q, k, o=options: F.scaled_dot_product_attention(q, k, k * 2, enable_gqa=True, **o))
        assert not agree(module, queries, keys).eager
    mask = rand(2, heads[0], 5, 5, seed=7)
    agree(
        Call(lambda q, k, m: F.scaled_dot_product_attention(q, k, k, attn_mask=m, enable_gqa=True)), queries, keys, mask
    )


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("...ij,jk->...ik", [(2, 3, 4), (4, 5)]),
        ("...ij,...jk", [(2, 3, 4), (2, 4, 5)]),
        ("i...,i->...", [(3, 2, 4), (3,)]),
        ("ii->i", [(4, 4)]),
    ],
)
def test_einsums_with_an_ellipsis_or_a_diagonal(equation, shapes):
    agree(Call(lambda *xs: torch.einsum(equation, *xs)), *[rand(*s, seed=n) for n, s in enumerate(shapes)])


def test_triangles_diagonals_and_borders():
    x = rand(5, 4, density=0.6)
    for layout in (x, x.to_sparse()):
        for k in (-2, 0, 1):
            agree(Call(lambda x, k=k: (x.tril(k), x.triu(k), x.diagonal(k), x.diagonal(k, 1, 0))), layout)
        agree(Call(lambda x: (F.pad(x, (1, 2, 0, 1)), F.pad(x, (-1, 1)), F.pad(x, (1, 1), value=2.0))), layout)
        agree(Call(lambda x: (torch.diag_embed(x, 1), torch.diag_embed(x, -2, 0, 2), x[0].diag())), layout)
    agree(Call(lambda x: F.pad(x, (0, 0, 1, 0))), rand(1, 4))


def test_writes_into_a_part_of_a_tensor():
    def assigned(x):
        y = x.clone()
        y[1:3, ::2] = 5.0
        y[0] += x[1]
        return y * 2 + y.t().sum()

    agree(Call(assigned), X)


def summed(x):
    out = torch.zeros(3, dtype=x.dtype)
    out.index_add_(0, torch.tensor([0, 2, 2]), x)
    return out * 2, out.sum()


def test_what_is_written_in_place_is_read_by_its_first_name():
    agree(Call(summed), rand(3))


TRANSFORMED = {
    "vmap": lambda x: torch.vmap(lambda row: row.exp() / row.exp().sum())(x),
    "grad": lambda x: torch.func.grad(lambda z: (z @ z.T).relu().sum())(x),
    "jacobian": lambda x: torch.func.jacrev(torch.sin)(x[0]),
    "tangent": lambda x: torch.func.jvp(torch.tanh, (x,), (x,))[1],
}


@pytest.mark.parametrize("name", TRANSFORMED)
@pytest.mark.every(2)
def test_transforms_inside_a_module(name):
    try:
        agree(Call(TRANSFORMED[name]), X)
    except TilestreamError as error:
        assert name == "tangent" and error.remedy


def test_transforms_of_a_program_are_a_typed_error():
    program = compile(torch.nn.Linear(4, 3).double(), X)
    loops = CpuProgram(program, compiled=False)
    for run in (program, loops):
        with pytest.raises(SparseError, match="torch.vmap"):
            torch.vmap(lambda x, run=run: run.run(x).output)(X.expand(2, 6, 4))
        with pytest.raises(SparseError, match="torch.func"):
            torch.func.grad(lambda x, run=run: run.run(x).output.sum())(X)


def test_orders_of_many_indices():
    """Three GENConv layers ended in a RecursionError."""
    chain = PartialOrder()
    for n in range(1500):
        chain.edge(f"i{n}", f"i{n + 1}", "T")
    assert list(chain.orders(3)) == [tuple(chain.indices)]
    free = PartialOrder(["i", "j", "k"])
    free.edge("j", "k", "T")
    assert list(free.orders()) == [("i", "j", "k"), ("j", "i", "k"), ("j", "k", "i")]
    assert list(free.orders(2)) == [("i", "j", "k"), ("j", "i", "k")]
