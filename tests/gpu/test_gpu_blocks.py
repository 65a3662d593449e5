"""Wide layers in place and maxima over rows, on the GPU: over poisoned memory, twice, and compiled from models."""

from __future__ import annotations

import pytest
import torch
from oracle_runs import reference_run, run_poisoned, to_gpu
from programs import edge_block
from random_pipelines import tensors_for
from torch import nn
from wide_programs import Points, held, mlp, points, residual

from tilestream import cuda
from tilestream.run.backend import tilestream

KERNELS = {
    "mlp": (mlp(416, 400, 400, 400, 1), 256),
    "448": (mlp(448, 448, 448, 448), 256),
    "gelu": (mlp(384, 384, 384, act="gelu"), 256),
    "odd": (mlp(63, 270, 269, act="gelu"), 256),
    "streamed": (mlp(600, 320, 320), 256),
    "f16": (mlp(512, 512, 512, dtype="f16"), 256),
    "residual": (residual(264), 256),
    "norm": (edge_block(264, 2, "silu"), 256),
    "points": (points(3, 64, 64, 128, 1024), 256),
    "narrow points": (points(24, 128, act="relu"), 100),
}


@pytest.mark.gpu
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name: str, in_flight: int):
    program, over = KERNELS[name]
    p = held(program, 132, over)
    pipeline = p.with_stages((p.stages[0].with_(in_flight=in_flight),))
    tensors = tensors_for(pipeline, 2000)
    exact, working = reference_run(pipeline, tensors)
    compiled, given = cuda.build(pipeline), to_gpu(tensors)
    got, again = (run_poisoned(compiled, given, 2000) for _ in range(2))
    for output in got:
        norm = exact[output].double().norm()
        error, own = (float((r[output].double() - exact[output].double()).norm() / norm) for r in (got, working))
        assert error <= 2 * own + 2**-9
        assert torch.equal(got[output], again[output])


@pytest.mark.gpu
@pytest.mark.parametrize("clouds", [4, 130])
def test_points_of_clouds(clouds: int):
    """Results [clouds, groups, features] of three dimensions, whose rows are groups of points."""
    module = Points(1024).bfloat16().eval().requires_grad_(False).cuda()
    x = torch.randn(clouds, 256, 3, device="cuda").bfloat16()
    torch.compiler.reset()
    with torch.no_grad():
        fast = torch.compile(module, backend=tilestream, options={"strategy": "vertical"})
        got, own, want = fast(x), module(x), module.double()(x.double())
    assert float((got.double() - want).norm()) <= 2 * float((own.double() - want).norm())


@pytest.mark.gpu
def test_a_result_of_three_dimensions():
    """The last op of the region makes [clouds, points, features], which goes out by bulk copies."""
    module = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 128), nn.ReLU()).bfloat16().eval().cuda()
    x = torch.randn(64, 128, 3, device="cuda").bfloat16()
    torch.compiler.reset()
    with torch.no_grad():
        got = torch.compile(module, backend=tilestream, options={"strategy": "vertical"})(x)
        own, want = module(x), module.double()(x.double())
    assert float((got.double() - want).norm()) <= 2 * float((own.double() - want).norm())
