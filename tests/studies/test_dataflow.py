"""Chains of products: all 41 schedules and clusters as pipelines, what they move against the formulas of the search."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tilestream import devices
from tilestream.errors import OptionError
from tilestream.ir.axes import Level
from tilestream.ir.derive import held
from tilestream.ir.text import show
from tilestream.ir.verify import verify
from tilestream.reference.mesh_machine import Moved, run_meshes
from tilestream.reference.ops import FLOAT64
from tilestream.studies.flashfuser.dataflow.chain import Chain, Gate
from tilestream.studies.flashfuser.dataflow.lower import lower
from tilestream.studies.flashfuser.dataflow.places import held_c, held_e, places
from tilestream.studies.flashfuser.dataflow.schedule import SCHEDULES, Cluster, Dataflow, Schedule, Tiles
from tilestream.studies.flashfuser.dataflow.volumes import Candidates, dram, printed, volumes

TRIPS = {"m": 2, "n": 2, "k": 2, "l": 2}
CLUSTERS = [Cluster(), Cluster(1, 2, 1, 2), Cluster(2, 2, 2, 2), Cluster(1, 4, 1, 2)]


def small(cluster: Cluster, gate: Gate = Gate.NONE) -> tuple[Chain, Tiles]:
    """A chain that groups of ``cluster`` take in a few trips along each axis."""
    tiles = Tiles(1, 1, 1, cluster.reduce)
    over = {"m": cluster.m, "n": cluster.n, "k": 1 if gate is Gate.SPATIAL else cluster.k, "l": cluster.l}
    trips = {**TRIPS, "m": 1 if cluster.blocks > 4 else 2}  # the reference machine makes each of the workers
    size = {a: trips[a] * over[a] * getattr(tiles, a) for a in TRIPS}
    return Chain("small", **size, gate=gate), tiles


def data(chain: Chain) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    branch = (2,) if chain.gate is Gate.SPATIAL else ()
    made = {
        "A": torch.randn(chain.m, chain.k),
        "WB": torch.randn(*branch, chain.n, chain.k),
        "WD": torch.randn(chain.l, chain.n),
    }
    if chain.gate is Gate.SPATIAL:
        made["flag"] = torch.tensor([1.0, 0.0])
    if chain.gate is Gate.SEQUENTIAL:
        made["WB2"] = torch.randn(chain.n, chain.k)
    return {name: x.double() for name, x in made.items()}


def truth(chain: Chain, t: dict[str, torch.Tensor]) -> torch.Tensor:
    if chain.gate is Gate.NONE:
        return F.relu(t["A"] @ t["WB"].T) @ t["WD"].T
    gate, up = (t["WB"], t["WB2"]) if chain.gate is Gate.SEQUENTIAL else t["WB"]
    return (F.silu(t["A"] @ gate.T) * (t["A"] @ up.T)) @ t["WD"].T


def checked(chain: Chain, flow: Dataflow) -> Moved:
    p = lower(chain, flow)
    verify(p)
    moved, inputs = Moved(), data(chain)
    got = run_meshes(p, inputs, FLOAT64, moved)["E"]
    torch.testing.assert_close(got, truth(chain, inputs), rtol=1e-12, atol=1e-11)
    return moved


def equal(chain: Chain, flow: Dataflow, flags: int = 0) -> Moved:
    """Values, and every byte at each level: the formulas', and those of a spatial gate's flags."""
    moved = checked(chain, flow)
    made = volumes(chain, Candidates.of(chain, flow))
    assert (made.l2 + flags, made.dsm) == (moved.bytes["l2"], moved.bytes["dsm"]), str(flow.schedule)
    return moved


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda c: f"{c.m}{c.n}{c.k}{c.l}")
@pytest.mark.every(2)
def test_every_schedule_gives_the_right_values_and_moves_what_the_formulas_say(cluster: Cluster) -> None:
    assert len(SCHEDULES) == 41
    chain, tiles = small(cluster)
    for schedule in SCHEDULES:
        flow = Dataflow(schedule, cluster, tiles)
        equal(chain, flow)
        at = Candidates.of(chain, flow)
        (stage,) = lower(chain, flow).stages
        whole = {a: chain.size(a) // at.spatial(a) // getattr(cluster, a) for a in "mnl"}
        own = {"m": tiles.m, "n": tiles.n, "l": tiles.l}

        def size(tile: str, dims: str, stage=stage, whole=whole, own=own) -> int:
            out = held(stage, tile)
            first, second = (whole[a] if a in out else own[a] for a in dims)
            return first * second

        assert held_c(chain, at) == 2 * size("h", "mn"), str(schedule)
        assert held_e(at) == 4 * size("e", "ml"), str(schedule)


@pytest.mark.parametrize("middle", [Level.CLUSTER, Level.GRID])
@pytest.mark.parametrize("tail", [Level.CLUSTER, Level.GRID])
@pytest.mark.parametrize("cluster", [Cluster(1, 4, 1, 2), Cluster(2, 2, 2, 2)], ids=["shuffle", "all"])
@pytest.mark.every(3)
def test_the_middle_and_the_tail_go_through_dsm_or_the_l2(middle: Level, tail: Level, cluster: Cluster) -> None:
    chain, tiles = small(cluster)
    for schedule in (Schedule("n", "mlk"), Schedule("mn", "lk"), Schedule("l", "nmk"), Schedule("ml", "nk")):
        equal(chain, Dataflow(schedule, cluster, tiles, middle, tail))


@pytest.mark.parametrize("schedule", [Schedule("n", "mlk"), Schedule("mn", "lk"), Schedule("ml", "nk")], ids=str)
def test_both_mappings_of_a_gate(schedule: Schedule) -> None:
    cluster = Cluster(1, 4, 2, 4)
    chain, tiles = small(cluster, Gate.SPATIAL)
    flow = Dataflow(schedule, cluster, tiles)
    p, at = lower(chain, flow), Candidates.of(chain, flow)
    # the flag of a branch, bf16, once a cluster and time the product's epilogue runs
    loops = [a for a in "mn" if a in schedule.loops]
    runs = at.trips["m"] * at.trips["n"] * at.spatial("l")
    assert [loop.axis for loop in p.stages[0].loops if loop.axis in loops] == loops or "n" == schedule.loops[0]
    spatially = equal(chain, flow, flags=2 * 2 * runs)
    assert spatially.collectives["all-reduce dsm"] and "combine=mul" in show(p)

    cluster = Cluster(1, 4, 1, 2)
    chain, tiles = small(cluster, Gate.SEQUENTIAL)
    equal(chain, Dataflow(schedule, cluster, tiles))


def test_spatial_gates_trade_dsm_for_half_the_work_a_block() -> None:
    """The paper's choice: all-exchange moves 2 M N fp32 more, and a block makes one branch, not two."""
    sizes = {"m": 128, "n": 5632, "k": 2048, "l": 2048}
    spatial = Dataflow(Schedule("n", "mlk"), Cluster(1, 8, 2, 16), Tiles(128, 88, 64, 128))
    one_by_one = Dataflow(Schedule("n", "mlk"), Cluster(1, 16, 1, 16), Tiles(128, 44, 64, 128))
    a, b = Chain("s", **sizes, gate=Gate.SPATIAL), Chain("q", **sizes, gate=Gate.SEQUENTIAL)
    first, second = (volumes(c, Candidates.of(c, f)) for c, f in ((a, spatial), (b, one_by_one)))
    assert first.exchange == 2 * 128 * 5632 * 4 and second.exchange == 0
    assert first.operands["B"] == second.operands["B"] and second.operands["A"] == 2 * first.operands["A"]


def test_volumes_of_the_largest_shape_of_the_paper() -> None:
    """GPT-6.7B (G5), by hand, MB: shuffle, reduce, inter-cluster reduce of six clusters (papers' arithmetic)."""
    chain = Chain("G5", 128, 16384, 4096, 4096)
    loops = Schedule("n", "mlk")
    for cluster, n, want in (
        (Cluster(1, 16, 1, 16), 128, (63, 0)),
        (Cluster(1, 16, 1, 1), 128, (0, 252)),
        (Cluster(1, 16, 1, 4), 128, (13, 50)),
        (Cluster(1, 8, 1, 8), 128, (29, 0)),
    ):
        flow = Dataflow(loops, cluster, Tiles(128, n, 64, 4096 // cluster.l))
        made = volumes(chain, Candidates.of(chain, flow))
        assert (round(made.shuffle / 1e6), round(made.reduce / 1e6)) == want
        assert made.operands["B"] + made.operands["D"] == chain.weight_bytes


def test_algorithm_1_as_printed_forgets_that_an_operand_is_read_again() -> None:
    """A is needed by every tile of N: with N's loop around M's and K's it is read T_N times, printed: once."""
    chain = Chain("G5", 128, 16384, 4096, 4096)
    flow = Dataflow(Schedule("l", "nmk"), Cluster(), Tiles(64, 256, 64, 4096))
    at = Candidates.of(chain, flow)
    corrected, stated = volumes(chain, at).operands, printed(chain, at)
    assert stated["A"] == 128 * 4096 * 2 and corrected["A"] == stated["A"] * 16384 // 256
    assert stated["B"] == 16384 * 4096 * 2 and corrected["B"] == 2 * stated["B"]  # again for each of two tiles of M
    inside = Candidates.of(chain, Dataflow(Schedule("l", "mkn"), Cluster(), Tiles(64, 256, 64, 4096)))
    assert volumes(chain, inside).operands["A"] == printed(chain, inside)["A"], "a block of A serves all tiles of N"


def test_operands_larger_than_the_l2_are_read_again_from_dram() -> None:
    chain = Chain("G5", 256, 16384, 4096, 4096)
    at = Candidates.of(chain, Dataflow(Schedule("n", "mlk"), Cluster(), Tiles(128, 128, 64, 256)))
    assert dram(chain, at, 60e6) == chain.fused_bytes + chain.weight_bytes  # B and D, 134 MB each, for two tiles of M
    assert dram(chain, at, 200e6) == chain.fused_bytes


def test_greedy_placement_spills_from_registers_to_dsm() -> None:
    chain = Chain("G5", 128, 16384, 4096, 4096)

    def placed(cluster: Cluster, schedule: str, *tiles: int):
        flow = Dataflow(Schedule(*schedule.split("|")), cluster, Tiles(*tiles))
        return places(chain, Candidates.of(chain, flow), devices.get("h200"))

    row = placed(Cluster(1, 16, 1, 16), "m|lnk", 128, 64, 64, 64)  # C whole: 4 MB over 16 blocks
    assert row.c["registers"] == 0 and row.c["shared"] > 0 and row.on_chip()
    assert sum(row.c.values()) == 128 * 16384 // 16 * 2
    wide = placed(Cluster(1, 16, 1, 16), "m|lnk", 128, 512, 64, 64)  # a deeper ring leaves less shared memory
    assert wide.c["dsm"] > 0
    alone = placed(Cluster(), "m|lnk", 128, 64, 64, 64)
    assert alone.c["dsm"] == 0 < alone.c["l2"] and not alone.on_chip()
    partial = placed(Cluster(1, 16, 1, 16), "m|nlk", 128, 64, 64, 64)  # E whole: 128 x 256 fp32 fit registers
    assert partial.e["registers"] == 128 * 256 * 4


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_what_must_hold_of_volumes(schedule: Schedule) -> None:
    """Each weight is read at least once; more blocks that shuffle never move fewer bytes of DSM, nor more operands."""
    chain = Chain("c", 128, 1024, 512, 512)
    before = None
    for blocks in (1, 2, 4, 8):
        flow = Dataflow(schedule, Cluster(1, blocks, 1, blocks), Tiles(64, 32, 64, 64))
        made = volumes(chain, Candidates.of(chain, flow))
        assert sum(made.operands.values()) >= chain.fused_bytes
        if before is not None:
            assert made.dsm >= before.dsm and sum(made.operands.values()) <= sum(before.operands.values())
        before = made


@pytest.mark.parametrize(
    ("flow", "why"),
    [
        (Dataflow(Schedule("n", "mlk"), Cluster(1, 4, 2, 3), Tiles(1, 1, 1, 1)), "3/2 blocks shuffle"),
        (Dataflow(Schedule("n", "mlk"), Cluster(1, 4, 1, 4), Tiles(1, 3, 1, 1)), "n 16 is no multiple of 12"),
        (Dataflow(Schedule("n", "mlk"), Cluster(1, 4, 1, 1), Tiles(1, 1, 1, 2)), "stores 2/4 columns"),
    ],
)
def test_what_does_not_come_out_even_is_refused(flow: Dataflow, why: str) -> None:
    with pytest.raises(OptionError, match=why):
        lower(Chain("c", 8, 16, 12, 12), flow)


def test_a_spatial_gate_needs_two_halves() -> None:
    with pytest.raises(OptionError, match="cls_k is 1"):
        lower(Chain("c", 8, 16, 12, 12, Gate.SPATIAL), Dataflow(Schedule("n", "mlk"), Cluster(), Tiles(8, 8, 12, 12)))


@pytest.mark.parametrize("schedule", ["n|mlk", "n|kml", "m|nlk", "mn|lk", "n|mkl", "m|kln"])
@pytest.mark.parametrize("taps", [1, 3])
@pytest.mark.parametrize("cluster", [Cluster(1, 2, 1, 2), Cluster(2, 2, 2, 2)], ids=["1212", "2222"])
@pytest.mark.every(3)
def test_a_convolution_and_a_1_x_1_behind_it_are_a_chain(schedule: str, taps: int, cluster: Cluster) -> None:
    """A is a view of the image; bytes are those of the product of im2col."""
    torch.manual_seed(0)
    channels, height, width, middle, out = 4, 8, 5, 8, 4
    image, second = torch.randn(height, width, channels).double(), torch.randn(out, middle).double()
    first = torch.randn(middle, taps, taps, channels).double()
    chain = Chain.convolutions("conv", channels, height, width, middle, out, taps)
    assert (chain.m, chain.n, chain.k, chain.l, chain.source) == (40, 8, 4 * taps**2, 4, 160)
    flow = Dataflow(Schedule(*schedule.split("|")), cluster, Tiles(10, 2, channels // cluster.k, 2))
    p, moved = lower(chain, flow), Moved()
    verify(p)
    got = run_meshes(p, {"A": image, "WB": first, "WD": second}, FLOAT64, moved)["E"]
    planes = F.conv2d(image.permute(2, 0, 1)[None], first.permute(0, 3, 1, 2), padding=taps // 2)
    want = F.conv2d(F.relu(planes), second[:, :, None, None])[0].permute(1, 2, 0)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    made = volumes(chain, Candidates.of(chain, flow))
    assert (made.l2, made.dsm) == (moved.bytes["l2"], moved.bytes["dsm"])


def test_what_convolutions_refuse() -> None:
    with pytest.raises(OptionError, match="3 x 3, and only 1 x 1"):
        Chain.convolutions("conv", 3, 6, 5, 8, 4, 3, 3)
    chain = Chain.convolutions("conv", 4, 8, 5, 8, 4, 3)
    for schedule, tiles, why in (
        ("n|mlk", Tiles(8, 2, 4, 4), "8/5 rows of the image"),
        ("mn|lk", Tiles(8, 2, 4, 4), "8/5 rows of the image"),
        ("n|mlk", Tiles(10, 2, 12, 4), "12 x 1 of 4 channels"),
        ("k|mnl", Tiles(10, 2, 4, 4), "no parts of a grid"),
    ):
        with pytest.raises(OptionError, match=why):
            lower(chain, Dataflow(Schedule(*schedule.split("|")), Cluster(), tiles))
