"""One layer that shares a tile on the host build: values of every tail and of several results, races, mutants."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from host_runs import CAUGHT
from programs import Program
from random_pipelines import tensors_for
from torch import nn

from tilestream.apps.layers import Layer
from tilestream.cuda.host.build import HostRace, HostRun, Mutation, run_on_host
from tilestream.kernels.product.shared_tile import Tail, build
from tilestream.kernels.product.sharing import Middle
from tilestream.plan.passes.share_tile import Split, share_tile
from tilestream.plan.turned import lying

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

QKV = Layer(264, (48, 24, 24), bias=True)
WIDE = Layer(72, (136,), act="relu", bias=True)
"""Of 136 columns two CTAs have 72 and 64 each, which leave through shared memory."""


def run(layer: Layer, split: Split, rows: int, folder: Path, **options) -> dict[str, torch.Tensor]:
    return run_on_host(share_tile(layer.program(), split), layer.tensors(rows), HostRun(folder=folder, **options))


def check(layer: Layer, split: Split, rows: int, folder: Path, **options) -> dict[str, torch.Tensor]:
    """The error of every result against float64 is eager's; more where each of several additions rounds."""
    tensors = layer.tensors(rows)
    exact = layer.eager({n: t.double() for n, t in tensors.items()})
    near, got = layer.eager(tensors), run(layer, split, rows, folder, **options)
    allowed = 2.0 if split.tail is Tail.REDUCE_ADD else 1.1
    for name, want in exact.items():
        own, eager = (float((y.double() - want).norm() / want.norm()) for y in (got[name], near[name]))
        assert own <= allowed * eager + 1e-4, (name, own, eager)
    return got


@pytest.mark.parametrize(
    ("layer", "split", "rows"),
    [
        (QKV, Split(1, 3, Tail.NONE), 100),
        (QKV, Split(2, 2), 100),
        (QKV, Split(2, 3, Tail.CLUSTER, tile_rows=16), 13),  # two CTAs have columns of the last results, one has none
        (Layer(520, (77,), act="gelu", residual=True), Split(3, 2, tile_rows=8), 5),  # odd columns; a group has less
        (Layer(136, (48,), dtype="f16"), Split(2, 2, Tail.REDUCE_ADD, tile_rows=64), 50),
        (Layer(256, (40, 8)), Split(1, 2, Tail.NONE, row_tiles=2), 200),
        (Layer(72, (40, 8, 24), bias=True, act="gelu"), Split(1, 2, Tail.NONE, row_tiles=2), 300),  # a tile more
        (WIDE, Split(1, 2, Tail.NONE), 100),
        (Layer(72, (131,), residual=True, dtype="f16"), Split(1, 2, Tail.NONE, tile_rows=16), 9),  # rows start anywhere
        (Layer(72, (72, 131)), Split(1, 2, Tail.NONE, tile_rows=64), 50),
        (Layer(136, (136,), act="silu", gated=True, residual=True), Split(1, 2, Tail.NONE), 100),
        (Layer(72, (44,), bias=True, act="gelu", gated=True), Split(1, 3, Tail.NONE, row_tiles=2), 300),
    ],
    ids=str,
)
@pytest.mark.every(3)
def test_every_tail(layer: Layer, split: Split, rows: int, folder: Path) -> None:
    check(layer, split, rows, folder)


def test_the_same_bits_whatever_the_order_of_copies_and_on_a_workspace_in_use(folder: Path) -> None:
    split = Split(2, 2, tile_rows=64)
    one = run(QKV, split, 50, folder)
    for other in (run(QKV, split, 50, folder, seed=7), run(QKV, split, 50, folder, launches=3)):
        assert all(torch.equal(one[name], other[name]) for name in one)


TAILS = {
    "alone": Split(1, 3, Tail.NONE),
    "partials": Split(2, 2, tile_rows=64),
    "cluster": Split(2, 2, Tail.CLUSTER, tile_rows=64),
}
GATED = Layer(264, (136,), act="silu", gated=True)


@pytest.mark.parametrize("name", TAILS)
def test_no_races(name: str, folder: Path) -> None:
    check(QKV, TAILS[name], 50, folder, sanitize=True, launches=2)


@pytest.mark.parametrize("split", [Split(1, 3, Tail.NONE), Split(2, 2, Tail.CLUSTER)], ids=str)
def test_values_of_weights_that_lie_by_columns(split: Split, folder: Path) -> None:
    """Of 264 columns three CTAs have 128, 128 and 8: parts are whole panels. The same bits as by rows where the sums
    are divided alike."""
    layer = Layer(200, (264, 128), bias=True, act="gelu")
    program, tensors = layer.program(), layer.tensors(100)
    given = share_tile(lying(program, ["w0", "w1"]), split)
    assert build(given.stages[0], given).widths == ((128, 64) if split.columns == 3 else (192, 64))
    by_columns = run_on_host(given, tensors, HostRun(folder=folder, sanitize=True))
    by_rows = run_on_host(share_tile(program, split), tensors, HostRun(folder=folder))
    assert all(torch.equal(by_columns[y], by_rows[y]) for y in ("y0", "y1"))


def test_no_races_of_a_gated_layer(folder: Path) -> None:
    check(GATED, TAILS["alone"], 50, folder, sanitize=True, launches=2)


def test_results_are_staged_where_both_warpgroups_are_done(folder: Path) -> None:
    """The rings are free then: without the barrier one stages on rows that the other multiplies."""
    split, barrier = (
        Split(1, 2, Tail.NONE),
        Mutation(OWN, "REDUCE_ADD || stages_result<K>()) named_sync", "REDUCE_ADD) named_sync"),
    )
    check(WIDE, split, 100, folder, sanitize=True, launches=2)
    with pytest.raises(HostRace):
        check(WIDE, split, 100, folder, sanitize=True, mutations=(barrier,))


OWN = "shared_tile.cuh"
MUTANTS = {
    "a result's columns lie where another's do": (
        "alone",
        Mutation(OWN, "ring.addr() + K::start(f) * 128", "ring.addr()"),
    ),
    "every group sums over the same part": (
        "partials",
        Mutation(OWN, "const int x = K::FIRSTS > 0 ? 0 : me.group * K::GROUP_COLUMNS", "const int x = 0"),
    ),
    "partial results are awaited by the flags of another exchange": (
        "partials",
        Mutation(OWN, "K::HELD || K::FIRSTS == 0 ? PARTIAL", "K::BY_CLUSTER ? PARTIAL"),
    ),
}


@pytest.mark.parametrize("split", [Split(4, 1, Tail.CLUSTER, row_tiles=2, depth=64, middle=Middle.NONE)], ids=str)
def test_a_result_of_one_column(split: Split, folder: Path) -> None:
    program = Program("head", "bf16")
    program.store(program.linear(program.linear(program.load("x", 136), 64, "relu"), 1))
    tensors = tensors_for(program.build(), 200, 1)

    def eager(t: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = torch.relu(nn.functional.linear(t["x"], t["w1"], t["b1"]))
        return nn.functional.linear(hidden, t["w3"], t["b3"])

    exact = eager({n: t.double() for n, t in tensors.items()})
    made = share_tile(program.build(), split)
    (got,) = run_on_host(made, tensors, HostRun(folder=folder, sanitize=True)).values()
    own, near = (float((y.double() - exact).norm() / exact.norm()) for y in (got, eager(tensors)))
    assert own <= 1.1 * near + 1e-4


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_protocol_is_seen(name: str, folder: Path) -> None:
    split, mutation = MUTANTS[name]
    with pytest.raises((*CAUGHT, AssertionError)):
        check(QKV, TAILS[split], 50, folder, sanitize=name.startswith("partial"), mutations=(mutation,), launches=2,
              limit_s=3, flag_limit_s=1.0)  # fmt: skip
