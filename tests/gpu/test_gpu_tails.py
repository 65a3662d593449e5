"""Heads of one column, and regions that start later, on the GPU: values, bits, early launches."""

from __future__ import annotations

import copy

import pytest
import torch
from heads import HEAD, head, layers_of
from random_pipelines import tensors_for
from torch import nn

from tilestream import cuda
from tilestream.apps.zoo import mlp
from tilestream.kernels.product.shared_tile import Tail
from tilestream.kernels.product.sharing import Middle
from tilestream.plan import margins
from tilestream.plan.passes.share_tile import Split, share_tile
from tilestream.run import prepare
from tilestream.run.backend import tilestream

pytestmark = pytest.mark.gpu

SPLITS = [HEAD, Split(8, 1, Tail.CLUSTER, tile_rows=64, row_tiles=10, depth=64, middle=Middle.NONE)]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("rows", [1, 700, 2048, 8000])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_result_of_one_column(split: Split, rows: int) -> None:
    kernel = cuda.build(share_tile(head(), split))
    tensors = {n: t.cuda() for n, t in tensors_for(head(), rows, 1).items()}

    def eager(t: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = torch.relu(nn.functional.linear(t["x"], t["w1"], t["b1"]))
        return nn.functional.linear(hidden, t["w3"], t["b3"])

    (got,) = kernel(tensors, rows).values()
    exact = eager({n: t.double() for n, t in tensors.items()})
    assert error(got, exact) <= 2 * error(eager(tensors), exact) + 1e-4
    for _ in range(20):
        (again,) = kernel(tensors, rows).values()
        assert torch.equal(got, again)


@pytest.mark.parametrize("rows", [600, 2048])
def test_a_region_that_starts_later(rows: int, fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way with a tail runs whatever the times; its kernel starts while the library's still runs."""
    monkeypatch.setattr(margins, "MARGIN", 100.0)
    torch.manual_seed(0)
    model = mlp([479, 1024, 1024, 512, 256, 1], nn.ReLU).cuda().bfloat16().eval()
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        compiled = torch.compile(model, backend=tilestream, options={"cache": False})
        x = torch.randn(rows, 479, device="cuda", dtype=torch.bfloat16)
        compiled(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = compiled(x)
        for seed in range(5):  # replays one behind the other
            torch.manual_seed(seed)
            x.copy_(torch.randn_like(x))
            graph.replay()
            want = exact(x.double())
            assert error(got, want) <= 2 * error(model(x), want)
    assert [256, 1] in [layers_of(a.program) for a in prepare.analyses()]


def test_a_graph_without_regions_has_the_epilogue(fresh: None) -> None:
    torch.manual_seed(0)
    model = mlp([1024, 2048, 2048, 1024], nn.ReLU).cuda().bfloat16().eval()
    x = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        got, near = torch.compile(model, backend=tilestream)(x), model(x)
        want = copy.deepcopy(model).double()(x.double())
    assert error(got, want) <= 2 * error(near, want)
