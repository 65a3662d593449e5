"""Padded copies of matrices on the GPU: values, views, graphs, and in front of a library's product."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from tilestream.cuda.pad import padded
from tilestream.run import oracle
from tilestream.run.backend import tilestream
from tilestream.run.timing import capture

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("k", [1, 63, 479, 1030])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values(k: int, dtype: torch.dtype) -> None:
    columns = -(-k // 8) * 8
    whole = torch.randn(3000, k + 3, device="cuda").to(dtype)
    given = [torch.randn(2048, k, device="cuda").to(dtype), whole[5:, 3:]]  # a view at an odd place, of longer rows
    graph = capture(lambda: padded(given, columns))
    assert isinstance(graph.outputs, list)
    for got in graph.outputs:
        got.fill_(float("nan"))
    graph.graph.replay()
    for got, again, m in zip(graph.outputs, padded(given, columns), given, strict=True):
        want = functional.pad(m, (0, columns - k))
        assert torch.equal(got, want) and torch.equal(again, want)


@pytest.mark.parametrize("rows", [700, 2048])
def test_a_compiled_layer_whose_weight_changes(rows: int) -> None:
    module = nn.Sequential(nn.Linear(479, 1024), nn.ReLU(), nn.Linear(1024, 8)).cuda().bfloat16().eval()
    x = torch.randn(rows, 479, device="cuda").bfloat16()
    torch.compiler.reset()
    with torch.no_grad():
        fast = torch.compile(module, backend=tilestream)
        for _ in range(2):
            got, want = fast(x), module(x)
            exact = torch.func.functional_call(
                module, {name: p.double() for name, p in module.named_parameters()}, (x.double(),)
            )
            assert oracle.judge([got], [want], [exact])[2]
            module[0].weight.mul_(0.5)  # pyright: ignore
