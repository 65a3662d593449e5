"""Collectives by themselves: values and races on the host, machine code, the times that are kept."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tilestream.cuda import sass
from tilestream.cuda.compile import compile_source
from tilestream.cuda.exchange import BLOCK_BYTES, Exchange, Kind
from tilestream.cuda.host.build import HostRace, HostRun, HostTrap, Mutation
from tilestream.cuda.host.exchange import exchange_on_host
from tilestream.errors import VerifyError

on_host = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
GATHERS = (Kind.GATHER_DSM, Kind.RING_DSM, Kind.GATHER_L2)


def tiles(e: Exchange, groups: int) -> torch.Tensor:
    """Parts of any bits, or sums of order one."""
    shape = (groups * e.peers, e.tile_bytes // 4)
    return torch.randint(0, 1 << 20, shape, dtype=torch.int32) if e.gathers else torch.randn(shape) + 1


def rows_of(fragments: torch.Tensor) -> torch.Tensor:
    """``[..., blocks, 128 lanes, 4]`` of accumulators as ``[..., 64 rows, columns]``."""
    t = fragments.reshape(-1, fragments.shape[-1] * 4 // BLOCK_BYTES, 4, 8, 4, 2, 2)  # block, warp, row, quad, half, column
    return t.permute(0, 2, 5, 3, 1, 4, 6).reshape(t.shape[0], 64, -1)


def check(e: Exchange, groups: int, folder: Path, times: int = 1, **options) -> None:
    given = tiles(e, groups)
    got = exchange_on_host(e, given, times, HostRun(folder=folder, **options))
    each = given.reshape(groups, e.peers, -1)
    if e.gathers:
        assert torch.equal(got.reshape(groups, e.peers, e.peers, -1), each[:, None].expand(-1, e.peers, -1, -1))
    elif e.kind is Kind.ADD_MEMORY:
        want = times * rows_of(each.sum(1))
        assert (got.double() - want.double()).norm() < 0.02 * want.norm()
    elif e.kind in (Kind.ALL_ADD, Kind.ALL_MUL):
        for _ in range(times):
            each = (each.sum(1) if e.kind is Kind.ALL_ADD else each.prod(1))[:, None].expand_as(each)
        torch.testing.assert_close(got.reshape(each.shape), each, rtol=1e-5, atol=1e-6)
    else:
        blocks = got.reshape(groups, e.peers, e.blocks, -1)
        want = each.sum(1).reshape(groups, e.blocks, -1)
        for me in range(e.peers):
            mine = [i for i in range(e.blocks) if i % e.peers == me]
            torch.testing.assert_close(blocks[:, me, mine], want[:, mine], rtol=1e-5, atol=1e-5)
            assert blocks[:, me, [i for i in range(e.blocks) if i not in mine]].isnan().all()


@on_host
@pytest.mark.smoke
@pytest.mark.parametrize("kind", [k for k in Kind if k is not Kind.BARRIER])
def test_everybody_gets_what_the_collective_says(kind: Kind, folder: Path) -> None:
    check(Exchange(kind, 3, 2048 if kind in GATHERS else 4 * BLOCK_BYTES), 2, folder, times=3 if kind is not Kind.ALL_MUL else 2)


@on_host
@pytest.mark.parametrize("kind", [Kind.GATHER_DSM, Kind.RING_DSM, Kind.GATHER_L2, Kind.ALL_ADD, Kind.SCATTER_DSM])
def test_nobody_overtakes_anybody(kind: Kind, folder: Path) -> None:
    check(Exchange(kind, 2, 1024 if kind in GATHERS else BLOCK_BYTES), 1, folder, times=4, sanitize=True)


MUTANTS = {
    "a ring hands on what has not come": (
        Kind.RING_DSM,
        Mutation("collectives.cuh", "    bar_wait(bar, parity);\n    copy_to_peer(at_peer(part, next)", "    copy_to_peer(at_peer(part, next)"),
    ),
    "parts come before everybody has read the last ones": (
        Kind.GATHER_DSM,
        Mutation("exchange.cuh", "      cluster_sync();  // all have all parts", "      sync_cta();  // all have all parts"),
    ),
    "an all-exchange does not wait": (
        Kind.ALL_ADD,
        Mutation("collectives.cuh", "  cluster_sync();\n  TS_EACH(t, THREADS) {", "  TS_EACH(t, THREADS) {"),
    ),
    "rooms do not take turns": (
        Kind.ALL_ADD,
        Mutation("exchange.cuh", "const u32 turn = (u32)n & 1;", "const u32 turn = 0;"),
    ),
}  # fmt: skip


@on_host
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_protocol_is_seen(name: str, folder: Path) -> None:
    kind, mutation = MUTANTS[name]
    with pytest.raises((HostRace, HostTrap, AssertionError)):
        check(
            Exchange(kind, 3, 1024 if kind in GATHERS else BLOCK_BYTES), 1, folder, times=4, sanitize=True,
            mutations=(mutation,), limit_s=3, flag_limit_s=1.0,
        )  # fmt: skip


@pytest.mark.nvrtc
@pytest.mark.parametrize("kind", Kind)
def test_kernels_compile_without_spills(kind: Kind) -> None:
    report = compile_source(Exchange(kind, 16, 4096))
    assert report.spills == 0
    if sass.disassembler() is not None and kind in GATHERS[:2]:
        assert sass.disassemble(report.cubin).having("UBLKCP"), "no bulk copy to a peer"


def test_what_does_not_fit_is_told_the_numbers() -> None:
    with pytest.raises(VerifyError, match="a tile of gather_dsm has 1000 bytes"):
        Exchange(Kind.GATHER_DSM, 2, 1000)
    with pytest.raises(VerifyError, match=r"all_add of 16 x 8192 bytes takes 262288 > 232448 bytes"):
        Exchange(Kind.ALL_ADD, 16, 8192)
