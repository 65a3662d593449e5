"""Convolutions of groups of channels: the kernel on the host, a fiber a lane, and compiled; which tile it has."""

from __future__ import annotations

import pytest
import torch
from depthwise_blocks import BF16, F16, Case, given, is_right, on_host
from host_runs import gxx, is_caught

from tilestream.cuda.compile import compile_text
from tilestream.cuda.host.build import HostRun
from tilestream.graph.depthwise import depthwise
from tilestream.kernels.operators.depthwise import Depthwise, Tile
from tilestream.kernels.operators.grouped import (
    NAME,
    SHARED,
    can,
    ctas,
    cycles,
    kernel,
    of_warp,
    resident,
    shared_bytes,
    tile_of,
    warps_of,
)

CASES: dict[str, tuple[int, Case]] = {
    "24 channels, tiles that stick out": (24, ((2, 9, 11, 48), (3, 3), 1, (1, 1), "relu", (4, 5), BF16)),
    "8 channels at stride 2": (8, ((1, 9, 8, 32), (3, 3), 2, (1, 1), "silu", (3, 2), F16)),
    "4 channels, two groups at once": (4, ((2, 6, 7, 16), (3, 3), 1, (1, 1), "none", (6, 3), BF16)),
    "2 channels, 5 x 3": (2, ((1, 7, 9, 16), (5, 3), 1, (2, 0), "relu6", (7, 4), F16)),
    "64 channels, two warps a group": (64, ((1, 8, 8, 64), (3, 3), 1, (1, 1), "gelu", (2, 8), BF16)),
    "56 channels of one warp, a part of four": (56, ((1, 6, 6, 112), (3, 3), 1, (1, 1), "hardswish", (3, 6), BF16)),
}
MUTATED = "24 channels, tiles that stick out"


@gxx
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(3)
def test_values(name: str, layout: torch.memory_format) -> None:
    group, case = CASES[name]
    operands = given(case, group=group)
    operands[1] = operands[1].to(memory_format=layout)
    assert is_right(on_host(case, operands), case, operands)


@gxx
def test_infinities_stay_in_their_windows() -> None:
    """What pads a sum is zero times zero."""
    group, case = CASES[MUTATED]
    operands = given(case, group=group)
    operands[0][0, 4, 5, 7] = float("inf")
    (got, _), (plain, _) = on_host(case, operands), on_host(case, given(case, group=group))
    near = torch.zeros(got.shape, dtype=torch.bool)
    near[0, 3:6, 4:7, :group] = True
    assert torch.equal(got[~near], plain[~near]) and not got.isnan().any()


@gxx
def test_lanes_do_not_race() -> None:
    group, case = CASES["8 channels at stride 2"]
    operands = given(case, group=group)
    assert is_right(on_host(case, operands, HostRun(sanitize=True)), case, operands)


MUTANTS = {
    "pixels are read too early": ("    lanes::all_together();\n    char* const to", "    char* const to", True),
    "a tile takes the place of one that is read": ("    lanes::all_together();  // the next", "    // the next", True),
    "pixels outside of the picture are read": ("there ? from : picture, there ? 16 : 0", "from, 16", False),
    "what pads a sum is no zero": ("const bool there = piece < EIGHTS", "const bool there = true", False),
    "what sticks out is written": ("|| x + c >= OUT_WIDTH", "", False),
    "no shift": ("scale[0], shift[0])", "scale[0], 0.0f)", False),
}


@gxx
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.every(2)
def test_mutants_are_caught(name: str) -> None:
    group, case = CASES[MUTATED]
    operands = given(case, group=group)
    assert is_caught(lambda o: is_right(on_host(case, operands, o), case, operands), "grouped.cuh", *MUTANTS[name])


def test_what_it_means() -> None:
    x, weight, bias, scale, shift = (t.double() for t in given(CASES[MUTATED][1], group=24))
    made, sums = depthwise(x, weight, bias, scale, shift, 1, (1, 1), "relu", (4, 5), True)
    plain = torch.nn.functional.conv2d(x.permute(0, 3, 1, 2), weight, bias, padding=1, groups=2).permute(0, 2, 3, 1)
    torch.testing.assert_close(made, torch.relu(plain * scale + shift))
    torch.testing.assert_close(sums.sum(1), made.sum((1, 2)))


def conv(size: int, channels: int, group: int, stride: int = 1) -> Depthwise:
    behind = {"scaled": True, "activation": "relu", "pooled": True, "group": group}
    return Depthwise(size, size, channels, (3, 3), stride, (1, 1), **behind)  # pyright: ignore


SHAPES = [
    (conv(112, 72, 24, 2), 32), (conv(28, 216, 24), 32), (conv(14, 576, 24), 32), (conv(7, 1512, 24), 32),
    (conv(56, 128, 4), 32), (conv(28, 256, 8), 32), (conv(14, 512, 16), 32), (conv(14, 896, 64), 32),
    (conv(28, 48, 2), 8),
]  # fmt: skip
SPILLED = 80
"""Bytes of a lane that may be spilled, outside of products."""


@pytest.mark.nvrtc
@pytest.mark.parametrize(("shape", "images"), SHAPES)
@pytest.mark.every(3)
def test_compiles(shape: Depthwise, images: int) -> None:
    tile = tile_of(shape, images, 132)
    lanes = kernel(shape, tile)
    made = compile_text(lanes.text, NAME, lanes.shared_bytes)
    assert made.spills <= SPILLED and lanes.shared_bytes <= SHARED


def test_tiles_fit_and_few_pictures_have_small_ones() -> None:
    for shape, images in SHAPES:
        tile = tile_of(shape, images, 132)
        assert resident(shape, tile) >= 1 and resident(shape, tile) * (shared_bytes(shape, tile) + 1024) <= SHARED
        parts = shape.channels // (warps_of(shape) * of_warp(shape))
        assert ctas(shape, tile, images, 132) % parts == 0 and ctas(shape, tile, 0, 132) == parts
        assert cycles(shape, tile, images, 132) <= cycles(shape, Tile(1, 7), images, 132)
    many, few = (tile_of(SHAPES[2][0], images, 132) for images in (32, 1))
    assert many.rows * many.columns > few.rows * few.columns


def test_which_groups_have_a_kernel() -> None:
    assert all(can(group, 96, 9) for group in (1, 2, 4, 8, 16, 24, 32, 48))
    assert (
        not can(3, 96, 9) and not can(12, 96, 9) and not can(128, 256, 9) and not can(24, 96, 49) and not can(2, 14, 9)
    )
