"""Message passing written by hand: gathers and scatters are products with incidence matrices or the adjacency."""

import pytest
import torch
from sparse_modules import Call, agree, rand
from torch import nn

from tilestream.errors import CaptureError, SparseError
from tilestream.sparse import compile

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:Sparse invariant", "ignore:scatter_reduce")

NODES, EDGES = 9, 30


def edges(seed=0, nodes=NODES, count=EDGES):
    """Unsorted, with double edges and self loops; the last node has no neighbour."""
    return torch.randint(0, nodes - 1, (2, count), generator=torch.Generator().manual_seed(seed))


def spread(index, x):
    return index.view(-1, *[1] * (x.ndim - 1)).expand_as(x)


def reduced(base, x, e, how, **options):
    return base.scatter_reduce(0, spread(e[1], x[e[0]]), x[e[0]], how, **options)


def heads(x, e):
    rows = x.view(-1, 2, 2)
    return torch.zeros_like(rows).index_add(0, e[1], rows[e[0]] * rows[e[1]].sum(-1, keepdim=True))


def mean(x, e):
    out = torch.zeros_like(x).index_add(0, e[1], x[e[0]])
    count = torch.zeros(len(x), dtype=x.dtype).index_add(0, e[1], torch.ones(e.shape[1], dtype=x.dtype))
    return out / count.clamp(min=1)[:, None]


def attention(x, e):
    score = torch.tanh(x[e[0]].sum(-1) + x[e[1]].sum(-1))
    largest = torch.full((len(x),), -torch.inf, dtype=x.dtype).scatter_reduce(0, e[1], score, "amax")
    power = (score - largest[e[1]]).exp()
    total = torch.zeros(len(x), dtype=x.dtype).scatter_add(0, e[1], power)
    return torch.zeros_like(x).index_add(0, e[1], x[e[0]] * (power / total[e[1]])[:, None])


def in_place(x, e):
    out = torch.zeros(len(x), x.shape[1], dtype=x.dtype)
    out.index_add_(0, e[1], x[e[0]] * 2)
    return out.relu()


PASSING = {
    "sum": lambda x, e: torch.zeros_like(x).index_add(0, e[1], x.index_select(0, e[0])),
    "scatter_add": lambda x, e: torch.zeros_like(x).scatter_add(0, spread(e[1], x[e[0]]), x[e[0]]),
    "mean": mean,
    "mean_reduce": lambda x, e: reduced(torch.zeros_like(x), x, e, "mean", include_self=False),
    "max": lambda x, e: reduced(torch.zeros_like(x), x, e, "amax", include_self=False),
    "min_with_self": lambda x, e: reduced(x, x, e, "amin"),
    "max_left": lambda x, e: reduced(x, -x, e, "amax", include_self=False),
    "index_reduce": lambda x, e: torch.zeros_like(x).index_reduce(0, e[1], x[e[0]], "mean", include_self=False),
    "edge_messages": lambda x, e: torch.zeros_like(x).index_add(0, e[1], torch.relu(x[e[0]] - x[e[1]])),
    "residual": lambda x, e: x.index_add(0, e[1], x[e[0]], alpha=0.5),
    "two_hops": lambda x, e: mean(torch.relu(mean(x, e)), e),
    "attention": attention,
    "heads": heads,
    "in_place": in_place,
    "gather_elements": lambda x, e: x.gather(0, e[:, :8].reshape(4, 4) % NODES),
    "pairs": lambda x, e: x[e[0] % 4, e[1] % 4],
    "columns": lambda x, e: x[:, e[0] % 4].sum(1),
    "last_row": lambda x, e: x[torch.tensor([-1, 0])],
    "kept_edges": lambda x, e: torch.zeros_like(x).index_add(0, e[1][e[0] != e[1]], x[e[0][e[0] != e[1]]]),
    "index_put": lambda x, e: x.index_put((torch.tensor([1, 3]),), x[:2] * 5),
    "index_copy": lambda x, e: x.index_copy(0, torch.tensor([2, 0]), x[:2] * 5),
    "repeat": lambda x, e: x.repeat(2, 3) * x.repeat_interleave(3, 1).repeat(2, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", PASSING)
@pytest.mark.every(3)
def test_message_passing(name):
    agree(Call(PASSING[name]), rand(NODES, 4), edges())


def test_a_weighted_sum_is_one_product_with_the_adjacency():
    def layer(x, e, w):
        return torch.zeros_like(x).index_add(0, e[1], w[:, None] * x[e[0]])

    x, e, w = rand(NODES, 4), edges(), rand(EDGES, seed=2)
    program = agree(Call(layer), x, e, w)
    assert [s.op for s in program.einsums.statements] == ["mul"], "one product; the adjacency is made between regions"
    fixed = agree(Call(lambda x, e: layer(x, e, w)), x, e)
    (adjacency,) = [t for name, t in fixed.constants.items() if "adjacency" in name]
    assert len(fixed.einsums.steps) == 1
    wanted = torch.zeros(NODES, NODES, dtype=torch.float64).index_put((e[1], e[0]), w, accumulate=True)
    torch.testing.assert_close(torch.from_numpy(adjacency.to_dense()), wanted)


def test_neighbours_largest_reads_the_adjacency_once():
    program = agree(Call(PASSING["max"]), rand(NODES, 4), edges())
    assert not any("incidence" in a.tensor for s in program.einsums.statements for a in s.operands)


def test_bags_and_embeddings():
    index, offsets = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9]), torch.tensor([0, 3, 3, 7])
    for mode in ("sum", "mean", "max"):
        agree(nn.EmbeddingBag(10, 4, mode=mode).double(), index, offsets)
    agree(nn.EmbeddingBag(10, 4, mode="sum", padding_idx=2).double(), index, offsets)
    bag = nn.EmbeddingBag(10, 4, mode="sum").double()
    agree(Call(lambda i, o, w: bag(i, o, w)), index, offsets, rand(8))
    agree(nn.Embedding(10, 4, padding_idx=0).double(), index.view(2, 4))


def test_the_graph_is_compiled_in():
    module, x, e = Call(PASSING["sum"]), rand(NODES, 4), edges()
    program = compile(module, x, e)
    other = rand(NODES, 4, seed=5)
    for given in ((other, e), (other, e.clone()), (other,)):
        torch.testing.assert_close(program.run(*given).output, module(other, e))
    with pytest.raises(SparseError, match="not what the program was compiled for"):
        program.run(x, edges(seed=3))


@pytest.mark.parametrize(
    ("nodes", "e"),
    [
        (1, torch.zeros(2, 3, dtype=torch.int64)),
        (4, torch.zeros(2, 0, dtype=torch.int64)),
        (4, torch.tensor([[2], [1]])),
        (3, torch.tensor([[0, 1, 2], [0, 1, 2]])),
    ],
    ids=["one node", "no edges", "one edge", "self loops"],
)
@pytest.mark.parametrize("name", ["sum", "mean", "max", "edge_messages", "two_hops"])
@pytest.mark.every(3)
def test_small_graphs(name, nodes, e):
    agree(Call(PASSING[name]), rand(nodes, 3), e)


def test_bad_input():
    x = rand(NODES, 4)
    for wrong in (NODES, -1):
        e = edges()
        e[0, 7] = wrong
        with pytest.raises(SparseError, match=rf"messages.py:\d+\): index {wrong} into 9 rows.*from 0 to 8"):
            compile(Call(lambda x, e: torch.zeros_like(x).index_add(0, e[1], x.index_select(0, e[0]))), x, e)
    by_numbers = compile(Call(lambda x, i: x[i.long()]), x, rand(4))
    torch.testing.assert_close(by_numbers.run(x, torch.tensor([1.5, 0.0, 8.9, 2.0])).output, x[[1, 0, 8, 2]])
    with pytest.raises(SparseError, match="out of bounds"):
        by_numbers.run(x, torch.full((4,), 9.0))
    with pytest.raises(SparseError, match="writes one place twice"):
        compile(Call(lambda x: x.index_put((torch.tensor([1, 1]),), x[:2])), x)
    with pytest.raises((SparseError, CaptureError), match=r"reduction dim.*\[4, 5\] X \[4, 2\]"):
        compile(Call(lambda a, x: a @ x), rand(4, 5).to_sparse(), rand(4, 2))  # the adjacency the other way round
    a = rand(NODES, NODES, density=0.3)
    a[0, 0] = torch.nan
    agree(Call(lambda a, x: a @ x), a.to_sparse(), x, equal_nan=True)
    agree(Call(lambda x, e: torch.zeros_like(x).index_add(0, e[1], x[e[0]])), rand(NODES, 0), edges())
