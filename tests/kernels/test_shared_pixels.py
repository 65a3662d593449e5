"""Convolutions on few rows: a layer that reads pixels at taps shares a tile. No GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from bottlenecks import Bottleneck, images
from convolutions import by_torch, chain, tensors
from host_runs import CAUGHT

from tilestream import cuda
from tilestream.apps.layers import Layer
from tilestream.cuda.host.build import HostRun, Mutation, run_on_host
from tilestream.devices import get
from tilestream.errors import VerifyError
from tilestream.ir.pipeline import TILE_ROWS, Pipeline
from tilestream.ir.taps import Window, pictures
from tilestream.ir.verify import verify
from tilestream.kernels.product.finder import is_block, is_projection
from tilestream.kernels.product.shared_tile import Tail, build
from tilestream.kernels.product.shared_tile.cost import shared_tile_cost
from tilestream.kernels.product.tiled_block.model import is_tileable
from tilestream.options import Options
from tilestream.plan import few_rows, margins
from tilestream.plan.analyse import analyse
from tilestream.plan.passes.share_tile import Split, share_tile
from tilestream.reference.mesh_machine import Moved, run_meshes
from tilestream.reference.ops import FLOAT64
from tilestream.report.simulation import Simulation

SAME = Window(9, 7, (3, 3), padding=(1, 1))
STRIDED = Window(11, 9, (3, 2), (2, 1), (2, 0), (2, 3))
RESNET = Window(14, 14, (3, 3), padding=(1, 1))

SPLITS = {
    "alone": Split(1, 2, Tail.NONE),
    "partials": Split(2, 2, tile_rows=64),
    "cluster": Split(3, 2, Tail.CLUSTER, tile_rows=64, row_tiles=2),
}


def one(window: Window = SAME, channels: int = 64, out: int = 32, **words) -> Pipeline:
    return chain(window, channels, out, 0, bulk=True, **words)


def two(window: Window = SAME) -> Pipeline:
    """k x k, ReLU, 1 x 1, a residual."""
    return chain(window, 64, 32, 48, residual=True, bulk=True)


@pytest.mark.parametrize("window", [SAME, STRIDED, Window(9, 7, (1, 1), (2, 2))], ids=["same", "strided", "one"])
@pytest.mark.parametrize("make", [one, two])
@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.every(3)
def test_the_reference_machine_computes_it(make, name: str, window: Window) -> None:
    program = make(window)
    given = tensors(program, window, 2)
    made = share_tile(program, SPLITS[name])
    verify(made)
    (got,) = run_meshes(made, {n: t.double() for n, t in given.items()}, FLOAT64, Moved()).values()
    torch.testing.assert_close(got, by_torch(program, window, given))
    s = build(made.stages[0], made)
    assert s.block.grid is not None and s.block.grid.corners[0] == (-window.padding[1], -window.padding[0])
    assert s.block.sizes[0] % s.depth == 0  # a stage ends with the last tap


def run(program: Pipeline, split: Split, given, folder: Path, **options) -> torch.Tensor:
    (got,) = run_on_host(share_tile(program, split), given, HostRun(folder=folder, **options)).values()
    return got


def check(window: Window, make, split: Split, images: int, folder: Path, **options) -> None:
    program = make(window)
    given = tensors(program, window, images)
    want, got = by_torch(program, window, given), run(program, split, given, folder, **options)
    assert float((got.double() - want).norm() / want.norm()) < 0.004


on_host = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@on_host
@pytest.mark.parametrize(
    ("window", "make", "split", "images"),
    [
        (SAME, one, SPLITS["alone"], 2),
        (Window(4, 3, (3, 3), padding=(1, 1)), one, Split(2, 2, tile_rows=16), 1),
        (STRIDED, one, Split(3, 2, Tail.CLUSTER, tile_rows=64), 1),
        (SAME, two, Split(2, 2, row_tiles=2), 3),  # the second tile begins inside of a picture
    ],
    ids=["alone", "few rows", "strided", "two layers"],
)
@pytest.mark.every(2)
def test_kernels_on_the_host(window: Window, make, split: Split, images: int, folder: Path) -> None:
    check(window, make, split, images, folder)


@on_host
@pytest.mark.parametrize("groups", [1, 2])
def test_tiles_that_take_turns(groups: int, folder: Path) -> None:
    """Five tiles of rows, of which the mesh has two: a launch has as many CTAs as there are."""
    tail = Tail.CLUSTER if groups > 1 else Tail.NONE
    check(SAME, one, Split(groups, 2, tail, tile_rows=64, row_tiles=2), 5, folder)


@on_host
def test_no_races(folder: Path) -> None:
    check(SAME, one, Split(2, 1, Tail.CLUSTER, tile_rows=64), 1, folder, sanitize=True, launches=2)


LEFT, PANELS = "shared_tile.cuh", "pixel_panels.cuh"
MUTANTS = {
    "every group reads the same taps": Mutation(LEFT, "K::FIRSTS > 0 ? 0 : me.group * K::GROUP_COLUMNS", "0"),
    "every tile begins with the first picture": Mutation(LEFT, "p.first_row + me.row_tile * K::ROWS", "p.first_row"),
    "taps of a row are one": Mutation(PANELS, "(tap - down * K::TAPS_ACROSS) * K::TAP_X", "0"),
    "all taps are of one row": Mutation(PANELS, "(u16)(down * K::TAP_Y)", "(u16)0"),
}


@on_host
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.every(2)
def test_a_broken_kernel_is_seen(name: str, folder: Path) -> None:
    with pytest.raises((*CAUGHT, AssertionError)):
        check(SAME, one, SPLITS["cluster"], 2, folder, mutations=(MUTANTS[name],), limit_s=3, flag_limit_s=1.0)


def test_what_has_no_kernel_is_told_why() -> None:
    for program, split, why in (
        (one(channels=72), Split(1, 2, Tail.NONE), "pixels have 72 channels, no multiple of 64"),
        (one(), Split(1, 2, Tail.NONE, depth=128), "576 columns of taps are no multiple of 128"),
        (one(Window(99, 99, (1, 1), (9, 1))), Split(1, 2, Tail.NONE), "strides of 9 x 1 are more than 8"),
    ):
        with pytest.raises(VerifyError, match=why):
            made = share_tile(program, split)
            build(made.stages[0], made)


def test_it_is_a_layer_on_few_rows_and_no_tiled_block() -> None:
    assert is_projection(one()) and is_block(two()) and not is_projection(two())
    assert not is_block(one(Window(9, 7, (2, 2))))  # 256 columns: a row stream holds them
    assert not is_tileable(chain(RESNET, 64, 1024, 768, bulk=True))


def chosen(count: int) -> list[tuple[int, int, str]]:
    """Of a ResNet's bottleneck at 14 x 14: columns of each region's last layer, its ops, and what is predicted best."""
    model = Bottleneck(1024, 256).bfloat16().to(memory_format=torch.channels_last).eval()
    with torch.no_grad():
        found = analyse(model, (images(1024, 14, count),), Options(device="h200")).regions
    plans = [(r.program.stages[0].ops, r.plan) for r in found]
    made = [[op.out.features for op in ops if op.kind == "linear" and op.out] for ops, _ in plans]
    return [(m[-1], len(ops), plan.chosen.strategy) for m, (ops, plan) in zip(made, plans, strict=True) if plan]


def test_what_meets_in_clusters_is_predicted_counted_and_simulated() -> None:
    """A layer of pixels that shares a tile: its pictures, weight and result once, and one prediction everywhere."""
    model = Bottleneck(1024, 256).bfloat16().to(memory_format=torch.channels_last).eval()
    with torch.no_grad():
        found = analyse(model, (images(1024, 14, 1),), Options(device="h200"))
    launches = {launch.region: launch for launch in found.whole.launches if launch.strategy.startswith("shared")}
    region = next(r for r in found.regions if r.name in launches and pictures(r.program))
    pixels, norm = 14 * 14, 2 * 2 * 256
    assert launches[region.name].bytes == 2 * (2 * pixels * 256 + 9 * 256 * 256) + 2 * norm
    made = Simulation.of(found)
    (run,) = (r for r in made.runs if r.region == region.name and r.chosen)
    assert run.strategy == "shared" and run.outcome.time_us == launches[region.name].predicted_us
    assert run.outcome.bytes["dram"] == launches[region.name].bytes and run.outcome.bytes["dsm"] > 0
    assert f"{region.name} shared" not in made.timelines() and made.whole_us["auto"] <= made.whole_us["shared"]
    lines = [line.split() for line in str(made).splitlines()]
    assert ["*", region.name, "shared"] in [words[:3] for words in lines]
    assert not [words for words in lines if words[:2] == ["*", region.name] and words[2] != "shared"]


def test_convolutions_of_few_pixels_or_long_sums_go_alone() -> None:
    """With norm and ReLU, and before the layer behind takes them into its region."""
    for count in (1, 32):
        assert (256, 9 + 8) in [(columns, ops) for columns, ops, _ in chosen(count)]
    assert (256, 9 + 8, "shared") in chosen(1)


def test_many_rows_are_tiles_in_turns() -> None:
    """Of a long sum: all columns that a product of the tensor cores has, or less; of a short one only in a few turns. A
    layer alone, none with a norm; two where a row stream would leave SMs idle."""

    def split(program: Pipeline) -> set[tuple[int, int]]:
        found = few_rows.best_splits(program, 6272, get("h200"), Options())
        return {(s.columns, s.groups) for s in found}

    assert split(one(RESNET, 256, 256)) >= {(2, 1), (4, 1), (2, 2)}
    assert split(Layer(1024, (256,), act="relu").program()) >= {(2, 1), (4, 1)}
    for program in (Layer(2048, (256,), norm="rms").program(), Layer(256, (2048,)).program()):
        assert not split(program)
    assert len(split(two())) == margins.SHARED_TILED
    assert not few_rows.recipes(two(), TILE_ROWS * get("h200").sms + 1, get("h200"), Options())


def test_a_turn_more_costs_no_launch() -> None:
    p = share_tile(Layer(256, (1024,)).program(), Split(1, 4, Tail.NONE, row_tiles=33))
    s = build(p.stages[0], p)
    assert s.alone and (s.launched(4224), s.launched(4225)) == (132, 136)
    once, twice = (shared_tile_cost(s, rows, get("h200")) for rows in (4224, 2 * 4224))
    assert once.seconds < twice.seconds < 2 * once.seconds


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("program", "split"),
    [
        (one(RESNET, 256, 256), Split(4, 16, Tail.CLUSTER, row_tiles=2)),
        (one(Window(7, 7, (3, 3), padding=(1, 1)), 512, 512, dtype="f16"), Split(8, 16, tile_rows=64)),
        (two(), Split(2, 2)),
    ],
    ids=["cluster", "partials", "two layers"],
)
def test_kernels_compile_without_spills(program: Pipeline, split: Split) -> None:
    assert [r.spills for r in cuda.compile_only(share_tile(program, split))] == [0]
