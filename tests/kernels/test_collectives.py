"""Collectives by themselves: values and races on the host, machine code, the times that are kept."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest
import sass
import torch
from compiled import compile_source
from exchange_on_host import exchange_on_host
from host_runs import CAUGHT
from places import BENCHMARKS

from tilestream import devices
from tilestream.bench.collectives import PEERS, Timed, compared, dump, exchanges, gather_through_dsm, load, rows_of
from tilestream.bench.exchange import BLOCK_BYTES, GATHERS, Exchange, Kind
from tilestream.cuda.host.build import HostRun, Mutation
from tilestream.errors import VerifyError
from tilestream.kernels.coefficients.shared_tile import H200_GENERATED
from tilestream.kernels.product.sharing import Middle

on_host = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def tiles(e: Exchange, groups: int) -> torch.Tensor:
    """Parts of any bits, or sums of order one."""
    shape = (groups * e.peers, e.tile_bytes // 4)
    return torch.randint(0, 1 << 20, shape, dtype=torch.int32) if e.gathers else torch.randn(shape) + 1


def check(e: Exchange, groups: int, folder: Path, times: int = 1, **options) -> None:
    given = tiles(e, groups)
    got = exchange_on_host(e, given, times, HostRun(folder=folder, **options))
    each = given.reshape(groups, e.peers, -1)
    if e.gathers:
        assert torch.equal(got.reshape(groups, e.peers, e.peers, -1), each[:, None].expand(-1, e.peers, -1, -1))
    elif e.kind is Kind.ADD_MEMORY:
        want, scale = times * rows_of(each.double().sum(1)), times * rows_of(each.double().abs().sum(1))
        bound = (1 + e.error_bound) ** times - 1  # as many more roundings
        assert ((got.view_as(want) - want).abs() <= bound * scale).all()
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
    check(
        Exchange(kind, 3, 2048 if kind in GATHERS else 4 * BLOCK_BYTES),
        2,
        folder,
        times=3 if kind is not Kind.ALL_MUL else 2,
    )


@on_host
@pytest.mark.parametrize("kind", [Kind.GATHER_DSM, Kind.RING_DSM, Kind.ALL_ADD, Kind.SCATTER_DSM, Kind.SCATTER_L2])
@pytest.mark.every(2)
def test_nobody_overtakes_anybody(kind: Kind, folder: Path) -> None:
    """Not the gather through the L2: that bulk reads of memory are over, the host's machine learns of relaxed flags
    alone, and here threads of one CTA tell each other."""
    check(Exchange(kind, 2, 1024 if kind in GATHERS else BLOCK_BYTES), 1, folder, times=4, sanitize=True)


FILE, LOOP = "collectives.cuh", "kernel"
MUTANTS = {
    "a ring hands on what has not come": (
        Kind.RING_DSM,
        Mutation(FILE, "    bar_wait(bar, parity);\n    copy_to_peer(at", "    copy_to_peer(at"),
    ),
    "parts come before everybody has read the last ones": (
        Kind.GATHER_DSM,
        Mutation(LOOP, "      cluster_sync();  // all have all parts", "      sync_cta();  // all have all parts"),
    ),
    "an all-exchange does not wait": (
        Kind.ALL_ADD,
        Mutation(FILE, "  cluster_sync();\n  TS_EACH(t, THREADS) {", "  TS_EACH(t, THREADS) {"),
    ),
    "rooms do not take turns": (Kind.ALL_ADD, Mutation(LOOP, "const u32 turn = (u32)n & 1;", "const u32 turn = 0;")),
}


@on_host
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.every(2)
def test_a_broken_protocol_is_seen(name: str, folder: Path) -> None:
    kind, mutation = MUTANTS[name]
    with pytest.raises((*CAUGHT, AssertionError)):
        check(
            Exchange(kind, 3, 1024 if kind in GATHERS else BLOCK_BYTES), 1, folder, times=4, sanitize=True,
            mutations=(mutation,), limit_s=3, flag_limit_s=1.0,
        )  # fmt: skip


@pytest.mark.nvrtc
@pytest.mark.parametrize("kind", Kind)
@pytest.mark.every(3)
def test_kernels_compile_without_spills(kind: Kind) -> None:
    report = compile_source(Exchange(kind, 16, 4096))
    assert report.spills == 0
    if sass.disassembler() is not None and kind in GATHERS[:2]:
        assert sass.disassemble(report.cubin).having("UBLKCP"), "no bulk copy to a peer"


@pytest.mark.parametrize("peers", PEERS)
def test_the_bound_of_sums_in_memory(peers: int) -> None:
    """Any order of bf16 additions keeps it, and a sum that lacks a term does not."""
    torch.manual_seed(0)
    e = Exchange(Kind.ADD_MEMORY, peers, 2 * BLOCK_BYTES)
    terms = torch.randn(peers, 4096) + 1
    scale = terms.double().abs().sum(0)
    for order in (terms, terms.flip(0), terms.sort(0).values):
        total = torch.zeros(4096, dtype=torch.bfloat16)
        worst = []
        for term in order:
            total += term.bfloat16()
            worst.append(float(((total.double() - terms.double().sum(0)).abs() / scale).max()))
        assert worst[-1] <= e.error_bound < worst[-2]
    assert Exchange(Kind.SCATTER_L2, peers, 4096).error_bound < peers * 2.0**-23
    assert Exchange(Kind.GATHER_DSM, peers, 4096).error_bound == 0.0


def test_what_does_not_fit_is_told_the_numbers() -> None:
    with pytest.raises(VerifyError, match="a tile of gather_dsm has 1000 bytes"):
        Exchange(Kind.GATHER_DSM, 2, 1000)
    with pytest.raises(VerifyError, match=r"all_add of 16 x 8192 bytes takes 262288 > 232448 bytes"):
        Exchange(Kind.ALL_ADD, 16, 8192)


# -- times


def test_kept_times_are_set_beside_the_device(tmp_path: Path) -> None:
    h200 = devices.get("h200")
    rows = [
        Timed("gather_dsm", 2, 16_384, 132, 0.54, 30.0, 0.0),
        Timed("gather_dsm", 8, 16_384, 120, 5.0, 22.9, 0.0),
        Timed("scatter_l2", 8, 16_384, 128, 5.0, 22.9, 0.0),
    ]
    path = tmp_path / "collectives.json"
    assert load(path) == ()
    path.write_text(dump(rows, {"gpu": "none"}))
    assert load(path) == tuple(rows)
    found = {what: (described, measured) for what, described, measured in compared(rows, h200)}
    assert found["resident clusters of 8"] == (15, 15.0) and "resident clusters of 4" not in found
    assert found["DSM bytes/s, clusters of 8"] == (h200.dsm_bytes_per_s, 22.9e9 * 120)
    assert found["hand-over of 16384 bytes"] == (h200.dsm_s(16_384), pytest.approx(0.54e-6))


def test_the_cost_of_a_gather_through_dsm_is_what_was_timed() -> None:
    rows = load(BENCHMARKS / "results" / "collectives.json")
    seconds, rate = gather_through_dsm(rows)
    assert seconds == pytest.approx(H200_GENERATED.dsm_step_s, rel=0.01)
    assert rate == pytest.approx(H200_GENERATED.dsm_port_bytes_per_s, rel=0.01)
    (barrier,) = {round(r.us, 2) for r in rows if r.kind == Kind.BARRIER}
    for r in rows:
        assert r.right
        if r.kind == Kind.GATHER_DSM:
            foreseen = barrier + 1e6 * (seconds + (r.peers - 1) * r.tile_bytes / rate)
            assert foreseen == pytest.approx(r.us, rel=0.12)
    with pytest.raises(ValueError, match="no times of gathers"):
        gather_through_dsm(rows[:1])


def test_every_kind_is_timed_at_every_size_of_a_cluster() -> None:
    assert {(e.kind, e.peers) for e in exchanges()} == {(kind, peers) for kind in Kind for peers in PEERS}


def test_arms_of_the_ablation() -> None:
    made = importlib.import_module("benchmarks.run.few_rows_ablation").arms("G1", 128)
    assert {"planner", "random", "middle by cluster", "tail in order", "tail any order", "stages of 64"} <= made.keys()
    assert all(s.middle is Middle.DSM for s in made["middle by cluster"])
    assert all(s.middle is not Middle.DSM or s.tile_rows <= 64 for s in made["planner"])
    assert made["random"] == importlib.import_module("benchmarks.run.few_rows_ablation").arms("G1", 128)["random"]
