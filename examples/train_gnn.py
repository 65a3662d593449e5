"""Train a node classifier on a graph of communities: sums, means and a softmax over edges, one compiled training step.

    python examples/train_gnn.py                      20,000 nodes, 160,000 edges, 100 steps; on a CPU 1,500 and 12,000,
                                                      60 steps, which is a minute with compilation
    python examples/train_gnn.py --pyg                the same by PyTorch Geometric's SAGEConv and GATConv
    python examples/train_gnn.py --nodes 300 --steps 20

Each node's features say little of its community, those of its neighbours more: most edges stay inside. The layers are
written as anyone writes them in plain PyTorch (gather, compute, add up by receiver), so that nothing else is needed. On
a Hopper GPU the list of edges is sorted by receiver once a step for both layers, forward and backward.
``tilestream.explain`` says what became of which line.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilestream.cli.progress import Progress

FEATURES, WIDTH, HEADS, CLASSES = 32, 64, 4, 7
DEGREE, INSIDE, NOISE = 8, 0.7, 3.0


def communities(nodes: int, device: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Features [nodes, FEATURES], edges int64 [2, nodes * DEGREE] (senders, receivers) and communities int64 [nodes].

    Receivers are drawn at random: some nodes have no edge at all.
    """
    random = torch.Generator().manual_seed(seed)
    of = torch.randint(CLASSES, (nodes,), generator=random)
    sender, receiver = torch.randint(nodes, (2, nodes * DEGREE), generator=random)
    order, counts = torch.argsort(of, stable=True), torch.bincount(of, minlength=CLASSES)
    starts = counts.cumsum(0) - counts
    within = (torch.rand(len(sender), generator=random) * counts[of[receiver]]).long()
    friend = order[starts[of[receiver]] + within]
    sender = torch.where(torch.rand(len(sender), generator=random) < INSIDE, friend, sender)
    centres = torch.randn(CLASSES, FEATURES, generator=random)
    x = centres[of] + NOISE * torch.randn(nodes, FEATURES, generator=random)
    return x.to(device), torch.stack([sender, receiver]).to(device), of.to(device)


class Mean(nn.Module):
    """GraphSAGE's layer: a projection of a node, and one of the mean of its senders."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(ins, outs), nn.Linear(ins, outs, bias=False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        sender, receiver = edges
        total = x.new_zeros(x.shape).index_add(0, receiver, x[sender])
        count = x.new_zeros(len(x)).index_add(0, receiver, x.new_ones(len(receiver)))
        return self.own(x) + self.others(total / count.clamp(min=1)[:, None])


class Attention(nn.Module):
    """GAT's layer: of each head, the senders' projections by shares, which are a softmax over a node's edges."""

    def __init__(self, ins: int, outs: int, heads: int) -> None:
        super().__init__()
        self.heads, self.outs = heads, outs
        self.project = nn.Linear(ins, heads * outs, bias=False)
        self.scores = nn.Linear(ins, 2 * heads, bias=False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        sender, receiver = edges
        values = self.project(x).view(-1, self.heads, self.outs)
        sends, receives = self.scores(x).float().chunk(2, dim=-1)
        score = F.leaky_relu(sends[sender] + receives[receiver], 0.2)
        wide = receiver[:, None].expand_as(score)
        most = score.new_zeros(len(x), self.heads).scatter_reduce(0, wide, score, "amax", include_self=False)
        shares = torch.exp(score - most[receiver].detach())
        total = score.new_zeros(len(x), self.heads).index_add(0, receiver, shares)
        shares = (shares / total[receiver].clamp(min=1e-9)).to(values.dtype)
        messages = values[sender] * shares[..., None]
        return torch.zeros_like(values).index_add(0, receiver, messages).mean(dim=1)


class Classifier(nn.Module):
    """Two layers over one graph."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x, edges)), edges)


def plain() -> nn.Module:
    return Classifier(Mean(FEATURES, WIDTH), Attention(WIDTH, CLASSES, HEADS))


def geometric() -> nn.Module:
    try:
        from torch_geometric import nn as pyg  # pyright: ignore[reportMissingImports]
    except ImportError as failure:
        raise SystemExit(f"--pyg needs torch-geometric ({failure}): pip install torch-geometric") from failure
    attention = pyg.GATConv(WIDTH, CLASSES, heads=HEADS, concat=False, add_self_loops=False)
    return Classifier(pyg.SAGEConv(FEATURES, WIDTH), attention)


def train(make: Callable[[], nn.Module], nodes: int, steps: int, seed: int = 0) -> tuple[float, float]:
    """The last loss, and the share of held-out nodes whose community is found."""
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, edges, of = communities(nodes, device, seed)
    known = torch.rand(nodes, device=device) < 0.5
    model = make().to(device)
    fast = torch.compile(model, backend="tilestream")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def scores() -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return fast(x, edges).float()

    with Progress() as say:
        say(f"compiling: the first of {steps} training steps on {device}")
        for step in range(steps):
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(scores(), of, reduction="none")[known].mean()
            loss.backward()
            optimizer.step()
            if step % max(1, steps // 10) == 0:
                say(f"step {step + 1} of {steps}: loss {loss.item():.3f}")
    with torch.no_grad():
        found = scores().argmax(dim=1) == of
    return loss.item(), found[~known].float().mean().item()


def main() -> None:
    wanted = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    on_gpu = torch.cuda.is_available()
    wanted.add_argument("--nodes", type=int, default=20_000 if on_gpu else 1_500)
    wanted.add_argument("--steps", type=int, default=100 if on_gpu else 60)
    wanted.add_argument("--pyg", action="store_true", help="PyTorch Geometric's layers")
    given = wanted.parse_args()
    loss, found = train(geometric if given.pyg else plain, given.nodes, given.steps)
    print(f"loss {loss:.3f}; of held-out nodes {100 * found:.1f} % right, where chance is {100 / CLASSES:.1f} %")


if __name__ == "__main__":
    main()
