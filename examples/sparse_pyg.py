"""A PyTorch Geometric model as stream graphs and as loops: its gathers and scatters are one product with the adjacency.

python examples/sparse_pyg.py     wants torch-geometric
"""

from __future__ import annotations

import torch
from torch import nn
from torch_geometric.nn import SAGEConv  # pyright: ignore[reportMissingImports]

from tilestream.sparse import Schedule, compile, graphs
from tilestream.sparse.cpu import CpuProgram


class Net(nn.Module):
    """Two layers that average neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(34, 16), SAGEConv(16, 2)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index).log_softmax(-1)


def main() -> None:
    torch.manual_seed(0)
    links = graphs.karate().adjacency.tocoo()
    edge_index = torch.stack([torch.from_numpy(links.row), torch.from_numpy(links.col)]).long()
    module, x = Net().double().eval(), torch.rand(34, 34, dtype=torch.float64)
    for fuse in ("none", "all"):
        program = compile(module, x, edge_index, schedule=Schedule(fuse=fuse))
        result = program.run(x, edge_index)
        loops = CpuProgram(program)
        loops.run(x, edge_index)  # the first call compiles
        again = loops.run(x, edge_index)
        assert torch.allclose(result.output, module(x, edge_index))
        assert torch.allclose(again.output, result.output)
        regions = len(program.regions)
        print(f"fuse={fuse}: {regions} regions, {result.cycles:,} cycles; as loops {1e6 * again.seconds:.0f} us")
    # training: gradients through the loops, whose fusion is chosen for a processor
    loops, target = CpuProgram(compile(module, x, edge_index)), torch.arange(34) % 2
    optimiser = torch.optim.Adam(module.parameters(), 0.01)
    losses = []
    for _ in range(20):
        optimiser.zero_grad()
        scores = loops(x, edge_index)
        assert isinstance(scores, torch.Tensor)  # one result, so no tuple
        loss = torch.nn.functional.nll_loss(scores, target)
        loss.backward()
        optimiser.step()
        losses.append(float(loss))
    print(f"loss {losses[0]:.3f}, after 20 steps {losses[-1]:.3f}")
    print("adjacency:", *[name for name in program.constants if "adjacency" in name])


if __name__ == "__main__":
    main()
