"""Networks of edges on the GPU: rows that lanes load, sums at nodes as an epilogue; against float64, and in bits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from benchmarks.lib.edge_layers import at_nodes, by_torch, edge_conv, tensors
from tilestream import cuda
from tilestream.devices import get
from tilestream.ir.pipeline import Pipeline, Residency
from tilestream.kernels.fits import verify_on
from tilestream.plan.passes.forms import load_directly
from tilestream.run import oracle
from tilestream.run.backend import tilestream

pytestmark = pytest.mark.gpu


def staged(program: Pipeline, direct: bool, residency: Residency = Residency.RESIDENT) -> Pipeline:
    made = load_directly(program) if direct else program
    made = made.with_stages((made.stages[0].with_(replicas=132, residency=residency),))
    verify_on(made, get("h200"))
    return made


def counts(kind: str) -> Tensor:
    """How many edges each node has."""
    g = torch.Generator().manual_seed(0)
    return {
        "sixteen each": torch.full((4096,), 16),
        "uniform": torch.bincount(torch.randint(5000, (70_001,), generator=g), minlength=5000),
        "hubs": torch.cat([torch.tensor([0, 20_000, 3]), torch.randint(9, (3000,), generator=g), torch.tensor([5000])]),
        "one node": torch.tensor([0, 30_000, 0]),
        "none": torch.zeros(77, dtype=torch.long),
        "few": torch.tensor([1, 0, 2]),
    }[kind].cuda()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("kind", ["sixteen each", "uniform", "hubs", "one node", "none", "few"])
def test_sums(kind: str, direct: bool) -> None:
    hows = ("max", "sum", "min")
    program = edge_conv(64, 64, 128, hows)
    given = tensors(program, counts(kind))
    edges, nodes = len(given["receivers"]), len(given["v"])
    kernel = cuda.build(staged(program, direct))
    made = []
    for _ in range(2):
        out = {how: torch.full((nodes, 128), torch.nan, device="cuda", dtype=torch.bfloat16) for how in hows}
        made.append(kernel(given, edges, out))
    exact, eager = by_torch(given, torch.float64), by_torch(given, torch.bfloat16)
    for how in hows:
        want = at_nodes(exact, given, how)
        assert torch.equal(made[0][how], made[1][how])
        assert not made[0][how][counts(kind) == 0].any()
        if not edges:
            continue
        assert oracle.error(made[0][how], want) <= 2 * oracle.error(at_nodes(eager, given, how), want) + 1e-12


@pytest.mark.parametrize("layer", [(16, 64, 64), (64, 128, 128), (8, 24, 33), (128, 128, 64)])
@pytest.mark.parametrize("residency", [Residency.RESIDENT, Residency.STREAMED])
def test_rows_that_lanes_load(layer: tuple[int, int, int], residency: Residency) -> None:
    program = edge_conv(*layer, ())
    given = tensors(program, counts("uniform"))
    edges = len(given["receivers"])
    out = {"edges": torch.full((edges, layer[2]), torch.nan, device="cuda", dtype=torch.bfloat16)}
    if layer[2] * 2 % 16:
        out = {}
    got = cuda.build(staged(program, True, residency))(given, edges, out)["edges"]
    want = by_torch(given, torch.float64)
    assert oracle.error(got, want) <= 2 * oracle.error(by_torch(given, torch.bfloat16), want)


class EdgeConv(nn.Module):
    def __init__(self, features: int, out: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 * features, out), nn.ReLU(), nn.Linear(out, out))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        own, other = x[edges[1]], x[edges[0]]
        rows = self.net(torch.cat([own, other - own], -1))
        places = edges[1][:, None].expand_as(rows)
        return rows.new_zeros(len(x), rows.shape[1]).scatter_reduce(0, places, rows, "amax", include_self=False).relu()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([EdgeConv(16, 64), EdgeConv(64, 64), EdgeConv(64, 128)])

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edges)
        return x


def test_a_compiled_model() -> None:
    """Also where the list changes between replays of a CUDA graph."""
    torch.manual_seed(0)
    nodes, count = 16_384, 262_144
    module = Layers().cuda().bfloat16()
    exact = copy.deepcopy(module).double()
    x = torch.randn(nodes, 16, device="cuda", dtype=torch.bfloat16)
    edges = torch.randint(nodes, (2, count), device="cuda")
    compiled = torch.compile(module, backend=tilestream)
    with torch.no_grad():
        for _ in range(3):
            compiled(x, edges)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = compiled(x, edges)
        for _ in range(2):
            edges.copy_(torch.randint(nodes, (2, count), device="cuda"))
            graph.replay()
            want = exact(x.double(), edges)
            assert oracle.error(got, want) <= 2 * oracle.error(module(x, edges), want)
