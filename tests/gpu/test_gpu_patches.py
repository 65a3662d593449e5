"""Patch embeddings on the GPU: as layers over rows they are what they are in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tilestream.run.backend import tilestream

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [4, 16])
def test_patch_embeddings(size: int, layout: torch.memory_format) -> None:
    model = nn.Sequential(nn.Conv2d(3, 192, size, size), nn.Flatten(2)).cuda().bfloat16().eval()
    model = model.to(memory_format=layout)  # pyright: ignore[reportCallIssue]
    norm = nn.LayerNorm(192).cuda().bfloat16()
    x = torch.randn(32, 3, 224, 224, device="cuda").bfloat16().to(memory_format=layout)

    def embedded(x: torch.Tensor, parts: tuple[nn.Module, nn.Module]) -> torch.Tensor:
        return parts[1](parts[0](x).transpose(1, 2))

    compiled = torch.compile(lambda x: embedded(x, (model, norm)), backend=tilestream)
    with torch.no_grad():
        wide = (copy.deepcopy(model).double(), copy.deepcopy(norm).double())
        exact, eager, got = embedded(x.double(), wide), embedded(x, (model, norm)), compiled(x)
        assert torch.equal(got, compiled(x))
    assert (got - exact).norm() <= 2 * (eager - exact).norm()
