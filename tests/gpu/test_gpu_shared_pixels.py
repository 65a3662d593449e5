"""Convolutions on few rows on the GPU: values, bits, more rows than a launch has, and the user's model."""

from __future__ import annotations

import pytest
import torch
from bottlenecks import Bottleneck
from convolutions import by_torch, chain, tensors
from oracle_runs import assert_same_bits, run_poisoned, to_gpu

from tilestream import cuda
from tilestream.ir.taps import Window
from tilestream.kernels.product.shared_tile import Tail
from tilestream.plan.passes.share_tile import Split, share_tile
from tilestream.run import prepare
from tilestream.run.backend import tilestream

pytestmark = pytest.mark.gpu

SAME14, SAME7 = (Window(n, n, (3, 3), padding=(1, 1)) for n in (14, 7))
CASES = {
    "cluster": (chain(SAME14, 256, 256, 0), SAME14, Split(6, 8, Tail.CLUSTER, row_tiles=2), (1, 4)),
    "partials": (chain(SAME7, 512, 512, 0, dtype="f16"), SAME7, Split(8, 16, tile_rows=64), (1, 2)),
    "halved": (
        chain(Window(14, 14, (3, 3), (2, 2), (1, 1)), 128, 128, 0), Window(14, 14, (3, 3), (2, 2), (1, 1)),
        Split(1, 16, Tail.NONE, tile_rows=32), (1,),
    ),
    "one pixel": (
        chain(Window(8, 8, (1, 1), (2, 2)), 640, 96, 0), Window(8, 8, (1, 1), (2, 2)),
        Split(2, 4, Tail.CLUSTER, tile_rows=16), (1, 3),
    ),
    "turns": (chain(SAME14, 128, 256, 0), SAME14, Split(2, 2, Tail.CLUSTER, row_tiles=3), (40,)),
    "two layers": (chain(SAME7, 64, 128, 256, residual=True), SAME7, Split(4, 8, row_tiles=2), (5,)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_and_bits(name: str) -> None:
    program, window, split, counts = CASES[name]
    pipeline = share_tile(program, split)
    kernel = cuda.build(pipeline)
    for count in counts:
        given = tensors(program, window, count)
        here, rows = to_gpu(given), count * window.out[0] * window.out[1]
        first = run_poisoned(kernel, here, rows)
        want = by_torch(program, window, given)
        (got,) = first.values()
        assert float((got.cpu().double() - want).norm() / want.norm()) < 0.004
        for _ in range(20):  # back to back: flags and partial results of one launch are the next one's
            last = run_poisoned(kernel, here, rows)
        assert_same_bits(first, last)


def test_a_bottleneck_of_one_picture() -> None:
    """Its 3 x 3 with norm and ReLU is one kernel."""
    torch.manual_seed(0)
    model = Bottleneck(1024, 256).bfloat16().to(memory_format=torch.channels_last).eval().cuda()
    x = torch.randn(1, 1024, 14, 14, device="cuda").bfloat16().contiguous(memory_format=torch.channels_last)
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(model, backend=tilestream, options={"convolutions": "bulk", "strategy": "shared"})(x)
        own, exact = model(x), model.double()(x.double())
    plans = [a.plan for a in prepare.analyses() if a.plan is not None and len(a.program.stages[0].ops) > 12]
    assert plans and plans[-1].chosen.strategy == "shared"
    error, eager = (float((y.double() - exact).norm() / exact.norm()) for y in (got, own))
    assert error <= 2 * eager
