"""Graph networks as their users write them: PyTorch Geometric's layers and models, at the sizes of its examples.

``MODELS["gin"].problem("uniform")`` gives a module and its inputs. A graph is uniform or a power law (hubs with twenty
thousand edges of a million), lists in no order; the lists of nearest neighbours are sorted, as searches give them.
Molecules' edges and triplets are made here, since a search for neighbours is not what is measured. Those marked
``fresh`` are kept aside: nothing was tuned on them. Needs ``torch_geometric``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.lib.graph_models import default

NODES, EDGES = 100_000, 1_000_000
SKEW = 0.8
"""Of a power law: the k-th node has a share of the edges that falls as k to this power."""
ARXIV = 169_343, 2_315_598
"""Nodes and edges of ogbn-arxiv, both directions."""
NEIGHBOURS = 16
ATOMS, MOLECULES = 18, 256
"""Of QM9: the mean of a molecule, and what PyG's examples put into a batch."""

Inputs = tuple[Any, ...]


def graph(kind: str, nodes: int, edges: int, seed: int = 0) -> Tensor:
    """Senders and receivers, int64 [2, edges], on torch's default device.

    ``uniform``: both at random; ``power``: both by a power law, hubs anywhere; ``nearest``: ``NEIGHBOURS`` senders for
    each receiver, receivers in order.
    """
    random = torch.Generator(torch.get_default_device()).manual_seed(seed)
    if kind == "uniform":
        return torch.randint(nodes, (2, edges), generator=random)
    if kind == "nearest":
        receivers = torch.arange(nodes).repeat_interleave(NEIGHBOURS)
        offsets = torch.randint(1, 512, receivers.shape, generator=random)
        return torch.stack([(receivers + offsets) % nodes, receivers])
    assert kind == "power", kind
    share = (torch.arange(nodes, dtype=torch.float32) + 1) ** -SKEW
    drawn = torch.multinomial(share, 2 * edges, replacement=True, generator=random).view(2, edges)
    return torch.randperm(nodes, generator=random)[drawn]


def molecules(count: int, cutoff: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Kinds int64 [atoms], places float32 [atoms, 3] in Angstrom, molecules int64 [atoms], edges int64 [2, *]."""
    random = torch.Generator(torch.get_default_device()).manual_seed(seed)
    kinds = torch.randint(1, 10, (count * ATOMS,), generator=random)
    places = 2 * torch.randn(count, ATOMS, 3, generator=random, dtype=torch.float32)
    near = torch.cdist(places, places) < cutoff
    near &= ~torch.eye(ATOMS, dtype=torch.bool)
    molecule, receiver, sender = near.nonzero(as_tuple=True)
    edges = torch.stack([molecule * ATOMS + sender, molecule * ATOMS + receiver])
    return kinds, places.view(-1, 3), torch.arange(count).repeat_interleave(ATOMS), edges


def triplets(edges: Tensor, nodes: int) -> Inputs:
    """Edges k to j that end where an edge j to i starts: the nodes i, j, k and both edges, each int64 [triplets]."""
    sender, receiver = edges
    order = torch.argsort(receiver, stable=True)
    counts = torch.bincount(receiver, minlength=nodes)
    starts = counts.cumsum(0) - counts
    each = counts[sender]
    ji = torch.arange(len(sender)).repeat_interleave(each)
    within = torch.arange(len(ji)) - (each.cumsum(0) - each).repeat_interleave(each)
    kj = order[starts[sender[ji]] + within]
    i, j, k = receiver[ji], sender[ji], sender[kj]
    kept = i != k
    return i[kept], j[kept], k[kept], kj[kept], ji[kept]


class Stack(nn.Module):
    """Layers, each called with the features and whatever describes the graph, with an activation between them."""

    def __init__(self, layers: Sequence[nn.Module], norms: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.layers, self.norms = nn.ModuleList(layers), nn.ModuleList(norms)

    def forward(self, x: Tensor, edges: Any, *others: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            x = layer(x, edges, *others)
            if k < len(self.norms):
                x = self.norms[k](x)
            if k + 1 < len(self.layers):
                x = torch.relu(x)
        return x


class Kept(nn.Module):
    """A network over one graph, which it holds: buffers that the user says are constant."""

    def __init__(self, net: nn.Module, edges: Tensor) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("edges", edges)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x, self.edges)


class Pna(nn.Module):
    """PyG's ``examples/pna.py``: four layers of 75 with five towers, four aggregators and three scalers; ZINC."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric import nn as pyg  # pyright: ignore[reportMissingImports]

        degrees = torch.tensor([0, 900, 1300, 700, 100], dtype=torch.long)
        how = {"aggregators": ["mean", "min", "max", "std"], "scalers": ["identity", "amplification", "attenuation"]}
        towers = {"towers": 5, "pre_layers": 1, "post_layers": 1, "divide_input": False, "edge_dim": 50}
        self.atoms, self.bonds = nn.Embedding(21, 75), nn.Embedding(4, 50)
        self.layers = nn.ModuleList([pyg.PNAConv(75, 75, deg=degrees, **how, **towers) for _ in range(4)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(75) for _ in range(4)])
        self.head = nn.Sequential(nn.Linear(75, 50), nn.ReLU(), nn.Linear(50, 25), nn.ReLU(), nn.Linear(25, 1))

    def forward(self, atoms: Tensor, edges: Tensor, bonds: Tensor, molecule: Tensor, count: int) -> Tensor:
        from torch_geometric.utils import scatter  # pyright: ignore[reportMissingImports]

        x, kinds = self.atoms(atoms), self.bonds(bonds)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.relu(norm(layer(x, edges, kinds)))
        return self.head(scatter(x, molecule, dim=0, dim_size=count, reduce="sum"))


class SchNet(nn.Module):
    """PyG's SchNet at its own sizes (128, 6 interactions, 50 Gaussians), over given edges."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import models  # pyright: ignore[reportMissingImports]

        self.net = models.SchNet()
        self.layers = self.net.interactions

    def forward(self, kinds: Tensor, places: Tensor, molecule: Tensor, edges: Tensor, count: int) -> Tensor:
        net: Any = self.net
        h = net.embedding(kinds)
        distances = (places[edges[0]] - places[edges[1]]).norm(dim=-1)
        expanded = net.distance_expansion(distances)
        for layer in self.layers:
            h = h + layer(h, edges, distances, expanded)
        h = net.lin2(net.act(net.lin1(h)))
        return net.readout(h, molecule, dim=0, dim_size=count)


class DimeNet(nn.Module):
    """PyG's DimeNet++ at the sizes of its paper and example, over given edges and triplets."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import models  # pyright: ignore[reportMissingImports]

        self.net = models.DimeNetPlusPlus(128, 1, 4, 64, 8, 256, 7, 6, output_initializer="glorot_orthogonal")
        self.layers = self.net.interaction_blocks

    def forward(
        self, kinds: Tensor, places: Tensor, molecule: Tensor, edges: Tensor, count: int, *threes: Tensor
    ) -> Tensor:
        from torch_geometric.utils import scatter  # pyright: ignore[reportMissingImports]

        net, (j, i), (of_i, of_j, of_k, kj, ji) = self.net, edges, threes
        atoms = places.shape[0]
        distances = (places[i] - places[j]).pow(2).sum(dim=-1).sqrt()
        jk, ij = places[of_j] - places[of_k], places[of_i] - places[of_j]
        angles = torch.atan2(torch.linalg.cross(ij, jk, dim=1).norm(dim=-1), (ij * jk).sum(dim=-1))
        radial, spherical = net.rbf(distances), net.sbf(distances, angles, kj)
        x = net.emb(kinds, radial, i, j)
        total = net.output_blocks[0](x, radial, i, num_nodes=atoms)
        for block, output in zip(self.layers, net.output_blocks[1:], strict=True):
            x = block(x, radial, spherical, kj, ji)
            total = total + output(x, radial, i, num_nodes=atoms)
        return scatter(total, molecule, dim=0, dim_size=count, reduce="sum")


class TwoSums(nn.Module):
    """Messages of own code: a gate a head of both ends' features, a softmax over them, and a maximum beside the sum."""

    def __init__(self, width: int = 72, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.project, self.gate = nn.Linear(width, width), nn.Linear(2 * width, heads)
        self.out = nn.Linear(3 * width, width)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        sender, receiver = edges
        nodes, width = x.shape
        h = self.project(x)
        score = torch.nn.functional.leaky_relu(self.gate(torch.cat([h[sender], h[receiver]], dim=-1)), 0.2)
        most = score.new_full((nodes, self.heads), -1e4).scatter_reduce(
            0, receiver[:, None].expand_as(score), score, "amax"
        )
        exps = torch.exp(score - most[receiver])
        total = exps.new_zeros(nodes, self.heads).index_add(0, receiver, exps)
        share = exps / (total[receiver] + 1e-6)
        value = h[sender].view(-1, self.heads, width // self.heads) * share[..., None]
        summed = h.new_zeros(nodes, width).index_add(0, receiver, value.flatten(1))
        highest = h.new_zeros(nodes, width).scatter_reduce(
            0, receiver[:, None].expand(-1, width), torch.relu(h[sender]), "amax"
        )
        return self.out(torch.cat([h, summed, highest], dim=-1))


@dataclass(frozen=True)
class GraphModel:
    """A model and the graphs it is measured on.

    Attributes:
        make: builds it, on torch's default device, of torch's default dtype.
        inputs: its inputs, of a kind of graph, nodes and edges (of molecules: their number, twice).
        dtype: it runs in.
        kinds: of graphs.
        nodes, edges: of a full size.
        fresh: nothing was tuned on it.
        plain: its edges make PyG synchronise, so that no CUDA graph can hold it.
        whole: Dynamo is told to keep what makes PyG synchronise in one graph.
        csr: PyG takes a sparse CSR tensor in the place of its edges.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[str, int, int], Inputs]
    dtype: torch.dtype = torch.bfloat16
    kinds: tuple[str, ...] = ("uniform", "power")
    nodes: int = NODES
    edges: int = EDGES
    fresh: bool = False
    plain: bool = False
    whole: bool = False
    csr: bool = False

    def problem(self, kind: str, device: str = "cuda", tiny: bool = False) -> tuple[nn.Module, Inputs]:
        """The module, ready for inference, and its inputs; ``tiny``: a five-hundredth of the nodes and edges."""
        nodes, edges = (max(4, self.nodes // 500), max(4, self.edges // 500)) if tiny else (self.nodes, self.edges)
        with torch.random.fork_rng(), torch.device(device), default(self.dtype):
            torch.manual_seed(0)
            module = self.make().eval()
            return module, self.inputs(kind, nodes, edges)


def _features(width: int, *of_edges: int) -> Callable[[str, int, int], Inputs]:
    """Node features of ``width``, edges, and a tensor of features for each of ``of_edges``."""

    def inputs(kind: str, nodes: int, edges: int) -> Inputs:
        listed = graph(kind, nodes, edges)
        return (torch.randn(nodes, width), listed, *(torch.randn(listed.shape[1], w) for w in of_edges))

    return inputs


def _molecules(kind: str, count: int, _: int) -> Inputs:
    """For PNA: 23 atoms a molecule, rings and chains of two neighbours and a few; four kinds of bonds."""
    assert kind == "molecules"
    atoms = 23
    chain = torch.arange(count * atoms).view(count, atoms)
    pairs = torch.cat([chain[:, :-1].flatten(), chain[:, :-5:6].flatten()])
    other = torch.cat([chain[:, 1:].flatten(), chain[:, 5::6].flatten()])
    edges = torch.stack([torch.cat([pairs, other]), torch.cat([other, pairs])])
    edges = edges[:, torch.argsort(edges[0], stable=True)]
    return (
        *(torch.randint(21, (count * atoms,)), edges, torch.randint(4, (edges.shape[1],))),
        *(torch.arange(count).repeat_interleave(atoms), count),
    )


def _places(cutoff: float, threes: bool) -> Callable[[str, int, int], Inputs]:
    def inputs(kind: str, count: int, _: int) -> Inputs:
        assert kind == "molecules"
        kinds, places, molecule, edges = molecules(count, cutoff)
        found = triplets(edges, len(kinds)) if threes else ()
        return kinds, places, molecule, edges, count, *found

    return inputs


def _mlp(*sizes: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.ReLU(), nn.Linear(sizes[1], sizes[2]))


def _stack(layer: Callable[[Any, int, int], nn.Module], *widths: int) -> Callable[[], nn.Module]:
    """Layers between widths; ``layer`` makes one of PyG's ``nn`` and both widths."""

    def make() -> nn.Module:
        from torch_geometric import nn as pyg  # pyright: ignore[reportMissingImports]

        return Stack([layer(pyg, i, o) for i, o in zip(widths, widths[1:], strict=False)])

    return make


def _unimp() -> nn.Module:
    """PyG's ``examples/unimp_arxiv.py``: three layers of two heads, 64 wide, with a gated skip and a norm."""
    from torch_geometric import nn as pyg  # pyright: ignore[reportMissingImports]

    first, second = (pyg.TransformerConv(w, 32, heads=2, concat=True, beta=True) for w in (128, 64))
    last = pyg.TransformerConv(64, 40, heads=2, concat=False, beta=True)
    return Stack([first, second, last], [nn.LayerNorm(64), nn.LayerNorm(64)])


_MOLECULAR: Any = {"dtype": torch.float32, "kinds": ("molecules",), "nodes": MOLECULES, "edges": MOLECULES}
_GCN = _stack(lambda p, i, o: p.GCNConv(i, o), *[128] * 4)
MODELS = {
    m.name: m
    for m in (
        GraphModel("gin", _stack(lambda p, i, o: p.GINConv(_mlp(i, o, o)), *[64] * 6), _features(64), csr=True),
        GraphModel("sage", _stack(lambda p, i, o: p.SAGEConv(i, o), *[128] * 4), _features(128), csr=True),
        GraphModel("gcn", _GCN, _features(128), plain=True, csr=True),
        GraphModel("gcn_whole", _GCN, _features(128), plain=True, whole=True),
        GraphModel(
            "gat",
            _stack(lambda p, i, o: p.GATConv(i, o // 4, heads=4, add_self_loops=False), *[256] * 4),
            _features(256),
        ),
        GraphModel(
            "edge_conv",
            _stack(lambda p, i, o: p.EdgeConv(_mlp(2 * i, o, o), aggr="max"), 16, 64, 64, 128),
            _features(16),
            **{"kinds": ("nearest",), "nodes": 65_536, "edges": 65_536 * NEIGHBOURS},
        ),
        GraphModel("pna", Pna, _molecules, kinds=("molecules",), nodes=128, edges=128),
        GraphModel("schnet", SchNet, _places(10.0, threes=False), **_MOLECULAR),
        GraphModel("dimenet", DimeNet, _places(5.0, threes=True), **_MOLECULAR),
        GraphModel("transformer", _unimp, _features(128), kinds=("power",), nodes=ARXIV[0], edges=ARXIV[1]),
        GraphModel(
            "gatv2",
            _stack(lambda p, i, o: p.GATv2Conv(i, o // 4, heads=4, add_self_loops=False), *[128] * 4),
            _features(128),
            fresh=True,
        ),
        GraphModel(
            "cgconv",
            _stack(lambda p, i, o: p.CGConv(i, dim=41), *[64] * 4),
            _features(64, 41),
            fresh=True,
        ),
        GraphModel(
            "gine",
            _stack(lambda p, i, o: p.GINEConv(_mlp(i, 2 * o, o)), *[96] * 6),
            _features(96, 96),
            fresh=True,
        ),
        GraphModel("two_sums", lambda: Stack([TwoSums() for _ in range(3)]), _features(72), fresh=True),
    )
}
"""By name."""
WHOLE = {m.name for m in MODELS.values() if m.whole}


def kept(model: GraphModel, kind: str, device: str = "cuda", tiny: bool = False) -> tuple[nn.Module, Inputs]:
    """The same over a graph that the module holds."""
    module, (x, edges) = model.problem(kind, device, tiny)
    return Kept(module, edges), (x,)


def adjacency(edges: Tensor, nodes: int, dtype: torch.dtype) -> Tensor:
    """Edges as a sparse CSR tensor [receivers, senders] of ones, which PyG takes as ``adj_t``."""
    order = torch.argsort(edges[1], stable=True)
    starts = torch.zeros(nodes + 1, dtype=torch.int64, device=edges.device)
    starts[1:] = torch.bincount(edges[1], minlength=nodes).cumsum(0)
    ones = torch.ones(edges.shape[1], dtype=dtype, device=edges.device)
    return torch.sparse_csr_tensor(starts, edges[0][order], ones, size=(nodes, nodes))
