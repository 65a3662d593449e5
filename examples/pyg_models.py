"""GraphSAGE and GIN of PyTorch Geometric through ``torch.compile(backend="tilestream")``, against eager.

    python examples/pyg_models.py                     100,000 nodes, 600,000 edges
    python examples/pyg_models.py --nodes 500 --edges 3000

Wants torch-geometric. What streams are the networks that are applied to every node; gathers go to Inductor, and sums of
messages to it or to kernels of their own, inside the same compiled model. ``tilestream.explain`` says which is which.
"""

from __future__ import annotations

import argparse

import torch
from rich.progress import track
from torch import nn

import tilestream


def models(features: int, classes: int) -> dict[str, nn.Module]:
    from torch_geometric.nn import GIN, GraphSAGE  # pyright: ignore[reportMissingImports]

    return {
        "GraphSAGE": GraphSAGE(features, 128, num_layers=3, out_channels=classes),
        "GIN": GIN(features, 128, num_layers=3, out_channels=classes),
    }


def main() -> None:
    wanted = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    wanted.add_argument("--nodes", type=int, default=100_000)
    wanted.add_argument("--edges", type=int, default=600_000)
    wanted.add_argument("--features", type=int, default=128)
    given = wanted.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(given.nodes, given.features, dtype=torch.bfloat16, device=device)
    edges = torch.randint(given.nodes, (2, given.edges), device=device)
    for name, model in track(models(given.features, 16).items(), "compiling", transient=True):
        model = model.to(device, torch.bfloat16).eval()
        fast = torch.compile(model, backend="tilestream")
        with torch.no_grad():
            want, got = model(x, edges).double(), fast(x, edges).double()
            off = ((got - want).norm() / want.norm()).item()
            flops = tilestream.explain(model, x, edges).json()["coverage"]["flops"]
        share = flops["dataflow"] / max(1, sum(flops.values()))
        print(f"{name}: {100 * off:.2f} % off eager; {share:.0%} of its FLOPs stream")


if __name__ == "__main__":
    main()
