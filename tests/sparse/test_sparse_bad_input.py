"""Inputs as people have them: unsorted, double, empty, not finite, the wrong way round. Right, or an error that says
what is wrong."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse
import torch
from sparse_modules import Call, agree, rand

from tilestream.errors import CaptureError, SparseError
from tilestream.sparse import compile, compile_einsum, graphs
from tilestream.sparse.storage import Format, Level, SparseTensor, from_scipy, from_torch

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:Sparse invariant", "ignore:scatter_reduce")

NODES = 6
EDGES = torch.tensor([[0, 1, 2, 2, 5, 0, 0], [1, 2, 2, 3, 0, 1, 1]])
"""Unsorted, with a double edge and a self loop; node 4 is alone."""


def total(x, e):
    return torch.zeros_like(x).index_add(0, e[1], x[e[0]])


def largest(x, e):
    target = e[1].view(-1, 1).expand(-1, x.shape[1])
    return torch.zeros_like(x).scatter_reduce(0, target, x[e[0]], "amax", include_self=False)


def product(a, x):
    return torch.relu(torch.sparse.mm(a, x)) if a.layout != torch.strided else torch.relu(a @ x)


def with_value(value, at=(1, 0)):
    x = rand(NODES, 3)
    x[at] = value
    return x


@pytest.mark.parametrize("layer", [total, largest])
@pytest.mark.parametrize(
    ("x", "e"),
    [
        (with_value(torch.nan), EDGES),
        (with_value(torch.inf), EDGES),
        (with_value(-torch.inf), EDGES),
        (rand(NODES, 3), EDGES.T.contiguous().T),
        (rand(NODES, 0), EDGES),
        (rand(NODES, 3), EDGES[:, :0]),
        (rand(0, 3), EDGES[:, :0]),
    ],
    ids=["nan", "infinite", "minus infinite", "not contiguous", "no columns", "no edges", "no nodes"],
)
@pytest.mark.every(3)
def test_edges(layer, x, e):
    agree(Call(layer), x, e, equal_nan=True)


def test_edges_of_32_bits():
    agree(Call(total), rand(NODES, 3), EDGES.int())


def test_edges_that_are_not_there_or_no_indices():
    x = rand(NODES, 3)
    with pytest.raises(SparseError, match="index 9 into 6 rows.*from 0 to 5"):
        compile(Call(total), x, torch.tensor([[0, 1], [1, 9]]))
    with pytest.raises((SparseError, CaptureError), match="indices must be long"):
        compile(Call(total), x, EDGES.double())


def coo(places, values, shape=(NODES, NODES)):
    return torch.sparse_coo_tensor(torch.tensor(places), torch.tensor(values).double(), shape, check_invariants=False)


def csr(pointers, columns, layout=torch.sparse_csr):
    made = {torch.sparse_csr: torch.sparse_csr_tensor, torch.sparse_csc: torch.sparse_csc_tensor}[layout]
    values = torch.arange(1.0, 1 + len(columns)).double()
    return made(torch.tensor(pointers), torch.tensor(columns), values, (NODES, NODES), check_invariants=False)


POINTERS = [0, 2, 4, 4, 5, 5, 5]


@pytest.mark.parametrize(
    "a",
    [
        coo([[3, 0, 3, 1, 0], [2, 1, 2, 1, 1]], [1.0, 2, 3, 4, 5]),
        coo([[0, 1], [1, 2]], [0.0, 2]),
        coo([[0, 1], [1, 2]], [torch.nan, 2]),
        csr(POINTERS, [3, 0, 2, 1, 0]),
        csr(POINTERS, [1, 1, 2, 2, 0]),
        csr(POINTERS, [3, 0, 2, 1, 0], torch.sparse_csc),
        torch.zeros(NODES, NODES, dtype=torch.float64).to_sparse_coo(),
        torch.zeros(NODES, NODES, dtype=torch.float64).to_sparse_csr(),
        torch.eye(NODES, dtype=torch.float64).to_sparse_csr(),
    ],
    ids=["coo unsorted and double", "stored zero", "nan", "csr unsorted", "csr double", "csc unsorted", "coo empty",
         "csr empty", "self loops"],
)  # fmt: skip
@pytest.mark.every(3)
def test_adjacencies(a):
    agree(Call(lambda a, x: torch.relu(a @ x)), a, rand(NODES, 3), equal_nan=True)
    agree(Call(lambda a, x: torch.relu(a @ x)), a, rand(NODES, 0), equal_nan=True)


@pytest.mark.parametrize(("rows", "columns"), [(0, NODES), (4, 0), (0, 0)])
def test_adjacencies_without_rows_or_columns(rows, columns):
    a = torch.zeros(rows, columns, dtype=torch.float64).to_sparse()
    agree(Call(lambda a, x: a @ x), a, rand(columns, 3))


@pytest.mark.parametrize(
    ("a", "says"),
    [
        (csr(POINTERS, [1, 9, 2, 3, 0]), "coordinate outside"),
        (csr(POINTERS, [1, -1, 2, 3, 0]), "coordinate outside"),
        (csr([0, 3, 2, 4, 5, 5, 5], [1, 0, 2, 3, 0]), "row pointers that do not go up from 0 to 5"),
        (csr([0, 3, 2, 4, 5, 5, 5], [1, 0, 2, 3, 0], torch.sparse_csc), "column pointers that do not go up"),
        (csr([0, 2, 4, 4, 9, 9, 9], [1, 0, 2, 3, 0]), "row pointers"),
        (coo([[0, 7], [1, 2]], [1.0, 1]), "coordinate outside"),
    ],
)
def test_adjacencies_that_are_none(a, says):
    with pytest.raises(SparseError, match=says):
        from_torch("a", a)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_an_adjacency_the_other_way_round(layout):
    a = rand(4, NODES, density=0.5)
    agree(Call(lambda a, x: a @ x), a.to_sparse(layout=layout), rand(NODES, 3))
    with pytest.raises((SparseError, CaptureError), match="reduction dim"):
        compile(Call(lambda a, x: a @ x), a.T.contiguous().to_sparse(layout=layout), rand(NODES, 3))
    with pytest.raises(SparseError, match="index 'k' is 4 and 6"):
        compile_einsum("ik,kj->ij", [a.T.contiguous().to_sparse(layout=layout), rand(NODES, 3)])


@pytest.mark.parametrize("columns", [[3, 0, 2, 1, 0], [1, 1, 2, 2, 0]])
def test_scipy_matrices_are_sorted_and_added_up(columns):
    given = scipy.sparse.csr_matrix((np.arange(1.0, 6), np.array(columns), np.array(POINTERS)), shape=(NODES, NODES))
    made = from_scipy("a", given)
    assert np.array_equal(made.to_dense(), given.toarray())
    compile_einsum("ik,kj->ij", [made, rand(NODES, 2)]).run()


@pytest.mark.parametrize("columns", [[3, 0, 1], [1, 1, 0]])
@pytest.mark.parametrize("engine", ["fast", "spec"])
def test_a_tensor_made_by_hand_has_to_be_sorted(columns, engine):
    levels = (Level(4), Level(4, np.array([0, 2, 2, 2, 3]), np.array(columns)))
    tensor = SparseTensor("a", (4, 4), Format(("dense", "compressed")), levels, np.arange(3.0))
    with pytest.raises(SparseError, match="level 1 of tensor 'B' has coordinates that do not go up"):
        compile_einsum("ik,k->i", [tensor, torch.ones(4).double()]).run(engine=engine)


def test_graphs_of_others():
    def data(edges, **more):
        return SimpleNamespace(edge_index=torch.tensor(edges, dtype=torch.int64).view(2, -1), **more)

    assert graphs.from_pyg(data([[0, 0, 3], [1, 1, 3]], num_nodes=4)).edges == 2
    assert graphs.from_pyg(data([[], []], x=torch.rand(4, 3))).edges == 0
    assert graphs.from_pyg(data([[], []])).edges == 0
    for wrong in (9, -1):
        with pytest.raises(SparseError, match=f"edge of node {wrong}, of 4"):
            graphs.from_pyg(data([[0, wrong], [1, 2]], num_nodes=4))
    with pytest.raises(SparseError, match="edge of node 9, of 4"):
        graphs.from_ogb({"edge_index": np.array([[0, 9], [1, 2]]), "num_nodes": 4})
