"""Tiled blocks on the host build: values, a ring that is used again, races, and what the protocol cannot do without."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from host_runs import CAUGHT
from shared_tiles import Ffn

from tilestream import devices
from tilestream.apps.layers import Layer
from tilestream.cuda.host.build import HostRun, Mutation, run_on_host
from tilestream.ir.pipeline import Role
from tilestream.plan.passes.tile_block import tile_block
from tilestream.plan.turned import lying

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

TWO = replace(devices.get("h200"), clusters=((2, 2),))
PLAIN = Ffn(512, 256, 256, act="gelu", bias=True, residual=True)
GATED = Ffn(520, 264, 272, gated=True, act="silu", bias=True, residual=True)
NORMED = Ffn(512, 384, 384, act="gelu", bias=True, residual=True, norm="layer")
"""Tiles of 192 columns of the second product."""
BUSY = Ffn(256, 256, 256)
"""Of one block of columns each: 12 slots, so that 2,000 rows come again to some of them."""
IN_FRONT = replace(BUSY, norm="rms")
SHALLOW = Ffn(192, 128, 256)
"""Tiles of fewer pages than the ring has: none of them waits for the page through which slabs have left."""


def check(block: Ffn, rows: int, folder: Path, large: float = 1.0, **options) -> torch.Tensor:
    """The kernel's error against float64 is eager's. ``large``: times the first layer's weights."""
    tensors = block.tensors(rows)
    tensors["up"] *= large
    exact = block.eager({n: t.double() for n, t in tensors.items()})
    got = run_on_host(tile_block(block.program(), TWO), tensors, HostRun(folder=folder, **options))["y"]

    def error(y: torch.Tensor) -> float:
        return float((y.double() - exact).norm() / exact.norm())

    assert error(got) <= 1.1 * error(block.eager(tensors)) + 1e-4
    return got


@pytest.mark.parametrize(
    ("block", "rows"), [(PLAIN, 700), (PLAIN, 1), (GATED, 300), (Ffn(1000, 256, 200), 900)], ids=str
)
@pytest.mark.every(2)
def test_values(block: Ffn, rows: int, folder: Path) -> None:
    check(block, rows, folder)


@pytest.mark.parametrize(
    ("layer", "rows"),
    [
        (Layer(200, (264,), bias=True, residual=True), 700),
        (Layer(136, (520, 264, 8), bias=True, act="gelu"), 300),
        (Layer(200, (248,), bias=True, act="silu", gated=True, residual=True), 300),
        (Layer(200, (320,), bias=True, residual=True, stream="f32"), 600),
    ],
    ids=str,
)
@pytest.mark.every(2)
def test_values_of_a_layer_by_itself(layer: Layer, rows: int, folder: Path) -> None:
    tensors = layer.tensors(rows)
    exact, eager = layer.eager({n: t.double() for n, t in tensors.items()}), layer.eager(tensors)
    got = run_on_host(tile_block(layer.program(), TWO), tensors, HostRun(folder=folder, sanitize=True))
    for name, want in exact.items():
        own, near = (float((y.double() - want).norm() / want.norm()) for y in (got[name], eager[name]))
        assert own <= 1.1 * near + 1e-4, (name, own, near)


@pytest.mark.parametrize(
    "layer",
    [Layer(200, (264,), bias=True, act="silu", residual=True), Layer(136, (136,), act="gelu", gated=True)],
    ids=str,
)
def test_values_of_weights_that_lie_by_columns(layer: Layer, folder: Path) -> None:
    """The same bits as of weights that lie by rows: what is multiplied, and in which order, is the same."""
    program, tensors = layer.program(), layer.tensors(300)
    given = lying(program, [t.name for t in program.tensors if t.role is Role.PARAMETER and len(t.shape) == 2])
    by_columns = run_on_host(tile_block(given, TWO), tensors, HostRun(folder=folder, sanitize=True))
    assert torch.equal(by_columns["y0"], run_on_host(tile_block(program, TWO), tensors, HostRun(folder=folder))["y0"])


def test_silu_of_large_values_beside_others(folder: Path) -> None:
    got = check(Ffn(256, 128, 256, act="silu"), 100, folder, large=100.0)  # up to 400 either way
    assert got.isfinite().all()


def test_a_ring_that_comes_round_and_launches_one_behind_the_other(folder: Path) -> None:
    assert torch.equal(check(BUSY, 2000, folder), check(BUSY, 2000, folder, launches=3, seed=5))


@pytest.mark.parametrize(
    ("block", "rows"),
    [
        (NORMED, 300),
        (NORMED, 1),  # of rows that do not exist, the last one stands in their place
        (replace(NORMED, act="silu", gated=True, dtype="f16"), 130),
        (Ffn(520, 1000, 264, norm="rms"), 300),  # columns that are no whole panels
    ],
    ids=str,
)
@pytest.mark.every(2)
def test_values_of_rows_that_are_made_in_front(block: Ffn, rows: int, folder: Path) -> None:
    check(block, rows, folder, sanitize=True)


def test_rows_in_front_that_go_through_a_ring(folder: Path) -> None:
    """By the warps that multiply, as many as the ring holds, then by a loader: the same bits in any order."""
    assert torch.equal(check(IN_FRONT, 2001, folder, sanitize=True), check(IN_FRONT, 2001, folder, launches=3, seed=5))


def test_no_races(folder: Path) -> None:
    check(PLAIN, 1500, folder, sanitize=True)


OWN = "tiled_block.cuh"
FENCED, ANNOUNCED = "    fence_async_global();\n", "    group_arrive(slabs.full());"
STORED = "      store_wait_read<0>();\n"
LOADS = "    if (lane_in_warp() != 0) continue;\n    const TensorMap"
MUTANTS = {
    "a tile is announced before it is stored": Mutation(OWN, f"    store_wait<0>();\n{FENCED}", ""),
    "what other CTAs stored is loaded without a fence": Mutation(OWN, FENCED + LOADS, LOADS),
    "a slot is filled before its readers have it": Mutation(OWN, "if (!x.second && x.rows >= w.slots)", "if (false)"),
    "pages are freed in one CTA alone": Mutation(OWN, "K::STEPS, STEP_BYTES, true>", "K::STEPS, STEP_BYTES, false>"),
    "a slab is written while it is stored": Mutation(OWN, "      early.wait_empty();\n", ""),
    "a slab is stored without a fence": Mutation(OWN, f"    fence_async_shared();\n{ANNOUNCED}", ANNOUNCED),
    "a page is loaded while slabs lie in it": Mutation(OWN, f"{STORED}      arrive_pair", "      arrive_pair"),
    "slabs are written to a page that is in use": Mutation(OWN, "smem, g, ring.take()", "smem, g, ring.addr()"),
    "sums begin with those of the tile before": Mutation("product.cuh", "if (k == 0)", "if (false)"),
    "rows are made where others are read": Mutation(OWN, "if (tile >= w.slots) await_flags", "if (false) await_flags"),
    "a residual is that of the slab before": Mutation(OWN, "K::LOADS > 0 && s + 1 < RESULT_SLABS<K>", "false"),
}
BROKEN = {"slot": replace(BUSY, out=512), "is stored": SHALLOW, "rows are made": IN_FRONT}
"""Where it shows: a slot that both clusters read, say. Elsewhere in ``PLAIN``."""


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.every(6)
def test_a_broken_protocol_is_seen(name: str, folder: Path) -> None:
    block = next((block for part, block in BROKEN.items() if part in name), PLAIN)
    rows = 300 if block is PLAIN else 2000
    with pytest.raises((*CAUGHT, AssertionError)):
        check(block, rows, folder, sanitize=True, mutations=(MUTANTS[name],), limit_s=3, flag_limit_s=1.0)
