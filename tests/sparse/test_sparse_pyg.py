"""PyTorch Geometric models: 28 that lower, with edge indices or with sparse adjacencies, and what the others say."""

import runpy

import pytest
import torch
from places import EXAMPLES
from sparse_modules import Call
from torch import nn

from tilestream.errors import TilestreamError
from tilestream.sparse import Schedule, compile
from tilestream.sparse.cpu import CpuProgram

g = pytest.importorskip("torch_geometric.nn", reason="needs torch_geometric")
pytestmark = pytest.mark.filterwarnings("ignore")

NODES, FEATURES, EDGES = 12, 6, 40


class Layers(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, *graph):
        for layer in self.layers:
            x = torch.relu(layer(x, *graph))
        return x


class Pooled(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.layer, self.norm, self.last, self.pool = g.GCNConv(FEATURES, 5), g.BatchNorm(5), nn.Linear(5, 2), pool

    def forward(self, x, edge_index, batch):
        x = self.norm(self.layer(x, edge_index)).relu()
        return self.last(self.pool(x, batch)).log_softmax(-1)


class Molecule(nn.Module):
    """SchNet from given pairs of atoms on."""

    def __init__(self):
        super().__init__()
        self.net = g.SchNet(hidden_channels=8, num_filters=8, num_interactions=2, num_gaussians=5)

    def forward(self, number, position, pairs):
        hidden = self.net.embedding(number)
        distance = (position[pairs[0]] - position[pairs[1]]).norm(dim=-1)
        smeared = self.net.distance_expansion(distance)
        for block in self.net.interactions:
            hidden = hidden + block(hidden, pairs, distance, smeared)
        return self.net.lin2(self.net.act(self.net.lin1(hidden))).sum(0)


def mlp(n, m):
    return nn.Sequential(nn.Linear(n, 8), nn.ReLU(), nn.Linear(8, m))


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LINKS = torch.randint(0, NODES, (2, EDGES), generator=torch.Generator().manual_seed(0))
DISTINCT = LINKS[:, LINKS[0] != LINKS[1]]
X, WEIGHT, CARRIED = numbers(NODES, FEATURES), numbers(EDGES, seed=1).abs(), numbers(EDGES, 3, seed=2)
FEW = WEIGHT[: DISTINCT.shape[1]]


def adjacency(layout):
    made = torch.sparse_coo_tensor(LINKS, WEIGHT, (NODES, NODES)).coalesce()
    return made.to_sparse_csr() if layout == torch.sparse_csr else made


BATCH = torch.tensor([0] * 5 + [1] * 4 + [2] * 3)
MODELS = {
    "GCN": lambda: (Layers(g.GCNConv(FEATURES, 5), g.GCNConv(5, 3)), X, LINKS),
    "GatedGraphConv": lambda: (g.GatedGraphConv(8, 2), X, LINKS),
    "GCN with weights": lambda: (Layers(g.GCNConv(FEATURES, 5)), X, DISTINCT, FEW),
    "GCN of an adjacency": lambda: (Layers(g.GCNConv(FEATURES, 5)), X, adjacency(torch.sparse_csr)),
    "SAGE, mean": lambda: (Layers(g.SAGEConv(FEATURES, 5), g.SAGEConv(5, 3)), X, LINKS),
    "SAGE, max": lambda: (Layers(g.SAGEConv(FEATURES, 5, aggr="max")), X, LINKS),
    "SAGE, sum, normalised": lambda: (Layers(g.SAGEConv(FEATURES, 5, aggr="add", normalize=True)), X, LINKS),
    "SAGE of an adjacency": lambda: (Layers(g.SAGEConv(FEATURES, 4)), X, adjacency(torch.sparse_csr)),
    "GIN": lambda: (Layers(g.GINConv(mlp(FEATURES, 5)), g.GINConv(mlp(5, 3), train_eps=True)), X, LINKS),
    "GIN of an adjacency": lambda: (Layers(g.GINConv(mlp(FEATURES, 5))), X, adjacency(torch.sparse_coo)),
    "GINE": lambda: (Layers(g.GINEConv(mlp(FEATURES, 5), edge_dim=3)), X, LINKS, CARRIED),
    "GAT": lambda: (Layers(g.GATConv(FEATURES, 4, heads=2), g.GATConv(8, 3)), X, LINKS),
    "GAT, edges": lambda: (Layers(g.GATConv(FEATURES, 4, heads=2, edge_dim=3)), X, LINKS, CARRIED),
    "GAT of an adjacency": lambda: (Layers(g.GATConv(FEATURES, 4, heads=2)), X, adjacency(torch.sparse_csr)),
    "GATv2": lambda: (Layers(g.GATv2Conv(FEATURES, 4, heads=2)), X, LINKS),
    "Transformer": lambda: (Layers(g.TransformerConv(FEATURES, 4, heads=2)), X, LINKS),
    "GraphConv": lambda: (Layers(g.GraphConv(FEATURES, 4)), X, LINKS, WEIGHT),
    "Chebyshev": lambda: (Layers(g.ChebConv(FEATURES, 4, K=3)), X, LINKS),
    "TAG": lambda: (Layers(g.TAGConv(FEATURES, 4)), X, LINKS),
    "SG": lambda: (Layers(g.SGConv(FEATURES, 4, K=2)), X, LINKS),
    "APPNP": lambda: (Layers(g.APPNP(3, 0.1)), X, LINKS),
    "ARMA": lambda: (Layers(g.ARMAConv(FEATURES, 4)), X, LINKS),
    "EdgeConv": lambda: (Layers(g.EdgeConv(mlp(2 * FEATURES, 4))), X, LINKS),
    "gated": lambda: (Layers(g.ResGatedGraphConv(FEATURES, 4)), X, LINKS),
    "NNConv": lambda: (Layers(g.NNConv(FEATURES, 4, mlp(3, FEATURES * 4))), X, LINKS, CARRIED),
    "FiLM": lambda: (Layers(g.FiLMConv(FEATURES, 4)), X, LINKS),
    "mean pool": lambda: (Pooled(g.global_mean_pool), X, LINKS, BATCH),
    "max pool": lambda: (Pooled(g.global_max_pool), X, LINKS, BATCH),
    "SchNet": lambda: (Molecule(), torch.arange(1, NODES + 1) % 8, numbers(NODES, 3), DISTINCT),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.every(8)
def test_models(name):
    torch.manual_seed(0)
    module, *inputs = MODELS[name]()
    module = module.double().eval()
    with torch.no_grad():
        wanted = module(*inputs)
    for fuse in ("none", "all"):
        program = compile(module, *inputs, schedule=Schedule(fuse=fuse))
        torch.testing.assert_close(program.run(*inputs).output, wanted, rtol=1e-9, atol=1e-9)
        loops = CpuProgram(program, compiled=False)
        torch.testing.assert_close(loops.run(*inputs).output, wanted, rtol=1e-9, atol=1e-9)


def test_layers_of_sums_are_products_with_the_adjacency():
    for name in ("GCN", "SAGE, mean", "SAGE, max", "GIN"):
        module, *inputs = MODELS[name]()
        program = compile(module.double(), *inputs)
        read = {a.tensor for s in program.einsums.statements for a in s.operands}
        assert any("adjacency" in x for x in read) and not any("incidence" in x for x in read)


REFUSED = {
    "radius graph": lambda: (Call(lambda p: p[(p @ p.t() > 0).nonzero()[:, 0]]), numbers(NODES, 3)),
    "top k pooling": lambda: (Call(lambda x: g.pool.TopKPooling(FEATURES)(x, LINKS)[0]), X),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_lower_says_what_and_what_to_do(name):
    module, *inputs = REFUSED[name]()
    with pytest.raises(TilestreamError) as caught:
        compile(module.double(), *inputs)
    assert caught.value.remedy and caught.value.cause


class Stored:
    """What torch_sparse's ``SparseTensor`` offers of itself."""

    def to_torch_sparse_csr_tensor(self):
        return adjacency(torch.sparse_csr)


def test_a_sparse_tensor_of_torch_sparse_is_its_csr():
    module = Layers(g.GCNConv(FEATURES, 5)).double().eval()
    program = compile(module, X, Stored())
    with torch.no_grad():
        wanted = module(X, adjacency(torch.sparse_csr))
    torch.testing.assert_close(program.run(X, Stored()).output, wanted)


def test_the_example_runs(capsys):
    runpy.run_path(str(EXAMPLES / "sparse_pyg.py"), run_name="__main__")
    assert "adjacency: scatter_add__1_adjacency" in capsys.readouterr().out
