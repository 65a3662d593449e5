"""Rows through an index that the lanes load that compute with them: values, bad indices, races, machine code."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import sass
from gathers import everywhere, message, tensors, with_index
from programs import Program

from tilestream import cuda, reference
from tilestream.cuda.host.build import HostRace, HostRun, Mutation, run_on_host
from tilestream.devices import get
from tilestream.errors import InputError, VerifyError
from tilestream.ir.pipeline import Pipeline, Residency, Shard
from tilestream.kernels.families import kernel_of
from tilestream.kernels.fits import verify_on
from tilestream.options import Options
from tilestream.plan.passes.forms import load_directly
from tilestream.plan.planner import proposals

on_host = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def edge_conv(features: int, hidden: int, out: int, dtype: str = "bf16") -> Pipeline:
    """The network of an edge of EdgeConv: of a node's row, and what a neighbour's has more."""
    p = Program(f"edge_conv{features}", dtype)
    own, other = p.gather("v", "receivers", features), p.gather("v", "senders", features)
    h = p.linear(p.cat(own, p.op("sub", features, other, own)), hidden, "relu")
    p.store(p.linear(h, out))
    return p.build()


def direct(program: Pipeline, replicas: int = 2, residency: Residency = Residency.RESIDENT) -> Pipeline:
    made = load_directly(program)
    return made.with_stages((made.stages[0].with_(replicas=replicas, residency=residency),))


CASES = {
    "edge conv": lambda: direct(edge_conv(64, 64, 128)),
    "narrow": lambda: direct(edge_conv(16, 64, 64), residency=Residency.STREAMED),
    "odd blocks": lambda: direct(edge_conv(8, 24, 40)),
    "f16": lambda: direct(edge_conv(32, 64, 24, "f16")),
    "beside rows in order": lambda: direct(message(64, 2)),
    "int32": lambda: with_index(direct(edge_conv(24, 64, 64)), "i32"),
}


@on_host
@pytest.mark.parametrize("rows", (1, 64, 400))
@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(3)
def test_values(name: str, rows: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    pipeline = CASES[name]()
    given = tensors(pipeline, rows)
    got, want = run_on_host(pipeline, given), reference.run(pipeline, given)
    for result, exact in want.items():
        error = (got[result].double() - exact.double()).norm() / exact.double().norm()
        assert float(error) < 4e-3


@on_host
def test_an_index_outside_of_the_table_is_said() -> None:
    pipeline = direct(edge_conv(16, 32, 32))
    given = tensors(pipeline, 200)
    given["senders"][150] = 37
    with pytest.raises(InputError, match=r"'senders' is 37 at row 150, and table 'v' has 37 rows"):
        run_on_host(pipeline, given)


@on_host
def test_each_tile_has_rows_of_its_own(tmp_path: Path) -> None:
    """A tile that goes on with the rows of the one before makes what is not its own."""
    pipeline = direct(edge_conv(16, 32, 32), replicas=1)
    given = tensors(pipeline, 400)
    line = _first_find(pipeline)
    wrong = Mutation("kernel", line, line.replace("tile + u.stride * S::TILES", "tile"))
    late = run_on_host(pipeline, given, HostRun(folder=tmp_path, mutations=(wrong,)))
    want = reference.run(pipeline, given)
    assert any((late[n].double() - x.double()).norm() > 0.1 * x.double().norm() for n, x in want.items())


def _first_find(pipeline: Pipeline) -> str:
    """The line that finds which rows the next tile takes by the first index."""
    lines = [line.strip() for line in kernel_of(pipeline).source().text.splitlines() if "tile + u.stride" in line]
    assert len(lines) == 2
    return lines[0]


@on_host
def test_no_race(tmp_path: Path) -> None:
    pipeline = direct(edge_conv(64, 64, 64), residency=Residency.STREAMED)
    given = tensors(pipeline, 400)
    try:
        run_on_host(pipeline, given, HostRun(sanitize=True, folder=tmp_path, launches=2))
    except HostRace as race:  # pragma: no cover
        pytest.fail(str(race))


def test_what_cannot_be_loaded_so_is_refused() -> None:
    split = load_directly(edge_conv(64, 64, 64))
    split = split.with_stages((split.stages[0].with_(placement=Shard(1)),))
    with pytest.raises(VerifyError, match=r"under Shard\(1\)"):
        verify_on(split, get("h200"))
    with pytest.raises(VerifyError, match="rows of f32"):
        verify_on(direct(everywhere()), get("h200"))
    with pytest.raises(VerifyError, match="no rows come through an index"):
        load_directly(_in_order())


def _in_order() -> Pipeline:
    p = Program("in order")
    p.store(p.linear(p.load("x", 64), 64))
    return p.build()


def test_it_is_a_candidate_that_is_predicted_faster() -> None:
    """1,048,576 edges: three chunks a tile by a loader's warp take 305 us."""
    found = proposals(edge_conv(64, 64, 64), 1 << 20, get("h200"), Options())
    us = {c.name: c.predicted_us for c in found if c.predicted_us}
    assert us["vertical (rows loaded directly)"] < 0.6 * us["vertical"]


@pytest.mark.skipif(sass.disassembler() is None, reason="cuobjdump is not installed")
@pytest.mark.parametrize("residency", (Residency.RESIDENT, Residency.STREAMED))
def test_machine_code(residency: Residency) -> None:
    """No spills, and no chunk of an input."""
    pipeline = direct(edge_conv(64, 128, 128), 132, residency)
    (report,) = cuda.compile_only(pipeline)
    assert report.spills == 0
    assert sass.lint(report.cubin, kernel_of(pipeline).source()) == []
