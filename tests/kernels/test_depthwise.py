"""Depthwise convolutions: the kernel on the host, a fiber a lane, and compiled; which tile it has."""

from __future__ import annotations

import pytest
import torch
from depthwise_blocks import BF16, F16, Case, by_functional, given, is_right, on_host
from host_runs import gxx, is_caught

from tilestream.cuda.compile import compile_text
from tilestream.cuda.depthwise import call
from tilestream.cuda.host.build import HostRun
from tilestream.cuda.host.lanes import on_lanes
from tilestream.devices import get
from tilestream.graph.depthwise import depthwise
from tilestream.kernels.operators.depthwise import NAME, Depthwise, Tile, ctas, cycles, kernel, tile_of
from tilestream.plan.depthwise import Kind, library, ours

CASES: dict[str, Case] = {
    "7 x 7, tiles that stick out": ((2, 9, 11, 32), (7, 7), 1, (3, 3), "none", (2, 5), BF16),
    "5 x 5 at stride 2, 36 pairs": ((1, 13, 10, 72), (5, 5), 2, (2, 2), "silu", (1, 4), F16),
    "3 x 3, one tile a picture": ((3, 4, 7, 16), (3, 3), 1, (1, 1), "gelu", (4, 7), BF16),
    "3 x 5 without padding": ((2, 8, 9, 20), (3, 5), 1, (0, 0), "hardswish", (3, 4), BF16),
    "2 x 2 of odd pairs": ((1, 5, 6, 14), (2, 2), 2, (1, 0), "relu6", (1, 8), F16),
    "1 x 7 of two channels": ((1, 5, 16, 2), (1, 7), 1, (0, 3), "relu", (4, 6), BF16),
}


@gxx
@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(2)
def test_values(name: str) -> None:
    operands = given(CASES[name])
    assert is_right(on_host(CASES[name], operands), CASES[name], operands)


@gxx
def test_without_vectors_and_sums() -> None:
    x, weight, *_ = given(CASES["7 x 7, tiles that stick out"])
    (got,) = on_lanes(lambda a: call((x, weight, None, None, None, 1, (3, 3), "none", (2, 5), False), 2, a))
    want = by_functional(x.double(), weight.double(), torch.zeros(32).double(), 1, (3, 3))
    torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=0.004)


@gxx
def test_lanes_do_not_race() -> None:
    case = CASES["5 x 5 at stride 2, 36 pairs"]
    operands = given(case)
    assert is_right(on_host(case, operands, HostRun(sanitize=True)), case, operands)


MUTANTS = {
    "weights are read too early": ("  lanes::all_together();\n", "", True),
    "a column outside of the picture is read": ("there && (always(c) ||", "there && (true ||", False),
    "rows of zeros are those of the next picture": ("(u32)in_y < HEIGHT && above", "above", False),
    "rows stay where they were": ("rows[(k + r) % ROWS]", "rows[r]", False),
    "what sticks out is written": ("(OUT_WIDTH % COLUMNS && x + c >= OUT_WIDTH)", "false", False),
    "no shift": ("scale[0], shift[0])", "scale[0], 0.0f)", False),
}


@gxx
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.every(2)
def test_mutants_are_caught(name: str) -> None:
    case = CASES["7 x 7, tiles that stick out"]
    operands = given(case)
    assert is_caught(lambda o: is_right(on_host(case, operands, o), case, operands), "depthwise.cuh", *MUTANTS[name])


def test_what_it_means() -> None:
    """The operator against torch's convolution and what follows it, one by one."""
    x, weight, bias, scale, shift = (t.double() for t in given(CASES["5 x 5 at stride 2, 36 pairs"]))
    made, sums = depthwise(x, weight, bias, scale, shift, 2, (2, 2), "silu", (1, 4), True)
    want = torch.nn.functional.silu(by_functional(x, weight, bias, 2, (2, 2)) * scale + shift)
    torch.testing.assert_close(made, want)
    torch.testing.assert_close(sums.sum(1), want.sum((1, 2)))
    torch.testing.assert_close(sums[:, 7], want[:, :1, 4:].sum((1, 2)))  # tiles go down first: 7, then 7 more


def conv(size: int, channels: int, window: int, stride: int = 1, **behind: object) -> Depthwise:
    return Depthwise(size, size, channels, (window, window), stride, (window // 2, window // 2), **behind)  # pyright: ignore


SHAPES = [
    (conv(56, 96, 7), 32), (conv(28, 192, 7), 32), (conv(7, 768, 7), 32), (conv(56, 96, 7), 1),
    (conv(112, 32, 3, scaled=True, activation="silu", pooled=True), 64),
    (conv(56, 144, 5, 2, scaled=True, activation="silu", pooled=True), 64),
    (conv(14, 672, 5, scaled=True, activation="hardswish"), 8), (conv(64, 20, 3, activation="gelu"), 8),
]  # fmt: skip


@pytest.mark.nvrtc
@pytest.mark.parametrize(("shape", "images"), SHAPES)
@pytest.mark.every(3)
def test_compiles_without_spills(shape: Depthwise, images: int) -> None:
    tile = tile_of(shape, images, 132)
    lanes = kernel(shape, tile)
    made = compile_text(lanes.text, NAME, lanes.shared_bytes)
    assert made.spills == 0 and made.stack == 0
    assert made.registers * 32 * lanes.warps * tile.resident(shape) <= 65536


def test_few_pictures_have_small_tiles_and_every_tile_has_a_lane() -> None:
    many, few = (tile_of(SHAPES[0][0], images, 132) for images in (32, 1))
    assert many.rows * many.columns > few.rows * few.columns
    for shape, images in SHAPES:
        tile = tile_of(shape, images, 132)
        assert tile.rows == 1 or shape.stride == 1
        assert cycles(shape, tile, images, 132) <= cycles(shape, Tile(1, 4), images, 132)
        parts = shape.channels // 2 // shape.pairs
        assert ctas(shape, tile, images, 132) % parts == 0 and ctas(shape, tile, 0, 132) == parts


MEASURED = [
    (SHAPES[0][0], 32, 39.7, 73.7), (conv(28, 192, 7), 32, 20.1, 43.8), (conv(14, 384, 7), 32, 12.2, 23.6),
    (conv(7, 768, 7), 32, 9.0, 18.5), (conv(28, 240, 5, scaled=True, activation="silu", pooled=True), 64, 36.6, 53.2),
    (conv(14, 480, 5, scaled=True, activation="silu", pooled=True), 64, 21.2, 27.4),
    (conv(14, 672, 5, 2, scaled=True, activation="silu", pooled=True), 64, 11.3, 19.5),
    (conv(28, 240, 3, 2, scaled=True, activation="silu", pooled=True), 64, 8.9, 14.4),
]  # fmt: skip
"""Microseconds on an H100 of our kernel, which then loaded its weights more slowly, and of cuDNN's without what follows
it."""


@pytest.mark.parametrize(("shape", "images", "ours_us", "library_us"), MEASURED)
def test_predictions(shape: Depthwise, images: int, ours_us: float, library_us: float) -> None:
    kind = Kind(shape, images, False)
    assert abs(ours(kind, get("h200")).us / ours_us - 1) < 0.25
    assert abs(library(kind, get("h200")).us / library_us - 1) < 0.35
