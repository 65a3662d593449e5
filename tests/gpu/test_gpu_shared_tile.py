"""Shared tiles on the GPU: values, bits, rows beyond a bin, graphs, and a wait that expires."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from places import pythonpath
from shared_tiles import Ffn

from tilestream import cuda, reference
from tilestream.kernels.product.shared_tile import Tail, model
from tilestream.kernels.product.sharing import Middle
from tilestream.plan.passes.share_tile import Split, share_tile
from tilestream.run import prepare
from tilestream.run.backend import tilestream

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent

TAILS = [
    Split(4, 8, Tail.PARTIALS),
    Split(4, 8, Tail.REDUCE_ADD),
    Split(4, 8, Tail.CLUSTER),
    Split(1, 8, Tail.NONE),
    Split(4, 8, Tail.PARTIALS, tile_rows=64),
    Split(4, 8, Tail.REDUCE_ADD, tile_rows=64),
    Split(2, 8, Tail.CLUSTER, tile_rows=64),
    Split(2, 8, Tail.PARTIALS, row_tiles=4),
    Split(2, 8, Tail.REDUCE_ADD, row_tiles=4),
    Split(2, 8, Tail.CLUSTER, row_tiles=2),
    Split(4, 8, middle=Middle.DSM),
    Split(4, 8, Tail.REDUCE_ADD, middle=Middle.DSM),
    Split(2, 16, middle=Middle.DSM, tile_rows=64),
    Split(8, 4, middle=Middle.DSM, tile_rows=8),
    Split(8, 2, middle=Middle.DSM, tile_rows=32),
    Split(2, 8, middle=Middle.DSM, row_tiles=2),
    Split(8, 8, tile_rows=64, row_tiles=2),
    Split(4, 8, Tail.REDUCE_ADD, tile_rows=32, row_tiles=4),
    Split(6, 4, Tail.CLUSTER, tile_rows=32, row_tiles=4),
    Split(1, 8, Tail.NONE, tile_rows=16, row_tiles=8, middle=Middle.DSM),
]


def run(kernel, block: Ffn, tensors, rows: int) -> torch.Tensor:
    dtype = tensors["x"].dtype
    y = torch.full((rows, block.out), float("nan"), device="cuda", dtype=dtype)
    kernel(tensors, rows, out={"y": y})
    return y


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def check(block: Ffn, split: Split, rows: int, seed: int = 0) -> None:
    kernel = cuda.build(share_tile(block.program(), split))
    tensors = block.tensors(rows, "cuda", seed)
    exact = block.eager({n: t.double() for n, t in tensors.items()})
    own = error(block.eager(tensors), exact)
    first = run(kernel, block, tensors, rows)
    assert error(first, exact) <= 2 * own + 1e-4, (error(first, exact), own)
    if split.tail is not Tail.REDUCE_ADD:
        assert torch.equal(run(kernel, block, tensors, rows), first)
    for _ in range(20):  # back to back: flags and partial results of one launch are the next one's
        last = run(kernel, block, tensors, rows)
    assert error(last, exact) <= 2 * own + 1e-4


@pytest.mark.parametrize("split", TAILS, ids=str)
@pytest.mark.parametrize("rows", [1, 63, 128, 200, 512])
def test_every_tail_and_any_number_of_rows(split: Split, rows: int):
    check(Ffn(1000, 264, 328), split, rows)


@pytest.mark.parametrize(
    "block",
    [
        Ffn(768, 192, 192, gated=True, act="silu"),
        Ffn(768, 192, 192, act="gelu", bias=True),
        Ffn(768, 192, 192, gated=True, act="silu", bias=True, residual=True),
        Ffn(640, 200, 136, act="sigmoid", residual=True, dtype="f16"),
        Ffn(520, 72, 77, act="relu", bias=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("tail", [Tail.PARTIALS, Tail.CLUSTER, Tail.NONE])
def test_activations_gates_biases_and_residuals(block: Ffn, tail: Tail):
    for rows in (17, 128):
        check(block, Split(1 if tail is Tail.NONE else 4, 6, tail), rows)


SHORT = [
    Split(4, 8, Tail.PARTIALS),
    Split(4, 8, Tail.REDUCE_ADD),
    Split(4, 8, Tail.CLUSTER),
    Split(1, 41, Tail.NONE),
]


@pytest.mark.parametrize("split", SHORT, ids=str)
@pytest.mark.parametrize(("tile", "rows"), [(8, 1), (8, 8), (8, 21), (16, 9), (16, 16), (32, 17), (32, 31)])
def test_tiles_of_a_few_rows(split: Split, tile: int, rows: int):
    check(Ffn(1000, 264, 328), replace(split, tile_rows=tile), rows)


NORMS = [
    Ffn(768, 192, 192, norm="layer", act="gelu", bias=True, residual=True),
    Ffn(768, 192, 192, norm="rms", gated=True, act="silu", residual=True),
    Ffn(520, 2056, 200, norm="rms", sum_first=True),
    Ffn(640, 4096, 4096, norm="rms", gated=True, act="silu", sum_first=True, residual=True),
    Ffn(640, 72, 136, norm="layer", dtype="f16"),
]


@pytest.mark.parametrize("block", NORMS, ids=str)
@pytest.mark.parametrize(
    "split",
    [
        Split(4, 17, Tail.PARTIALS),
        Split(2, 17, Tail.CLUSTER),
        Split(1, 17, Tail.NONE),
        Split(2, 17, row_tiles=3),
        Split(4, 17, tile_rows=8),
        Split(4, 17, tile_rows=64),
        Split(4, 16, middle=Middle.DSM, tile_rows=8),
        Split(4, 16, middle=Middle.DSM, tile_rows=32),
    ],
    ids=str,
)
def test_a_norm_in_front(block: Ffn, split: Split):
    if block.out == 4096 and split.middle is Middle.L2:
        split = replace(split, columns=32, groups=min(split.groups, 128 // 32 // split.row_tiles))
        split = split if split.groups > 1 else replace(split, tail=Tail.NONE)
    for rows in (1, 128):
        check(block, split, rows)


def test_the_reference_machine_agrees():
    block = Ffn(512, 128, 192, act="gelu", bias=True)
    pipeline = share_tile(block.program(), Split(4, 8, Tail.PARTIALS))
    tensors = block.tensors(100, "cuda")
    want = reference.run(pipeline, {n: t.cpu() for n, t in tensors.items()})["y"].cuda()
    got = run(cuda.build(pipeline), block, tensors, 100)
    assert error(got, want.double()) < 2e-3


@pytest.mark.parametrize("split", [Split(4, 8), Split(8, 4, tile_rows=16), Split(2, 16)], ids=str)
def test_a_middle_over_a_cluster_gives_the_same_bits(split: Split, monkeypatch: pytest.MonkeyPatch):
    """Where parts come together changes no sum; and products without a swizzle read what they should.

    Words that say their launch do so in their lowest bit, which the sums then lack: there are none here.
    """
    monkeypatch.setattr(model, "MOST_TAGGED_BYTES", 0)
    block = Ffn(768, 192, 192, gated=True, act="silu", bias=True, residual=True)
    rows = min(100, split.tile_rows)
    tensors = block.tensors(rows, "cuda")
    one, other = (
        run(cuda.build(share_tile(block.program(), replace(split, middle=m))), block, tensors, rows)
        for m in (Middle.L2, Middle.DSM)
    )
    assert torch.equal(one, other)


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize(
    "split", [Split(8, 16), Split(8, 16, Tail.REDUCE_ADD), Split(8, 8, middle=Middle.DSM)], ids=str
)
def test_many_launches_in_a_graph(split: Split, dependent: bool):
    block = Ffn(1536, 384, 384)
    kernel = cuda.build(share_tile(block.program(), split), dependent=dependent)
    sets = [block.tensors(128, "cuda", seed) for seed in range(3)]
    outs = [torch.empty(128, 384, device="cuda", dtype=torch.bfloat16) for _ in sets]
    bound = [kernel.bind(t, 128, ("y",)) for t in sets]
    for one, out in zip(bound, outs, strict=True):
        one((out,))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            for one, out in zip(bound, outs, strict=True):
                one((out,))
    for _ in range(20):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
    for tensors, out in zip(sets, outs, strict=True):
        assert error(out, block.eager({n: t.double() for n, t in tensors.items()})) < 6e-3


def test_nan_and_infinity_pass_through():
    """A partial result that has not come is a word of NaN: a NaN that was computed is another one."""
    block = Ffn(512, 128, 192)
    tensors = block.tensors(64, "cuda")
    tensors["x"][3] = float("nan")
    tensors["x"][5, 0] = float("inf")
    kernel = cuda.build(share_tile(block.program(), Split(4, 8, Tail.PARTIALS)))
    got, want = run(kernel, block, tensors, 64), block.eager(tensors)
    assert got[3].isnan().all()
    good = [r for r in range(64) if r not in (3, 5)]
    assert torch.isfinite(got[good]).all()
    assert not torch.isfinite(got[5]).any() and not torch.isfinite(want[5]).any()


def test_a_cta_that_never_announces_ends_the_launch():
    done = subprocess.run(
        [sys.executable, str(HERE / "stalled_tile.py")],
        env={**os.environ, "PYTHONPATH": pythonpath(HERE), "TILESTREAM_CACHE": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Its own group waits for its columns, the other groups for the partial results of that group: one gives up first.
    who = r"(columns of the middle of CTA 5|a partial result of CTA [0-7]): expected launch 1, found 0"
    assert re.search(f"waited too long for {who}", done.stdout), done.stdout


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(768)
        self.up, self.down = torch.nn.Linear(768, 3072), torch.nn.Linear(3072, 768)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_model_with_few_rows_runs_a_shared_tile(deterministic: bool):
    model = Block().cuda().bfloat16().eval()
    x = torch.randn(4, 32, 768, device="cuda", dtype=torch.bfloat16)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    try:
        with torch.no_grad():
            compiled = torch.compile(model, backend=tilestream, options={"strategy": "shared", "any_order": True})
            got, again = compiled(x), compiled(x)
            want = model.double()(x.double())
    finally:
        torch.use_deterministic_algorithms(before)
    assert error(got, want) < 5e-3
    assert not deterministic or torch.equal(got, again)
    chosen = prepare.analyses()[-1].plan
    assert chosen is not None and chosen.chosen.strategy == "shared"
    assert not deterministic or "any order" not in chosen.chosen.detail
