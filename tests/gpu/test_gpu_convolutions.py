"""Convolutions on the GPU: against the reference machine, and through ``torch.compile``."""

from __future__ import annotations

import pytest
import torch
from bottlenecks import images, small_resnet
from convolutions import chain, tensors
from gpu_pipelines import one_stage
from oracle_runs import assert_close, assert_same_bits, reference_run, run_poisoned, to_gpu

from tilestream import cuda
from tilestream.ir.pipeline import Residency, Role
from tilestream.ir.taps import Window
from tilestream.run.backend import tilestream

WINDOWS = {
    "same": Window(9, 7, (3, 3), padding=(1, 1)),
    "strided": Window(9, 7, (3, 3), (2, 1), (1, 1)),
    "dilated": Window(11, 9, (3, 2), (1, 2), (2, 0), (2, 3)),
    "wide": Window(24, 5, (7, 1), (4, 1), (3, 0)),
    "one pixel": Window(8, 8, (1, 1), (2, 2)),
    "resnet": Window(28, 28, (3, 3), padding=(1, 1)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("bulk", [False, True], ids=["lanes", "bulk"])
@pytest.mark.parametrize("channels", [64, 72, 128])
@pytest.mark.parametrize("name", WINDOWS)
def test_against_the_reference_machine(name: str, channels: int, bulk: bool) -> None:
    window = WINDOWS[name]
    pipeline = one_stage(chain(window, channels, 64, 128, residual=True, bulk=bulk))
    compiled = cuda.build(pipeline)
    for count in (0, 1, 2, 37):
        given = tensors(pipeline, window, count)
        rows = count * window.out[0] * window.out[1]
        here = to_gpu(given)
        got = run_poisoned(compiled, here, rows)
        if rows:
            assert_close(pipeline, got, *reference_run(pipeline, given))
        assert_same_bits(got, run_poisoned(compiled, here, rows))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("placement", [0, 1])
def test_lanes_and_bulk_copies_bring_the_same(dtype: str, placement: int) -> None:
    """Of fp32 too, whose copies round to tf32: of these pictures some elements are ties."""
    window = WINDOWS["strided"]
    results = []
    for bulk in (False, True):
        program = chain(window, 64, 32, 64, dtype=dtype, bulk=bulk)
        pipeline = one_stage(program, placement, Residency.RESIDENT if placement else Residency.STREAMED)
        given = to_gpu(tensors(pipeline, window, 9))
        results.append(run_poisoned(cuda.build(pipeline), given, 9 * window.out[0] * window.out[1]))
    assert_same_bits(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("bulk", [False, True], ids=["lanes", "bulk"])
@pytest.mark.parametrize(("placement", "residency"), [(0, Residency.RESIDENT), (1, Residency.STREAMED)])
def test_a_tail_against_the_reference_machine(placement: int, residency: Residency, bulk: bool) -> None:
    """Weights that stay, in pages as low as the 3 x 3 is narrow; and tiles by columns."""
    window = WINDOWS["resnet"]
    pipeline = one_stage(chain(window, 64, 64, 256, residual=True, bulk=bulk), placement, residency)
    given = tensors(pipeline, window, 3)
    rows = 3 * window.out[0] * window.out[1]
    here = to_gpu(given)
    got = run_poisoned(cuda.build(pipeline), here, rows)
    assert_close(pipeline, got, *reference_run(pipeline, given))
    assert_same_bits(got, run_poisoned(cuda.build(pipeline), here, rows))


@pytest.mark.gpu
def test_pictures_that_lie_otherwise_are_copied() -> None:
    """Channels first, and every second picture of more: as contiguous ones."""
    window = WINDOWS["same"]
    pipeline = one_stage(chain(window, 64, 64, 64))
    compiled = cuda.build(pipeline)
    given = {n: t.cuda() for n, t in tensors(pipeline, window, 4).items()}
    rows = 4 * 63
    wanted = compiled(given, rows)
    first = given["x"].permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    apart = given["x"].new_zeros(8, 9, 7, 64)[::2].copy_(given["x"])
    for x in (first, apart):
        assert_same_bits(compiled(given | {"x": x}, rows), wanted)
    assert pipeline.by_role(Role.OUTPUT)


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["auto", "vertical", "spatial", "bulk"])
@pytest.mark.parametrize("how", ["lanes", "bulk"])
def test_through_torch_compile(how: str, strategy: str) -> None:
    model, x = small_resnet().cuda(), images().cuda().contiguous(memory_format=torch.channels_last)
    torch._dynamo.reset()
    options = {"convolutions": how, "strategy": strategy}
    with torch.no_grad():
        got = torch.compile(model, backend=tilestream, options=options)(x)
        own, exact = model(x), small_resnet().double().cuda()(x.double())
    error, eager = (float((y.double() - exact).norm() / exact.norm()) for y in (got, own))
    assert error <= 2 * eager
