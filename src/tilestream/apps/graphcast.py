"""GraphCast (Lam et al. 2023): google-deepmind/graphcast, ``graphcast.py`` and ``deep_typed_graph_net.py``.

Layers of the reference (``latent_size=512, hidden_layers=1, gnn_msg_steps=16, mesh_size=6``), each MLP
Linear-SiLU-Linear-LayerNorm, 512 wide:

- embedding: grid nodes 474, mesh nodes 3, and edges 4 of three kinds (grid to mesh, mesh, mesh to grid);
- grid to mesh: edges 1536, mesh nodes 1024 with residual, grid nodes 512 with residual;
- processor, 16 times: edges 1536 and mesh nodes 1024, residual on both;
- mesh to grid: edges 1536, grid nodes 1024 with residual;
- output MLP 512-512-227 without LayerNorm.

Sums gather messages at their receivers. The full graph has 721 x 1440 grid points and a mesh of level 6 with the edges
of every level; the small one 181 x 360 and level 5. Scaling of inputs and the residual on the weather are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tilestream.apps import geodesic
from tilestream.apps.message_passing import EncodeProcessDecode, MessagePassing, mlp

FULL_GRID_TO_MESH = 1_618_824
"""Edges from grid to mesh at 0.25 degrees and level 6, as ``geodesic`` finds them."""


@dataclass(frozen=True)
class Sizes:
    """``grid_to_mesh`` is the number of those edges; the graph maker finds it where it is 0, but for sizes alone it
    must be known."""

    latitudes: int = 721
    longitudes: int = 1440
    level: int = 6
    grid_to_mesh: int = FULL_GRID_TO_MESH
    grid_features: int = 474
    mesh_features: int = 3
    edge_features: int = 4
    outs: int = 227
    width: int = 512
    steps: int = 16


class GraphCast(nn.Module):
    """``(grid [G, 474], mesh [M, 3], three edge features [E, 4], three edge indices int64 [2, E])`` to [G, 227].

    Features and indices come as grid to mesh, mesh, mesh to grid; row 0 of an index are senders, row 1 receivers.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        s, width = sizes, sizes.width

        def net(ins: int) -> nn.Sequential:
            return mlp(ins, width, width, 1, nn.SiLU)

        self.embed_grid, self.embed_mesh = net(s.grid_features), net(s.mesh_features)
        self.embed_edges = nn.ModuleList(net(s.edge_features) for _ in range(3))
        self.to_mesh_edges, self.to_mesh_nodes, self.grid_nodes = net(3 * width), net(2 * width), net(width)
        self.processor = nn.ModuleList(MessagePassing(width, 1, nn.SiLU) for _ in range(s.steps))
        self.to_grid_edges, self.to_grid_nodes = net(3 * width), net(2 * width)
        self.output = mlp(width, width, s.outs, 1, nn.SiLU, norm=False)

    def forward(
        self,
        grid: Tensor,
        mesh: Tensor,
        to_mesh: Tensor,
        inside: Tensor,
        to_grid: Tensor,
        to_mesh_index: Tensor,
        inside_index: Tensor,
        to_grid_index: Tensor,
    ) -> Tensor:
        g, m = self.embed_grid(grid), self.embed_mesh(mesh)
        edges = [net(e) for net, e in zip(self.embed_edges, (to_mesh, inside, to_grid), strict=True)]
        incoming = _messages(self.to_mesh_edges, edges[0], g, m, to_mesh_index)
        m = m + self.to_mesh_nodes(torch.cat([m, incoming], -1))
        g = g + self.grid_nodes(g)
        e = edges[1]
        for block in self.processor:
            m, e = block(m, e, inside_index[0], inside_index[1])
        incoming = _messages(self.to_grid_edges, edges[2], m, g, to_grid_index)
        g = g + self.to_grid_nodes(torch.cat([g, incoming], -1))
        return self.output(g)


def _messages(net: nn.Module, e: Tensor, source: Tensor, target: Tensor, index: Tensor) -> Tensor:
    """What arrives at each node of ``target``: [nodes, width]."""
    message = net(torch.cat([e, source.index_select(0, index[0]), target.index_select(0, index[1])], -1))
    return torch.zeros_like(target).index_add(0, index[1], message)


def module(sizes: Sizes) -> GraphCast:
    return GraphCast(sizes)


def inputs(sizes: Sizes) -> tuple[Tensor, ...]:
    """Features and the graph. On the meta device only sizes are made, from ``grid_to_mesh``; else the real graph.

    The real graph of a full globe takes about 8 seconds and 2 GB. Features are random, not weather.
    """
    s = sizes
    grid, nodes = s.latitudes * s.longitudes, geodesic.mesh_nodes(s.level)
    if torch.get_default_device().type == "meta":
        counts = (s.grid_to_mesh, geodesic.mesh_edges(s.level), 3 * grid)
        indices = [torch.empty(2, count, dtype=torch.int64) for count in counts]
    else:
        mesh, points = geodesic.icosphere(s.level), geodesic.grid_points(s.latitudes, s.longitudes)
        graph = (geodesic.grid_to_mesh(points, mesh), mesh.edges, geodesic.mesh_to_grid(points, mesh))
        indices = [torch.tensor(edges.T.copy()) for edges in graph]
    features = [torch.randn(index.shape[1], s.edge_features) for index in indices]
    return torch.randn(grid, s.grid_features), torch.randn(nodes, s.mesh_features), *features, *indices


@dataclass(frozen=True)
class CutSizes:
    """Part of GraphCast on one graph: two embeddings, ``steps`` blocks, the output MLP.

    Kitsune's paper counts 35 operators for it, 101 with training, without saying which part it took. Two blocks that
    hand on their messages without an edge residual (as grid to mesh and mesh to grid do) have these counts.
    """

    nodes: int = geodesic.mesh_nodes(5)
    edges: int = geodesic.mesh_edges(5)
    node_features: int = 474
    edge_features: int = 4
    outs: int = 227
    width: int = 512
    steps: int = 2


def cut_module(sizes: CutSizes) -> EncodeProcessDecode:
    s = sizes
    return EncodeProcessDecode(
        s.node_features, s.edge_features, s.outs, s.width, 1, s.steps, nn.SiLU, edge_residual=False
    )


def cut_inputs(sizes: CutSizes) -> tuple[Tensor, ...]:
    """Nodes, edges, senders, receivers of a random graph."""
    ends = torch.randint(sizes.nodes, (2, sizes.edges))
    return (
        torch.randn(sizes.nodes, sizes.node_features),
        torch.randn(sizes.edges, sizes.edge_features),
        ends[0].clone(),
        ends[1].clone(),
    )
