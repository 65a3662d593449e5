"""Encode, process, decode on a graph: what MeshGraphNets and GraphCast are both made of.

Sanchez-Gonzalez et al. 2020 and Pfaff et al. 2021: MLPs embed nodes and edges, blocks pass messages along the edges,
an MLP reads the nodes out. Every MLP but the last ends with LayerNorm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def mlp(
    ins: int, width: int, outs: int, hidden: int = 2, activation: type[nn.Module] = nn.ReLU, norm: bool = True
) -> nn.Sequential:
    """``hidden`` layers of ``width`` with ``activation`` after each, a linear layer, LayerNorm where ``norm``.

    [*, ins] to [*, outs].
    """
    parts: list[nn.Module] = []
    for layer in range(hidden):
        parts += [nn.Linear(ins if layer == 0 else width, width), activation()]
    parts.append(nn.Linear(width, outs))
    return nn.Sequential(*parts, nn.LayerNorm(outs)) if norm else nn.Sequential(*parts)


class MessagePassing(nn.Module):
    """One block: edges from their ends, then nodes from the sum of their incoming edges.

    ``e' = MLP(cat(e, v[senders], v[receivers]))``, ``v += MLP(cat(v, sum of e' by receiver))``; the sum takes the
    edges before their residual, as in the reference. Edges [E, width] and nodes [N, width].

    Args:
        edge_residual: hand on ``e + e'`` as MeshGraphNets and GraphCast's processor do, or ``e'`` itself.
    """

    def __init__(
        self,
        width: int = 128,
        hidden: int = 2,
        activation: type[nn.Module] = nn.ReLU,
        edge_residual: bool = True,
    ) -> None:
        super().__init__()
        self.edge_residual = edge_residual
        self.edges = mlp(3 * width, width, width, hidden, activation)
        self.nodes = mlp(2 * width, width, width, hidden, activation)

    def forward(self, v: Tensor, e: Tensor, senders: Tensor, receivers: Tensor) -> tuple[Tensor, Tensor]:
        message = self.edges(torch.cat([e, v.index_select(0, senders), v.index_select(0, receivers)], -1))
        incoming = torch.zeros_like(v).index_add(0, receivers, message)
        v = v + self.nodes(torch.cat([v, incoming], -1))
        return v, (e + message if self.edge_residual else message)


class EncodeProcessDecode(nn.Module):
    """``(nodes [N, node_features], edges [E, edge_features], senders [E], receivers [E])`` to [N, outs].

    Args:
        steps: how many blocks, each with weights of its own.
        hand_on: return the edges of the last block as well, as inside a longer model.
    """

    def __init__(
        self,
        node_features: int = 11,
        edge_features: int = 3,
        outs: int = 2,
        width: int = 128,
        hidden: int = 2,
        steps: int = 15,
        activation: type[nn.Module] = nn.ReLU,
        edge_residual: bool = True,
        hand_on: bool = False,
    ) -> None:
        super().__init__()
        self.hand_on = hand_on
        self.embed_nodes = mlp(node_features, width, width, hidden, activation)
        self.embed_edges = mlp(edge_features, width, width, hidden, activation)
        self.blocks = nn.ModuleList(MessagePassing(width, hidden, activation, edge_residual) for _ in range(steps))
        self.decode = mlp(width, width, outs, hidden, activation, norm=False)

    def forward(
        self, nodes: Tensor, edges: Tensor, senders: Tensor, receivers: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        v, e = self.embed_nodes(nodes), self.embed_edges(edges)
        for block in self.blocks:
            v, e = block(v, e, senders, receivers)
        out = self.decode(v)
        return (out, e) if self.hand_on else out
