"""Models of PyTorch Geometric as it ships them, over a random graph: what Inductor makes of message passing.

``make("gin")`` gives the module and its inputs, node features [nodes, width] and an edge index [2, edges], in bf16. GCN
takes weights of edges in the place of its normalisation, which synchronises; attention adds no loops, for the same
reason. Needs ``torch_geometric``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

PREFIX = "pyg_"
"""Of the names of these models among others (``whole_models.py``)."""


class Net(nn.Module):
    """Convolutions with a ReLU behind each."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, edge_index: Tensor, *weights: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x, edge_index, *weights))
        return x


def _mlp(*sizes: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.ReLU(), nn.Linear(sizes[1], sizes[2]))


def _layer(model: str, width: int) -> Callable[[], nn.Module]:
    from torch_geometric import nn as pyg  # pyright: ignore[reportMissingImports]

    return {
        "gin": lambda: pyg.GINConv(_mlp(width, width, width)),
        "sage": lambda: pyg.SAGEConv(width, width),
        "gcn": lambda: pyg.GCNConv(width, width, normalize=False),
        "gat": lambda: pyg.GATConv(width, width // 4, heads=4, add_self_loops=False),
        "edge_conv": lambda: pyg.EdgeConv(_mlp(2 * width, width, width), aggr="max"),
    }[model]


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    """New tensors are of ``dtype``: modules of fake ones cannot be converted."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def make(
    model: str, width: int, layers: int, nodes: int, edges: int, device: str = "meta", dtype: str = "bf16"
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    kind = {"bf16": torch.bfloat16, "f32": torch.float32}[dtype]
    layer = _layer(model, width)
    with torch.random.fork_rng(devices=[]), torch.device(device), default(kind):
        torch.manual_seed(0)
        module = Net([layer() for _ in range(layers)]).eval().requires_grad_(False)
        inputs = (torch.randn(nodes, width), torch.randint(nodes, (2, edges)))
        weights = (torch.rand(edges),) if model == "gcn" else ()
    return module, (*inputs, *weights)
