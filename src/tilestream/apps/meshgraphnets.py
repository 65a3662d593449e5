"""MeshGraphNets (Pfaff et al. 2021): google-deepmind/deepmind-research, ``meshgraphnets/core_model.py``.

Layers of the reference (``latent_size=128, num_layers=2, message_passing_steps=15``):

- encoder: nodes 11-128-128-128 and edges 3-128-128-128, ReLU, LayerNorm;
- 15 blocks: edges 384-128-128-128 and nodes 256-128-128-128, ReLU, LayerNorm, residual on both, messages summed;
- decoder: 128-128-128-2, no LayerNorm.

The case is ``cylinder_flow``: velocity (2) and a one-hot node type (9) at each node, relative position and distance on
each edge; a mesh of about 1900 nodes and 11000 directed edges, batches of 2. Normalisation of inputs is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilestream.apps.message_passing import EncodeProcessDecode


@dataclass(frozen=True)
class Sizes:
    """``nodes`` and ``edges`` are of one mesh, edges counted in both directions; ``batch`` meshes make one graph."""

    batch: int = 2
    nodes: int = 1900
    edges: int = 11000
    node_features: int = 11
    edge_features: int = 3
    outs: int = 2
    width: int = 128
    hidden: int = 2
    steps: int = 15
    hand_on: bool = False


def module(sizes: Sizes) -> EncodeProcessDecode:
    return EncodeProcessDecode(
        sizes.node_features,
        sizes.edge_features,
        sizes.outs,
        sizes.width,
        sizes.hidden,
        sizes.steps,
        hand_on=sizes.hand_on,
    )


def inputs(sizes: Sizes) -> tuple[Tensor, ...]:
    """Nodes, edges, senders, receivers of ``batch`` random meshes: each edge joins nodes of its own mesh.

    fp32 [batch nodes, node_features], fp32 [batch edges, edge_features], two int64 [batch edges].
    """
    first = torch.arange(sizes.batch).repeat_interleave(sizes.edges, output_size=sizes.batch * sizes.edges)
    ends = torch.randint(sizes.nodes, (2, sizes.batch * sizes.edges)) + first * sizes.nodes
    return (
        torch.randn(sizes.batch * sizes.nodes, sizes.node_features),
        torch.randn(sizes.batch * sizes.edges, sizes.edge_features),
        ends[0].clone(),
        ends[1].clone(),
    )
