"""Rows of edges summed to nodes in the epilogue that makes them: values, bits, races, mutants, machine code."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import sass
import torch
from torch import Tensor

from benchmarks.lib.edge_layers import at_nodes, by_torch, edge_conv, tensors
from tilestream import cuda, reference
from tilestream.cuda.host.build import HostRun, Mutation, run_on_host
from tilestream.devices import get
from tilestream.errors import VerifyError
from tilestream.ir.pipeline import Pipeline, Residency, Shard
from tilestream.ir.plain import plain
from tilestream.ir.text import show
from tilestream.ir.traffic import dram_of
from tilestream.ir.verify import verify
from tilestream.kernels.families import kernel_of
from tilestream.kernels.fits import verify_on
from tilestream.options import Options
from tilestream.plan.passes.forms import load_directly
from tilestream.plan.planner import proposals
from tilestream.reference.whole import run_whole

on_host = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
HOWS = ("max", "sum", "min")
COUNTS = {
    "sixteen each": [16] * 20,
    "some have none": [3, 0, 0, 70, 1, 0, 130, 5, 64, 0],
    "all at one": [0, 300, 0],
    "a hub among others": [7, 1, 500, 2, 63, 1, 64, 9],
    "one edge": [0, 1],
}


def staged(program: Pipeline, direct: bool = True, replicas: int = 2) -> Pipeline:
    made = load_directly(program) if direct else program
    return made.with_stages((made.stages[0].with_(replicas=replicas, residency=Residency.RESIDENT),))


def degrees(counts: Sequence[int]) -> Tensor:
    return torch.tensor(counts)


@on_host
@pytest.mark.parametrize("name", COUNTS)
def test_values_are_within_twice_eagers_error(name: str) -> None:
    pipeline = staged(edge_conv(16, 64, 64, HOWS))
    given = tensors(pipeline, degrees(COUNTS[name]))
    got = run_on_host(pipeline, given)
    exact, eager = by_torch(given, torch.float64), by_torch(given, torch.bfloat16)
    for how in HOWS:
        want = at_nodes(exact, given, how)
        allowed = 2 * float((at_nodes(eager, given, how).double() - want).norm())
        assert float((got[how].double() - want).norm()) <= allowed + 1e-30
        assert not got[how][degrees(COUNTS[name]) == 0].any()


@on_host
@pytest.mark.parametrize("features", [(64, 64, 128), (24, 40, 33), (8, 16, 2), (16, 32, 72)])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.every(3)
def test_widths(features: tuple[int, int, int], direct: bool) -> None:
    """Several turns of columns, odd ones, those of half a block; rows by loaders as well."""
    pipeline = staged(edge_conv(*features, ("sum", "max")), direct)
    given = tensors(pipeline, degrees([5, 0, 90, 1, 40]))
    got, want = run_on_host(pipeline, given), reference.run(pipeline, given)
    assert all(float((got[n].double() - want[n].double()).norm() / want[n].double().norm()) < 2e-3 for n in want)


@on_host
def test_the_grid_decides_no_bit() -> None:
    """Sums are those of tiles, in their order, whoever makes them."""
    made = []
    for replicas in (1, 3):
        pipeline = staged(edge_conv(16, 32, 64, ("sum",)), replicas=replicas)
        made.append(run_on_host(pipeline, tensors(pipeline, degrees(COUNTS["a hub among others"])))["sum"])
    assert torch.equal(*made)


HUBS = {
    "one hub": [4, 2500, 3],
    "in the middle of a stretch": [1000, 2600, 2, 9],
    "two, side by side": [2300, 2400],
    "just none": [1, 64 * 32 + 1, 70],
    "all": [4500],
}


@on_host
@pytest.mark.parametrize("name", HUBS)
def test_hubs(name: str) -> None:
    """Nodes of more than 32 tiles are added up by stretches of them."""
    pipeline = staged(edge_conv(8, 16, 40, ("sum", "max")), replicas=3)
    given = tensors(pipeline, degrees(HUBS[name]))
    got, exact = run_on_host(pipeline, given), by_torch(given, torch.float64)
    for how in ("sum", "max"):
        want = at_nodes(exact, given, how)
        assert float((got[how].double() - want).norm() / want.norm()) < 4e-3


@on_host
def test_no_edges_are_zeros() -> None:
    pipeline = staged(edge_conv(16, 32, 64, HOWS))
    got = run_on_host(pipeline, tensors(pipeline, degrees([0, 0, 0])))
    assert all(x.shape == (3, 64) and not x.any() for x in got.values())


@on_host
def test_no_race(tmp_path: Path) -> None:
    pipeline = staged(edge_conv(16, 64, 128, ("sum",)))
    given = tensors(pipeline, degrees(COUNTS["a hub among others"]))
    got = run_on_host(pipeline, given, HostRun(sanitize=True, folder=tmp_path))
    assert torch.equal(got["sum"], reference.run(pipeline, given)["sum"])


WRONG = {
    "a node that goes on is a result": Mutation("node_sums.cuh", "begin >= 0 && past <= ROWS", "begin >= 0"),
    "one that began before is one": Mutation("node_sums.cuh", "begin >= 0 && past <= ROWS", "past <= ROWS"),
    "both ends of a tile share a place": Mutation("node_sums.cuh", "(2 * tile - (before ? 1 : 0))", "(2 * tile)"),
    "the first tile is left out": Mutation(
        "node_sums.cuh",
        "over_tiles<How, FEATURES>(carry[span.at<FEATURES>(span.first) + col]",
        "over_tiles<How, FEATURES>(x",
    ),
    "nobody joins": Mutation(
        "node_sums.cuh", "span.hub() != (phase == 2) : phase == 2) continue;", "true : true) continue;"
    ),
    "a warp takes what another begins": Mutation("node_sums.cuh", "(int)run[1] < first) row", "false) row"),
}


WRONG_HUBS = {
    "stretches are not added up": Mutation("node_sums.cuh", "if (phase == 2) return;", "return;"),
    "one that begins in a stretch is left out": Mutation("node_sums.cuh", "there != here && other.hub()", "false"),
    "one that goes on is left out": Mutation("node_sums.cuh", "if (one.hub()) join", "if (false) join"),
}


@on_host
@pytest.mark.parametrize("what", WRONG_HUBS)
def test_what_would_be_wrong_of_hubs_is_seen(what: str, tmp_path: Path) -> None:
    pipeline = staged(edge_conv(8, 16, 40, ("sum",)))
    given = tensors(pipeline, degrees(HUBS["in the middle of a stretch"]))
    got = run_on_host(pipeline, given, HostRun(folder=tmp_path, mutations=(WRONG_HUBS[what],)))["sum"]
    want = at_nodes(by_torch(given, torch.float64), given, "sum")
    assert not float((got.double().nan_to_num(1e9) - want).norm() / want.norm()) < 4e-2


@on_host
@pytest.mark.parametrize("what", WRONG)
@pytest.mark.every(2)
def test_what_would_be_wrong_is_seen(what: str, tmp_path: Path) -> None:
    pipeline = staged(edge_conv(16, 32, 64, ("sum",)))
    given = tensors(pipeline, degrees(COUNTS["a hub among others"]))
    got = run_on_host(pipeline, given, HostRun(folder=tmp_path, mutations=(WRONG[what],)))["sum"]
    want = reference.run(pipeline, given)["sum"]
    assert not torch.equal(got.nan_to_num(1e9), want)


def test_a_turn_has_two_barriers() -> None:
    """On the host a warpgroup is one thread, so no race between its warps can be seen there."""
    text = kernel_of(staged(edge_conv(16, 32, 128, ("sum",)))).source().text
    lines = [line.strip() for line in text.splitlines()]
    at = next(k for k, line in enumerate(lines) if line.startswith("sum_to_nodes"))
    assert lines[at - 1] == lines[at + 1] == "named_sync(GROUP_BARRIER + g, 128);"


def test_text_and_bytes() -> None:
    program = edge_conv(16, 32, 64, ("max",))
    verify(program)
    assert "store(y, max, receivers, starts, combine=max)" in show(program)
    _, written = dram_of(program, 1000)
    assert written == {"max": 1000 * 64 * 2 // 10}


def test_whole_tensors_say_the_same() -> None:
    program = edge_conv(16, 32, 64, HOWS)
    given = tensors(program, degrees(COUNTS["some have none"]))
    want = reference.run(program, given)
    for name, value in run_whole(program, given).items():
        torch.testing.assert_close(value, want[name], rtol=2e-2, atol=2e-2)


def test_written_out_it_is_a_combination_over_edges_of_nodes() -> None:
    """A ragged axis, products over it, and sums that lack it: what any ragged pipeline is."""
    program = edge_conv(8, 16, 8, ("max", "sum"))
    written = plain(program)
    verify(written)
    assert written.ragged["rows"].of == "nodes" and "max.total[nodes,y.c]" in show(written)
    given = tensors(program, degrees(COUNTS["some have none"]))
    want = reference.run(program, given)
    for name, value in reference.run(written, given).items():
        torch.testing.assert_close(value, want[name], rtol=2e-2, atol=6e-2)


def test_what_no_kernel_sums_is_refused() -> None:
    split = edge_conv(64, 64, 64, ("max",))
    split = split.with_stages((split.stages[0].with_(placement=Shard(1)),))
    with pytest.raises(VerifyError, match=r"sums rows to nodes .* under Shard\(1\)"):
        verify_on(split, get("h200"))
    (stage,) = edge_conv(16, 16, 16, ("max",)).stages
    with pytest.raises(VerifyError, match="sums to nodes by mul"):
        verify(
            edge_conv(16, 16, 16, ("max",)).with_stages(
                (replace(stage, ops=(*stage.ops[:-1], replace(stage.ops[-1], combine="mul"))),)
            )
        )


def test_the_epilogue_is_predicted_to_spare_the_second_kernel() -> None:
    """1,048,576 edges of 64-64-64: what is written and read again takes as long as the sum does."""
    us = [
        min(c.predicted_us or 1e9 for c in proposals(edge_conv(64, 64, 64, hows), 1 << 20, get("h200"), Options()))
        for hows in ((), ("max",))
    ]
    assert us[1] < us[0] + 38


@pytest.mark.skipif(sass.disassembler() is None, reason="cuobjdump is not installed")
@pytest.mark.parametrize("hows", [("max",), HOWS])
def test_machine_code(hows: tuple[str, ...]) -> None:
    pipeline = staged(edge_conv(64, 128, 128, hows), replicas=132)
    (report,) = cuda.compile_only(pipeline)
    assert report.spills == 0
    assert sass.lint(report.cubin, kernel_of(pipeline).source()) == []
