"""Shared tiles on the host build: values of every exchange, races, and what the protocols cannot do without."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from host_runs import CAUGHT
from shared_tiles import Ffn

from tilestream.cuda.host.build import HostRun, Mutation, run_on_host
from tilestream.errors import QueueTimeout
from tilestream.kernels.product.shared_tile import Tail, model
from tilestream.kernels.product.sharing import Middle
from tilestream.plan.passes.share_tile import Split, share_tile

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

SMALL = Ffn(128, 72, 48)
GATED = Ffn(200, 72, 44, gated=True, act="silu", bias=True, residual=True)
DSM = Middle.DSM


@pytest.fixture
def flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial results are announced by flags, as large ones are."""
    monkeypatch.setattr(model, "MOST_TAGGED_BYTES", 0)


def run(block: Ffn, split: Split, rows: int, folder: Path, **options) -> torch.Tensor:
    made = run_on_host(share_tile(block.program(), split), block.tensors(rows), HostRun(folder=folder, **options))
    return made["y"]


def check(block: Ffn, split: Split, rows: int, folder: Path, **options) -> torch.Tensor:
    """The kernel's error against float64 is eager's; more where each of several additions rounds."""
    tensors = block.tensors(rows)
    exact = block.eager({n: t.double() for n, t in tensors.items()})
    got = run(block, split, rows, folder, **options)

    def error(y: torch.Tensor) -> float:
        return float((y.double() - exact).norm() / exact.norm())

    allowed = 2.0 if split.tail is Tail.REDUCE_ADD else 1.1
    assert error(got) <= allowed * error(block.eager(tensors)) + 1e-4
    return got


# -- values


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("block", "split", "rows"),
    [
        (SMALL, Split(2, 2), 100),
        (SMALL, Split(2, 2, Tail.CLUSTER), 128),
        (SMALL, Split(2, 2, Tail.REDUCE_ADD), 100),
        (GATED, Split(1, 3, Tail.NONE, tile_rows=16), 13),
        (SMALL, Split(2, 2, Tail.REDUCE_ADD, tile_rows=8), 5),
        (replace(SMALL, dtype="f16"), Split(2, 2, Tail.REDUCE_ADD, tile_rows=64), 64),
        (GATED, Split(2, 3, Tail.PARTIALS, tile_rows=32), 25),
        (SMALL, Split(1, 2, Tail.NONE, row_tiles=2), 200),
    ],
    ids=str,
)
def test_every_tail(block: Ffn, split: Split, rows: int, folder: Path) -> None:
    check(block, split, rows, folder)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("block", "split", "rows"),
    [
        (SMALL, Split(1, 2, Tail.NONE, middle=DSM), 100),
        (SMALL, Split(2, 2, middle=DSM), 100),
        (replace(SMALL, dtype="f16"), Split(2, 2, Tail.REDUCE_ADD, tile_rows=8, middle=DSM), 5),
        (GATED, Split(1, 3, Tail.NONE, tile_rows=16, middle=DSM), 13),  # columns of 72 among three: the last has less
        (replace(GATED, hid=264), Split(2, 4, tile_rows=64, middle=DSM), 40),
        (replace(SMALL, act="sigmoid", hid=152), Split(2, 2, tile_rows=32, middle=DSM), 31),  # act(0) is not 0
        (SMALL, Split(1, 2, Tail.NONE, row_tiles=2, middle=DSM), 200),
        (Ffn(256, 64, 64), Split(1, 8, Tail.NONE, tile_rows=8, middle=DSM), 8),
    ],
    ids=str,
)
def test_the_middle_over_a_cluster(block: Ffn, split: Split, rows: int, folder: Path) -> None:
    got = check(block, split, rows, folder)
    if split.tail is not Tail.REDUCE_ADD:  # where parts come together changes no sum
        assert torch.equal(got, run(block, replace(split, middle=Middle.L2), rows, folder))


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("block", "split", "rows"),
    [
        (SMALL, Split(1, 3, Tail.NONE, 16, 4, middle=Middle.NONE), 100),  # more tiles than a launch was planned for
        (SMALL, Split(2, 2, Tail.CLUSTER, 8, 2, middle=Middle.NONE), 13),
        (SMALL, Split(2, 2, Tail.CLUSTER, middle=Middle.NONE), 128),
        (SMALL, Split(2, 2, middle=Middle.NONE), 100),
        (replace(SMALL, dtype="f16"), Split(2, 1, Tail.REDUCE_ADD, 32, middle=Middle.NONE), 25),
        (replace(GATED, hid=264), Split(4, 2, Tail.CLUSTER, 64, middle=Middle.NONE), 40),
        (replace(SMALL, act="sigmoid", hid=152), Split(2, 2, tile_rows=32, middle=Middle.NONE), 31),  # act(0) is not 0
    ],
    ids=str,
)
def test_the_middle_made_by_each(block: Ffn, split: Split, rows: int, folder: Path) -> None:
    got = check(block, split, rows, folder)
    if split.tail is not Tail.REDUCE_ADD and split.row_tiles == 1:
        assert torch.equal(got, run(block, replace(split, middle=Middle.L2), rows, folder))


@pytest.mark.parametrize("k", [40, 64, 72])
def test_a_first_sum_shorter_than_a_stage(k: int, folder: Path) -> None:
    """One step of a product that is half empty, one panel, a panel and a step."""
    check(replace(SMALL, k=k), Split(2, 2, tile_rows=16), 13, folder)


@pytest.mark.parametrize(
    ("split", "rows"),
    [
        (Split(2, 2), 100),
        (Split(2, 2, tile_rows=64, row_tiles=2), 100),
        (Split(3, 2, tile_rows=64), 60),
    ],
    ids=str,
)
def test_words_that_say_their_launch(split: Split, rows: int, folder: Path) -> None:
    """Odd and even launches give the same bits: what says which it is, is no part of the sum."""
    one = check(SMALL, split, rows, folder)
    for launches in (2, 3):
        assert torch.equal(one, run(SMALL, split, rows, folder, launches=launches))


HALVES = Ffn(128, 72, 96)


@pytest.mark.parametrize(
    ("block", "split", "rows", "halves"),
    [
        (HALVES, Split(2, 2, tile_rows=64, row_tiles=2), 100, True),
        (replace(HALVES, hid=256, out=60), Split(2, 2, tile_rows=64), 50, True),
        (replace(GATED, hid=256, out=60), Split(2, 2, tile_rows=64), 50, False),  # each half would read rows twice
        (replace(HALVES, act="sigmoid", hid=120), Split(2, 2, tile_rows=64), 64, True),  # act(0) is not 0
        (HALVES, Split(2, 3, tile_rows=64), 60, False),  # 24 columns of the middle
        (HALVES, Split(2, 2, Tail.CLUSTER, tile_rows=64), 60, False),
        (HALVES, Split(2, 2), 100, False),
    ],
    ids=str,
)
@pytest.mark.every(3)
def test_two_warpgroups_have_half_of_the_columns_each(
    block: Ffn, split: Split, rows: int, halves: bool, folder: Path
) -> None:
    p = share_tile(block.program(), split)
    assert model.build(p.stages[0], p).halves is halves
    check(block, split, rows, folder)


def test_halves_need_neither_flag_nor_fence(folder: Path) -> None:
    check(HALVES, Split(2, 2, tile_rows=64), 60, folder, sanitize=True, launches=2)


@pytest.mark.parametrize("middle", [Middle.L2, Middle.DSM])
def test_the_same_bits_whatever_the_order_of_copies_and_on_a_workspace_in_use(middle: Middle, folder: Path) -> None:
    split = Split(2, 2, middle=middle)
    one = run(SMALL, split, 90, folder)
    for other in (run(SMALL, split, 90, folder, seed=7), run(SMALL, split, 90, folder, launches=3)):
        assert torch.equal(one, other)


def test_what_the_host_cannot_run_is_said(folder: Path) -> None:
    with pytest.raises(ValueError, match="nothing in front"):
        run(replace(SMALL, norm="layer"), Split(2, 2), 9, folder)
    with pytest.raises(ValueError, match="behind a tile of 16"):
        run(SMALL, Split(2, 2, tile_rows=16), 9, folder, sanitize=True)


# -- protocols

TAILS = {
    "partials": Split(2, 2, tile_rows=64),
    "cluster": Split(2, 2, Tail.CLUSTER, tile_rows=64),
    "added": Split(2, 2, Tail.REDUCE_ADD, tile_rows=64),
    "gathered": Split(2, 2, middle=DSM),
    "own": Split(2, 2, Tail.CLUSTER, middle=Middle.NONE),
}


def test_words_that_say_their_launch_need_neither_flag_nor_fence(folder: Path) -> None:
    check(SMALL, TAILS["partials"], 60, folder, sanitize=True, launches=2)


UNASKED = Mutation("collectives.cuh", "      if (!others) break;\n", "      break;\n")
STALE = Mutation("collectives.cuh", "  const u32 tag = (u32)epoch & 1;\n", "  const u32 tag = 0;\n")


@pytest.mark.parametrize("mutation", [UNASKED, STALE], ids=["nobody asks again", "every launch says the same"])
def test_words_of_another_launch_are_seen(mutation: Mutation, folder: Path) -> None:
    """Partial results are zeros before the first launch: who takes them for this one's has a part of the sum."""
    with pytest.raises(AssertionError):
        for seed in range(8):
            check(SMALL, Split(4, 2, tile_rows=64), 60, folder, mutations=(mutation,), limit_s=5, seed=seed)


@pytest.mark.parametrize("name", TAILS)
@pytest.mark.every(2)
def test_no_races(name: str, folder: Path, flagged: None) -> None:
    check(SMALL, TAILS[name], 60, folder, sanitize=True, launches=2)


SENT, OWN, PUT = "collectives.cuh", "shared_tile.cuh", "K::GROUP_COLUMNS * K::ROWS * 2 + q * 8, "
FENCED = "    fence_async_shared();\n    if constexpr (K::OWN_MIDDLE)"
MUTANTS = {
    "a part is sent before it is there": (
        "gathered",
        Mutation(SENT, "  bar_wait(bar, parity);\n#pragma unroll 1\n  for", "#pragma unroll 1\n  for"),
    ),
    "products do not wait for parts": (
        "gathered",
        Mutation(OWN, "++come) bar_wait(word_at<K>(smem, GATHERED_BARS) + 8 * come, 0);", "++come) {}"),
    ),
    "a part is not fenced before bulk copies and products read it": (
        "gathered",
        Mutation(OWN, FENCED, FENCED.replace("    fence_async_shared();\n", "")),
    ),
    "a middle of its own is not fenced before products read it": (
        "own",
        Mutation(OWN, FENCED, FENCED.replace("    fence_async_shared();\n", "")),
    ),
    "a CTA leaves while its part is read": (
        "gathered",
        Mutation(OWN, "if constexpr (K::BY_CLUSTER) cluster_meet();", ""),
    ),
    "parts come before their barriers are set up": (
        "gathered",
        Mutation(OWN, "if (K::TAIL == CLUSTER || K::BY_CLUSTER)\n", "if (K::TAIL == CLUSTER)\n"),
    ),
    "a part goes where another belongs": (
        "gathered",
        Mutation(
            SENT, "copy_to_peer(at_peer(part, peer), part, PART,", "copy_to_peer(at_peer(room, peer), part, PART,"
        ),
    ),
    "what says where products read takes the CTA's rank in its cluster for a pitch": (
        "gathered",
        Mutation("descriptors.cuh", "(u64)pitch << 16 | (low & 0x3FFF)", "(u64)pitch << 16 | low"),
    ),
    "columns beyond the last are left as they were": (
        "gathered",
        Mutation(OWN, f"{PUT}0.0f, 0.0f);", f"{PUT}1.0f, 1.0f);"),
    ),
    "the middle is announced before it is stored": (
        "partials",
        Mutation(OWN, "    bar_wait(word_at<K>(smem, MIDDLE_DONE), 0);\n", ""),
    ),
    "what other CTAs stored is read without a fence": (
        "partials",
        Mutation(SENT, "  if (FLAGS > 1) fence_gpu();\n", ""),
    ),
    "partial results are announced before they are stored": (
        "partials",
        Mutation(SENT, "  if (t == 0) team.announce(PARTIAL, epoch);\n", "  team.announce(PARTIAL, epoch - 1);\n"),
    ),
    "sums over a cluster do not wait": (
        "cluster",
        Mutation(SENT, "t, ahead, cluster_sync, add", "t, ahead, [] {}, add"),
    ),
    "a sum starts from what is not cleared": ("added", Mutation(SENT, "    bar_wait(cleared, 0);\n", "")),
}
ODD = Ffn(152, 72, 48)
"""Of whose middle a group of two has 80 columns: stages hold more."""


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.every(6)
def test_a_broken_protocol_is_seen(name: str, folder: Path, flagged: None) -> None:
    split, mutation = MUTANTS[name]
    wrong = mutation.file == "descriptors.cuh" or name.startswith(("a part goes", "columns beyond"))
    with pytest.raises((*CAUGHT, AssertionError)):
        check(ODD, TAILS[split], 60, folder, sanitize=not wrong, mutations=(mutation,), limit_s=3, flag_limit_s=1.0)


def test_a_part_that_never_comes_is_told_with_both_ctas(folder: Path) -> None:
    lost = Mutation("collectives.cuh", "  for (int far = 1 +", "  for (int far = me == 1 ? PEERS : 1 +")
    with pytest.raises(QueueTimeout, match="CTA 0 of 2 .* waited too long for columns of the middle of CTA 1"):
        run(SMALL, Split(1, 2, Tail.NONE, middle=DSM), 9, folder, mutations=(lost,), flag_limit_s=0.5, limit_s=20)


def test_words_that_never_come_are_told_with_both_ctas(folder: Path) -> None:
    stored = "      store_relaxed_words(tile"
    lost = Mutation("collectives.cuh", stored, stored.replace("store", "if (team.cta != 3) store"))
    with pytest.raises(QueueTimeout, match="waited too long for .* of CTA 3"):
        run(SMALL, Split(2, 2), 9, folder, mutations=(lost,), flag_limit_s=0.5, limit_s=20)
