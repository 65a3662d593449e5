"""Every convolution of PyTorch Geometric that needs no compiled extension, small, with inputs to call it with.

Left out: layers of an extension's own (CuGraph*, Fused*, ``SplineConv``, ``PANConv``) and those that search for
neighbours (``DynamicEdgeConv``, ``GravNetConv``, ``XConv``), which need one. Needs ``torch_geometric``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

NODES, EDGES, WIDTH, OUT, KINDS = 60, 300, 16, 24, 3

Layer = tuple[Callable[[Any], nn.Module], Callable[["Given"], tuple[Any, ...]]]


class Given:
    """What layers are called with: features, edges without loops, isolated nodes among them, and what edges have."""

    def __init__(self, device: str) -> None:
        random = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random).to(device)

        def drawn(most: int, *shape: int) -> Tensor:
            return torch.randint(most, shape, generator=random).to(device)

        self.x, self.first = normal(NODES, WIDTH), normal(NODES, WIDTH)
        self.wide = normal(NODES, OUT)
        ends = drawn(NODES - 4, 2, EDGES)
        self.edges = torch.stack([ends[0], torch.where(ends[0] == ends[1], (ends[1] + 1) % (NODES - 4), ends[1])])
        self.other = drawn(NODES, 2, EDGES)
        self.weight, self.features = normal(EDGES).abs(), normal(EDGES, 7)
        self.alike = normal(EDGES, WIDTH)
        self.places, self.normals = normal(NODES, 3), normal(NODES, 3)
        self.pseudo = normal(EDGES, 2).sigmoid()
        self.kind, self.of_node = drawn(KINDS, EDGES), drawn(KINDS, NODES)
        self.history = normal(NODES, 3, WIDTH)
        self.mesh = torch.stack([drawn(NODES, 4 * NODES), torch.arange(NODES, device=device).repeat_interleave(4)])
        self.colours = drawn(5, NODES)
        self.batch = torch.arange(NODES, device=device) // (NODES // 4)


def _mlp(i: int, o: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(i, 20), nn.ReLU(), nn.Linear(20, o))


def _x(g: Given) -> tuple[Any, ...]:
    return g.x, g.edges


def _weighted(g: Given) -> tuple[Any, ...]:
    return g.x, g.edges, g.weight


def _featured(g: Given) -> tuple[Any, ...]:
    return g.x, g.edges, g.features


METADATA = (["a", "b"], [("a", "to", "b"), ("b", "to", "a")])


class Hetero(nn.Module):
    """A layer of dictionaries, called with tensors."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, a: Tensor, b: Tensor, ab: Tensor, ba: Tensor) -> tuple[Tensor, ...]:
        made = self.layer({"a": a, "b": b}, {("a", "to", "b"): ab, ("b", "to", "a"): ba})
        return tuple(v for v in made.values() if v is not None)


def _two(g: Given) -> tuple[Any, ...]:
    return g.x, g.first, g.edges, g.other


LAYERS: dict[str, Layer] = {
    "AGNNConv": (lambda p: p.AGNNConv(), _x),
    "APPNP": (lambda p: p.APPNP(3, 0.1), _weighted),
    "ARMAConv": (lambda p: p.ARMAConv(WIDTH, OUT, 2, 2), _weighted),
    "AntiSymmetricConv": (lambda p: p.AntiSymmetricConv(WIDTH), _x),
    "CGConv": (lambda p: p.CGConv(WIDTH, 7), _featured),
    "ChebConv": (lambda p: p.ChebConv(WIDTH, OUT, 3), _weighted),
    "ClusterGCNConv": (lambda p: p.ClusterGCNConv(WIDTH, OUT), _x),
    "DNAConv": (lambda p: p.DNAConv(WIDTH, 2, 2), lambda g: (g.history, g.edges)),
    "DirGNNConv": (lambda p: p.DirGNNConv(p.SAGEConv(WIDTH, OUT)), _x),
    "EGConv": (lambda p: p.EGConv(WIDTH, OUT, ["mean", "max", "symnorm", "std"]), _x),
    "EdgeConv": (lambda p: p.EdgeConv(_mlp(2 * WIDTH, OUT)), _x),
    "FAConv": (lambda p: p.FAConv(WIDTH), lambda g: (g.x, g.first, g.edges)),
    "FastRGCNConv": (lambda p: p.FastRGCNConv(WIDTH, OUT, KINDS), lambda g: (g.x, g.edges, g.kind)),
    "FeaStConv": (lambda p: p.FeaStConv(WIDTH, OUT, 3), _x),
    "FiLMConv": (lambda p: p.FiLMConv(WIDTH, OUT, KINDS), lambda g: (g.x, g.edges, g.kind)),
    "GATConv": (lambda p: p.GATConv(WIDTH, 8, 3), _x),
    "GATConv edges": (lambda p: p.GATConv(WIDTH, 8, 3, add_self_loops=False, edge_dim=7), _featured),
    "GATv2Conv": (lambda p: p.GATv2Conv(WIDTH, 8, 3), _x),
    "GATv2Conv edges": (lambda p: p.GATv2Conv(WIDTH, 8, 3, add_self_loops=False, edge_dim=7), _featured),
    "GCN2Conv": (lambda p: p.GCN2Conv(WIDTH, 0.1), lambda g: (g.x, g.first, g.edges, g.weight)),
    "GCNConv": (lambda p: p.GCNConv(WIDTH, OUT), _weighted),
    "GENConv": (lambda p: p.GENConv(WIDTH, OUT, learn_t=True), _x),
    "GENConv power": (lambda p: p.GENConv(WIDTH, OUT, aggr="powermean", learn_p=True), _x),
    "GINConv": (lambda p: p.GINConv(_mlp(WIDTH, OUT), train_eps=True), _x),
    "GINEConv": (lambda p: p.GINEConv(_mlp(WIDTH, OUT)), lambda g: (g.x, g.edges, g.alike)),
    "GMMConv": (lambda p: p.GMMConv(WIDTH, OUT, 2, 3), lambda g: (g.x, g.edges, g.pseudo)),
    "GPSConv": (lambda p: p.GPSConv(WIDTH, p.GINConv(_mlp(WIDTH, WIDTH)), 2), lambda g: (g.x, g.edges, g.batch)),
    "GatedGraphConv": (lambda p: p.GatedGraphConv(OUT, 2), _weighted),
    "GeneralConv": (lambda p: p.GeneralConv(WIDTH, OUT, 7, heads=3, attention=True), _featured),
    "GraphConv": (lambda p: p.GraphConv(WIDTH, OUT), _weighted),
    "HANConv": (lambda p: Hetero(p.HANConv(WIDTH, OUT, METADATA, 2)), _two),
    "HEATConv": (
        lambda p: p.HEATConv(WIDTH, OUT, KINDS, KINDS, 5, 7, 6, 2),
        lambda g: (g.x, g.edges, g.of_node, g.kind, g.features),
    ),
    "HGTConv": (lambda p: Hetero(p.HGTConv(WIDTH, OUT, METADATA, 2)), _two),
    "HeteroConv": (
        lambda p: Hetero(p.HeteroConv({edge: p.SAGEConv((WIDTH, WIDTH), OUT) for edge in METADATA[1]}, aggr="sum")),
        _two,
    ),
    "HypergraphConv": (lambda p: p.HypergraphConv(WIDTH, OUT), _x),
    "LEConv": (lambda p: p.LEConv(WIDTH, OUT), _weighted),
    "LGConv": (lambda p: p.LGConv(), _weighted),
    "MFConv": (lambda p: p.MFConv(WIDTH, OUT, 6), _x),
    "MeshCNNConv": (lambda p: p.MeshCNNConv(WIDTH, OUT), lambda g: (g.x, g.mesh)),
    "MixHopConv": (lambda p: p.MixHopConv(WIDTH, OUT), _weighted),
    "NNConv": (lambda p: p.NNConv(WIDTH, OUT, _mlp(7, WIDTH * OUT), aggr="mean"), _featured),
    "PDNConv": (lambda p: p.PDNConv(WIDTH, OUT, 7, 9), _featured),
    "PNAConv": (
        lambda p: p.PNAConv(
            *(WIDTH, OUT, ["mean", "min", "max", "std", "sum", "var"], ["identity", "amplification", "attenuation"]),
            **{"deg": torch.tensor([2, 5, 9, 20, 14, 10]), "edge_dim": 7, "towers": 2},
        ),
        _featured,
    ),
    "PPFConv": (
        lambda p: p.PPFConv(_mlp(WIDTH + 4, OUT), add_self_loops=False),  # a loop's angle is of a vector of zeros
        lambda g: (g.x, g.places, g.normals, g.edges),
    ),
    "PointGNNConv": (
        lambda p: p.PointGNNConv(_mlp(WIDTH, 3), _mlp(WIDTH + 3, OUT), _mlp(OUT, WIDTH)),
        lambda g: (g.x, g.places, g.edges),
    ),
    "PointNetConv": (lambda p: p.PointNetConv(_mlp(WIDTH + 3, OUT)), lambda g: (g.x, g.places, g.edges)),
    "PointTransformerConv": (lambda p: p.PointTransformerConv(WIDTH, OUT), lambda g: (g.x, g.places, g.edges)),
    "RGATConv": (
        lambda p: p.RGATConv(WIDTH, 8, KINDS, heads=2, edge_dim=7),
        lambda g: (g.x, g.edges, g.kind, g.features),
    ),
    "RGCNConv": (lambda p: p.RGCNConv(WIDTH, OUT, KINDS), lambda g: (g.x, g.edges, g.kind)),
    "ResGatedGraphConv": (lambda p: p.ResGatedGraphConv(WIDTH, OUT, edge_dim=7), _featured),
    "SAGEConv": (lambda p: p.SAGEConv(WIDTH, OUT), _x),
    "SAGEConv max": (lambda p: p.SAGEConv(WIDTH, OUT, aggr="max", project=True), _x),
    "SAGEConv many": (lambda p: p.SAGEConv(WIDTH, OUT, aggr=["mean", "max", "min", "sum", "std"]), _x),
    "SAGEConv median": (lambda p: p.SAGEConv(WIDTH, OUT, aggr="median"), _x),
    "SAGEConv mul": (lambda p: p.SAGEConv(WIDTH, OUT, aggr="mul"), _x),
    "SGConv": (lambda p: p.SGConv(WIDTH, OUT, 2), _weighted),
    "SSGConv": (lambda p: p.SSGConv(WIDTH, OUT, 0.1, 2), _weighted),
    "SignedConv": (lambda p: p.SignedConv(WIDTH, OUT, True), lambda g: (g.x, g.edges, g.other)),
    "SimpleConv": (lambda p: p.SimpleConv("mean", "sum"), _weighted),
    "SuperGATConv": (lambda p: p.SuperGATConv(WIDTH, 8, 3), _x),
    "TAGConv": (lambda p: p.TAGConv(WIDTH, OUT), _weighted),
    "TransformerConv": (lambda p: p.TransformerConv(WIDTH, 8, 3, beta=True, edge_dim=7), _featured),
    "WLConv": (lambda p: p.WLConv(), lambda g: (g.colours, g.edges)),
    "WLConvContinuous": (lambda p: p.WLConvContinuous(), _weighted),
}
"""By name: makes the layer of ``torch_geometric.nn``, and picks its inputs."""


def make(name: str, device: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """The layer in float32, without dropout, and its inputs."""
    from torch_geometric import nn as pyg  # pyright: ignore[reportMissingImports]

    build, pick = LAYERS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = build(pyg).to(device).eval()
        return layer, pick(Given(device))
