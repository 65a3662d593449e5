"""Layers of graph networks in plain torch, as PyTorch Geometric's message passing writes them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def spread(index: Tensor, like: Tensor) -> Tensor:
    """The index of rows for each element of ``like`` [edges, *]."""
    return index.view(-1, *[1] * (like.dim() - 1)).expand_as(like)


def scatter(rows: Tensor, index: Tensor, nodes: int, how: str = "sum") -> Tensor:
    """[nodes, *]: the rows of each node by ``sum``, ``mean``, ``max`` or ``min``; 0 where it has none."""
    zeros = rows.new_zeros(nodes, *rows.shape[1:])
    if how == "sum":
        return zeros.scatter_add(0, spread(index, rows), rows)
    if how == "mean":
        count = rows.new_zeros(nodes).scatter_add(0, index, rows.new_ones(len(index))).clamp(min=1)
        return scatter(rows, index, nodes) / spread(count, zeros)
    return zeros.scatter_reduce(0, spread(index, rows), rows, f"a{how}", include_self=False)


def softmax(scores: Tensor, index: Tensor, nodes: int) -> Tensor:
    """Over the edges of each node."""
    largest = scatter(scores.detach(), index, nodes, "max")
    out = (scores - largest.index_select(0, index)).exp()
    total = scatter(out, index, nodes) + 1e-16
    return out / total.index_select(0, index)


class Layer(nn.Module):
    """Takes nodes [nodes, features], edges [2, edges] and what edges have, [edges, of_edges]."""

    def __init__(self, features: int = 16, heads: int = 2, of_edges: int = 8) -> None:
        super().__init__()
        self.features, self.heads = features, heads
        self.make(features, heads, of_edges)

    def make(self, features: int, heads: int, of_edges: int) -> None: ...


class GIN(Layer):
    def make(self, features: int, heads: int, of_edges: int) -> None:
        self.eps = nn.Parameter(torch.zeros(1))
        self.net = nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, features))

    def forward(self, x: Tensor, edges: Tensor, e: Tensor) -> Tensor:
        out = scatter(x.index_select(0, edges[0]), edges[1], len(x))
        return self.net(out + (1 + self.eps) * x)


class SAGE(Layer):
    how = "mean"

    def make(self, features: int, heads: int, of_edges: int) -> None:
        self.own, self.others = nn.Linear(features, features, bias=False), nn.Linear(features, features)

    def forward(self, x: Tensor, edges: Tensor, e: Tensor) -> Tensor:
        return self.others(scatter(x.index_select(0, edges[0]), edges[1], len(x), self.how)) + self.own(x)


class SAGEMax(SAGE):
    how = "max"


class GCN(Layer):
    def make(self, features: int, heads: int, of_edges: int) -> None:
        self.lin, self.bias = nn.Linear(features, features, bias=False), nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor, edges: Tensor, e: Tensor) -> Tensor:
        loops = torch.arange(len(x), device=x.device).expand(2, -1)
        source, to = torch.cat([edges, loops], 1)
        degree = scatter(x.new_ones(len(to)), to, len(x))
        scale = degree.pow(-0.5).masked_fill(degree == 0, 0.0)
        weight = scale[source] * scale[to]
        return scatter(weight.view(-1, 1) * self.lin(x).index_select(0, source), to, len(x)) + self.bias


class GAT(Layer):
    def make(self, features: int, heads: int, of_edges: int) -> None:
        self.lin = nn.Linear(features, heads * features, bias=False)
        self.sends, self.receives = (nn.Parameter(torch.randn(1, heads, features) / 4) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(heads * features))
        self.out = nn.Linear(heads * features, features)

    def forward(self, x: Tensor, edges: Tensor, e: Tensor) -> Tensor:
        h = self.lin(x).view(-1, self.heads, self.features)
        sent, received = (h * self.sends).sum(-1), (h * self.receives).sum(-1)
        scores = functional.leaky_relu(sent.index_select(0, edges[0]) + received.index_select(0, edges[1]), 0.2)
        alpha = softmax(scores, edges[1], len(x))
        out = scatter(alpha.unsqueeze(-1) * h.index_select(0, edges[0]), edges[1], len(x))
        return self.out(out.view(-1, self.heads * self.features) + self.bias)


class GATv2(GAT):
    def make(self, features: int, heads: int, of_edges: int) -> None:
        super().make(features, heads, of_edges)
        self.right = nn.Linear(features, heads * features)

    def forward(self, x: Tensor, edges: Tensor, e: Tensor) -> Tensor:
        left, right = (lin(x).view(-1, self.heads, self.features) for lin in (self.lin, self.right))
        sent = left.index_select(0, edges[0])
        scores = functional.leaky_relu(right.index_select(0, edges[1]) + sent, 0.2)
        alpha = softmax((scores * self.sends).sum(dim=-1), edges[1], len(x))
        out = scatter(sent * alpha.unsqueeze(-1), edges[1], len(x))
        return self.out(out.view(-1, self.heads * self.features) + self.bias)


class Transformer(Layer):
    def make(self, features: int, heads: int, of_edges: int) -> None:
        self.query, self.key, self.value = (nn.Linear(features, heads * features) for _ in range(3))
        self.edge = nn.Linear(of_edges, heads * features, bias=False)
        self.skip = nn.Linear(features, heads * features)
        self.out = nn.Linear(heads * features, features)

    def forward(self, x: Tensor, edges: Tensor, e: Tensor) -> Tensor:
        q, k, v = (lin(x).view(-1, self.heads, self.features) for lin in (self.query, self.key, self.value))
        source, to = edges
        of_edge = self.edge(e).view(-1, self.heads, self.features)
        key = k.index_select(0, source) + of_edge
        scores = (q.index_select(0, to) * key).sum(dim=-1) / self.features**0.5
        alpha = softmax(scores, to, len(x))
        out = scatter((v.index_select(0, source) + of_edge) * alpha.view(-1, self.heads, 1), to, len(x))
        return self.out(out.view(-1, self.heads * self.features) + self.skip(x))


class EdgeConv(Layer):
    def make(self, features: int, heads: int, of_edges: int) -> None:
        self.net = nn.Sequential(nn.Linear(2 * features, features), nn.ReLU(), nn.Linear(features, features))

    def forward(self, x: Tensor, edges: Tensor, e: Tensor) -> Tensor:
        own, other = x.index_select(0, edges[1]), x.index_select(0, edges[0])
        return scatter(self.net(torch.cat([own, other - own], -1)), edges[1], len(x), "max")


class PNA(Layer):
    def make(self, features: int, heads: int, of_edges: int) -> None:
        self.out = nn.Linear(5 * features, features)

    def forward(self, x: Tensor, edges: Tensor, e: Tensor) -> Tensor:
        source, to = edges
        rows = x.index_select(0, source)
        mean = scatter(rows, to, len(x), "mean")
        spread = scatter(rows * rows, to, len(x), "mean") - mean * mean
        found = [x, mean, scatter(rows, to, len(x), "max"), scatter(rows, to, len(x), "min")]
        return self.out(torch.cat([*found, spread.clamp(min=1e-5).sqrt()], -1))


class CFConv(Layer):
    def make(self, features: int, heads: int, of_edges: int) -> None:
        self.first, self.last = nn.Linear(features, features, bias=False), nn.Linear(features, features)
        self.net = nn.Sequential(nn.Linear(of_edges, features), nn.Softplus(), nn.Linear(features, features))

    def forward(self, x: Tensor, edges: Tensor, e: Tensor) -> Tensor:
        cut = 0.5 * (torch.cos(e[:, 0]) + 1.0)
        weight = self.net(e) * cut.view(-1, 1)
        return self.last(scatter(self.first(x).index_select(0, edges[0]) * weight, edges[1], len(x)))


class CGConv(Layer):
    def make(self, features: int, heads: int, of_edges: int) -> None:
        self.gate, self.core = (nn.Linear(2 * features + of_edges, features) for _ in range(2))

    def forward(self, x: Tensor, edges: Tensor, e: Tensor) -> Tensor:
        z = torch.cat([x.index_select(0, edges[1]), x.index_select(0, edges[0]), e], -1)
        return scatter(self.gate(z).sigmoid() * functional.softplus(self.core(z)), edges[1], len(x)) + x


class GINE(Layer):
    def make(self, features: int, heads: int, of_edges: int) -> None:
        self.edge = nn.Linear(of_edges, features)
        self.net = nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, features))

    def forward(self, x: Tensor, edges: Tensor, e: Tensor) -> Tensor:
        rows = (x.index_select(0, edges[0]) + self.edge(e)).relu()
        return self.net(scatter(rows, edges[1], len(x)) + x)


LAYERS = {
    layer.__name__: layer
    for layer in (GIN, SAGE, SAGEMax, GCN, GAT, GATv2, Transformer, EdgeConv, PNA, CFConv, CGConv, GINE)
}
