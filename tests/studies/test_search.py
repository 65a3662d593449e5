"""Searches for a chain's kernel: FlashFuser's rules and cost, the family of kernels, the cost model, the cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilestream import devices
from tilestream.devices.shared_tile import dsm_bytes_per_s
from tilestream.errors import OptionError, PlanError
from tilestream.ir.axes import Level
from tilestream.ir.verify import verify
from tilestream.studies.flashfuser.dataflow.chain import Chain, Gate
from tilestream.studies.flashfuser.dataflow.lower import lower
from tilestream.studies.flashfuser.dataflow.schedule import SCHEDULES, Cluster, Dataflow, Schedule, Tiles
from tilestream.studies.flashfuser.dataflow.volumes import Candidates, volumes
from tilestream.studies.flashfuser.search import rules
from tilestream.studies.flashfuser.search.cost import cost
from tilestream.studies.flashfuser.search.enumerate import RESERVED, resident, variants
from tilestream.studies.flashfuser.search.minmax import best, ranked
from tilestream.studies.flashfuser.search.search import TOP, Candidate, Effort, binned, rank, search
from tilestream.studies.flashfuser.search.variant import Middle, SharedTile, Tail

H200 = devices.get("h200")
G4 = Chain("G4", 128, 3072, 768, 768)
G6 = Chain("G6", 128, 4096, 1024, 1024)
S2 = Chain("S2", 128, 5632, 2048, 2048, Gate.SEQUENTIAL)


# -- the paper's rules and its cost


def test_counts_of_the_papers_example() -> None:
    steps = rules.counts(rules.PAPERS_EXAMPLE, H200)
    assert steps[0].ours == 41 * 5**4 * 16 * 1024 * 256 * 256 and steps[1].ours == 41 * 5**4 * 5 * 11 * 9 * 9
    assert [s.agrees for s in steps] == [True, True, False, False, False, False]
    assert all(a.ours > b.ours > 0 for a, b in zip(steps, steps[1:], strict=False))
    # rules 3 and 4 as worded leave the share of schedules that the paper's counts have: 16 of 41
    assert steps[4].ours / steps[2].ours == 16 / 41 == pytest.approx(rules.PAPER[4] / rules.PAPER[2], rel=0.003)


def test_readings_of_the_rules_are_counted_and_not_bent() -> None:
    found = {(rule, what): (count(), implied) for rule, what, count, implied in rules.READINGS}
    clusters = sorted(count for (rule, _), (count, _) in found.items() if rule == "2 clusters")
    assert clusters == [70, 105, 135, 140]  # the paper's counts imply 135: one reading was looked for
    assert {implied for (rule, _), (_, implied) in found.items() if rule == "2 clusters"} == {
        625 * 2.47e7 / rules.RULE1
    }


@pytest.mark.parametrize(
    ("schedule", "sums", "meets"),
    [("n|mlk", True, True), ("n|mkl", False, True), ("k|mnl", True, True), ("l|mnk", True, False)],
)
def test_what_rules_3_and_4_say_of_a_schedule(schedule: str, sums: bool, meets: bool) -> None:
    made = Schedule(*schedule.split("|"))
    assert (rules.sums_before_activation(made), rules.consumers_can_meet(made)) == (sums, meets)


def test_rule_5_refuses_what_would_leave_the_chip() -> None:
    chain = Chain("G5", 128, 16384, 4096, 4096)

    def fit(cluster: Cluster, schedule: str, *tiles: int) -> bool:
        flow = Dataflow(Schedule(*schedule.split("|")), cluster, Tiles(*tiles))
        return bool(rules.fits(chain, Candidates.of(chain, flow), H200))

    assert fit(Cluster(1, 16, 1, 16), "n|mlk", 128, 128, 64, 256)
    assert not fit(Cluster(), "m|lnk", 128, 128, 64, 128)  # C whole: 4 MB, without a cluster
    assert not fit(Cluster(), "n|mlk", 128, 1024, 128, 1024)  # the ring alone is 576 KB


def test_a_cluster_lets_stay_on_chip_what_one_block_cannot_hold() -> None:
    """The paper's Fig. 5: fusing G5 in one SM fails, in a cluster it does not."""
    chain = Chain("G5", 128, 16384, 4096, 4096)
    flow = Dataflow(Schedule("m", "lnk"), Cluster(1, 16, 1, 16), Tiles(128, 128, 64, 128))
    assert rules.fits(chain, Candidates.of(chain, flow), H200)


def test_the_papers_cost_is_flat_where_weights_are_most_of_the_bytes() -> None:
    found = best(G4, H200)
    assert len(found.top) == 11 and found.top[0].limit == "dram"
    assert found.tied > 100 * len(found.top), "the eleven that would be timed are eleven of many equals"
    assert [r.seconds for r in found.top] == sorted(r.seconds for r in found.top)
    for r in found.top:
        verify(lower(G4, r.flow))


def test_the_papers_choice_without_dsm_moves_none() -> None:
    found = best(G4, H200, most_blocks=1)
    assert all(r.volumes["dsm"] == 0 and r.flow.cluster == Cluster() for r in found.top)


def test_dsm_is_slower_for_larger_clusters_that_fewer_are_resident_of() -> None:
    assert dsm_bytes_per_s(H200, 2) > dsm_bytes_per_s(H200, 16)


def test_every_schedule_has_a_cost() -> None:
    for schedule in SCHEDULES:
        flow = Dataflow(schedule, Cluster(1, 4, 1, 2), Tiles(128, 64, 64, 64))
        assert 0 < ranked(G6, flow, H200).seconds < 1e-3


# -- the family of kernels


@pytest.mark.parametrize("chain", [G4, S2, Chain.convolutions("C5", 64, 56, 56, 64, 256, 3)], ids=lambda c: c.name)
def test_every_variant_is_resident_and_fits_shared_memory(chain: Chain) -> None:
    found = variants(chain, H200)
    assert len(found) == len(set(found)) > 100
    for v in found:
        assert resident(v, chain, H200) and v.groups * v.columns * v.block_n >= chain.n
        assert v.columns * v.block_l == chain.l or v.columns == 1
        slots = v.slots * v.rows * v.block_n * 2
        assert v.ring + v.weight_ring(chain.branches) + slots <= H200.shared_bytes_per_cta - RESERVED


def test_clusters_that_are_not_resident_are_no_candidates() -> None:
    """The paper's 8 x 16 CTAs: an H200 holds 7 clusters of 16."""
    paper = SharedTile(128, 8, 16, 128, 256, Middle.DSM, Tail.ADD, 16)
    assert not resident(paper, Chain("G5", 128, 16384, 4096, 4096), H200)
    assert all(v.groups <= 7 for v in variants(G4, H200) if v.middle is Middle.DSM and v.columns == 16)


SMALL = [
    SharedTile(64, 2, 4, 8, 8, Middle.L2, Tail.ADD),
    SharedTile(64, 2, 4, 8, 8, Middle.L2, Tail.PARTIALS),
    SharedTile(64, 2, 4, 8, 8, Middle.L2, Tail.DSM, 2),
    SharedTile(64, 2, 4, 8, 8, Middle.DSM, Tail.ADD, 4),
    SharedTile(64, 1, 4, 16, 8, Middle.L2, Tail.STORE),
    SharedTile(64, 4, 1, 16, 8, Middle.NONE, Tail.ATOMICS),
]


@pytest.mark.parametrize("v", SMALL, ids=lambda v: f"{v.middle}-{v.tail}")
def test_variants_are_dataflows_and_move_what_the_model_thinks(v: SharedTile) -> None:
    chain = v.padded(Chain("small", 64, 64, 64, 32))
    flow = v.flow(chain)
    p = lower(chain, flow)
    verify(p)
    made = volumes(chain, Candidates.of(chain, flow))
    width = v.block_n * v.columns
    assert flow.blocks(chain) == v.ctas(chain) and made.operands["B"] + made.operands["D"] == chain.weight_bytes
    loads_a = 1 if v.middle is Middle.DSM else v.columns  # a cluster shares one load
    loads_a *= 1 if v.tail is Tail.DSM else v.groups
    loads_a *= v.groups if v.middle is Middle.DSM and v.tail is Tail.DSM else 1
    assert made.operands["A"] == loads_a * v.rows * chain.k * 2
    assert made.shuffle == v.groups * v.rows * width * 2 * (v.columns - 1)
    if v.tail in (Tail.PARTIALS, Tail.DSM):
        assert made.reduce == (v.groups - 1) * chain.m * chain.l * 4
        assert flow.tail is (Level.CLUSTER if v.tail is Tail.DSM else Level.GRID)
    if v.tail in (Tail.ADD, Tail.ATOMICS):
        assert made.operands["E"] == v.groups * chain.m * chain.l * 2


# -- the cost model


def test_more_of_anything_never_takes_less() -> None:
    v = SharedTile(128, 8, 16, 24, 48, Middle.L2, Tail.ADD, 1, 128, 128, 4, 6)
    base = cost(G4, v, H200).us
    assert cost(G4, v, H200, cold=True).us > base
    for changes in ({"stages": 2}, {"weight_stages": 2}, {"tail": Tail.PARTIALS}, {"middle": Middle.DSM, "slots": 1}):
        assert cost(G4, replace(v, **changes), H200).us >= base, changes
    assert cost(Chain("wide", 128, 3072, 1536, 768), v, H200).us > base


def test_one_cta_alone_has_one_sms_tensor_cores() -> None:
    v = SharedTile(128, 1, 1, 256, 64, Middle.NONE, Tail.STORE, 1, 64, 64, 6, 3)
    found = cost(Chain("c", 128, 256, 512, 64), v, H200)
    assert found.limits[0] == "tensor cores" and found.exchange == 0
    assert found.product0 >= 2 * 128 * 256 * 512 * H200.sms / H200.tensor_flops["bf16"]


# -- the search


def test_a_search_by_the_model_is_quick_and_ranks_kernels_that_differ() -> None:
    found = search(G6, H200, deterministic=False)
    assert found.seconds < 5 and len(found.top) == TOP and found.best is found.top[0]
    times = [c.predicted_us for c in found.top]
    assert times == sorted(times)
    assert len({(c.variant.groups, c.variant.columns, c.variant.tail, c.variant.depth) for c in found.top}) >= 5
    assert found.best.variant.middle is Middle.L2 and found.best.variant.multicast == 1


def test_a_search_adds_in_a_fixed_order_unless_told_otherwise() -> None:
    assert all(c.variant.deterministic for c in search(G6, H200).top)
    everything = search(G6, H200, deterministic=False).best.predicted_us
    assert search(G6, H200).best.predicted_us > everything


def test_a_measured_search_times_eleven_and_keeps_the_fastest(tmp_path) -> None:
    asked: list[Candidate] = []
    said: list[str] = []

    def measure(candidates):
        asked.extend(candidates)
        return [
            RuntimeError("no") if len(asked) <= 4 and i == 0 else 20.0 - len(asked) for i, _ in enumerate(candidates)
        ]

    found = search(G6, H200, Effort.MEASURED, measure, tmp_path, said.append)
    assert len(asked) == TOP and said[-1] == "timing 9 to 11 of 11"
    assert found.best.measured_us == 20.0 - TOP and "could not be measured: no" in found.top[0].rejected

    again = search(Chain("other name", 100, 4096, 1024, 1024), H200, "measured", measure, tmp_path)
    assert len(asked) == TOP and again.top == found.top, "100 rows are in the bin of 128, and nothing is timed again"
    for path in tmp_path.glob("*.json"):
        path.write_text("{")
    search(G6, H200, "measured", measure, tmp_path)
    assert len(asked) == 2 * TOP


def test_a_measured_search_ends_when_its_budget_does() -> None:
    def slow(candidates):
        raise AssertionError("nothing is timed without time")

    found = search(G6, H200, "measured", slow, budget_s=0.0)
    assert all("budget" in c.rejected for c in found.top) and found.best is found.top[0]


def test_what_a_search_refuses() -> None:
    with pytest.raises(OptionError, match="effort is 'hard'"):
        search(G6, H200, "hard")
    with pytest.raises(OptionError, match="needs a GPU"):
        search(G6, H200, "measured")
    with pytest.raises(PlanError, match="has no kernel of CTAs that share a tile"):
        search(Chain("odd", 128, 512, 512, 250), H200)


@pytest.mark.parametrize(("rows", "bin_"), [(1, 16), (16, 16), (17, 32), (128, 128), (300, 512), (600, 1024)])
def test_rows_are_binned(rows: int, bin_: int) -> None:
    assert binned(Chain("c", rows, 512, 512, 512)).m == bin_


def test_without_clusters_there_is_no_dsm() -> None:
    a100 = devices.get("a100")
    found = rank(G4, a100)
    assert found and all(c.variant.middle is not Middle.DSM and c.variant.multicast == 1 for c in found)
