"""The sparse commands: files in, figures out, pages and timelines, and one line for an error."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import scipy.sparse
from typer.testing import CliRunner

from tilestream.cli.sparse import app
from tilestream.sparse import Schedule, kernels, load
from tilestream.sparse.memory import NO_MEMORY, SIMPLE_HBM
from tilestream.sparse.storage import Format

runner = CliRunner()
PRODUCT = "ik,kj->ij"


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = []
    for seed, name in enumerate("BCD", 1):
        path = tmp_path / f"{name}.mtx"
        scipy.io.mmwrite(path, scipy.sparse.coo_matrix(kernels.hashed(50, 20, seed)))
        paths.append(str(path))
    return paths


def call(*args: str, code: int = 0) -> str:
    result = runner.invoke(app, list(args))
    assert result.exit_code == code, result.output
    return result.output + (result.stderr if code else "")


@pytest.mark.smoke
def test_simulate_as_the_manual_has_it(files: list[str], tmp_path: Path) -> None:
    result, out = tmp_path / "out.json", tmp_path / "X.mtx"
    formats = ["--format", "compressed,compressed"] * 2
    where = ["--out", str(out), "--json", str(result)]
    call("simulate", PRODUCT, *files[:2], *formats, "--order", "i,k,j", "--parallel", "i=2", "--depth", "4096", *where)
    read = json.loads(result.read_text())
    assert {"cycles", "flops", "bytes", "nodes", "schedule", "regions"} <= set(read)
    assert read["flops"] == 2 * 298 and "'i': 2" in read["schedule"]
    assert any(n["kind"] == "fork" for n in read["nodes"])
    want = kernels.hashed(50, 20, 1) @ kernels.hashed(50, 20, 2)
    assert np.array_equal(scipy.io.mmread(out).toarray(), want)


def test_the_reference_cycles_from_a_shell(files: list[str], tmp_path: Path) -> None:
    for engine in ("fast", "spec"):
        path = tmp_path / f"{engine}.json"
        call("simulate", PRODUCT, *files[:2], "--order", "i,k,j", "--engine", engine, "--json", str(path))
        assert abs(json.loads(path.read_text())["cycles"] / 2145 - 1) < 0.005


def test_sams_timing_from_a_shell(files: list[str], tmp_path: Path) -> None:
    found = {}
    for name in ("comal", "sam"):
        path = tmp_path / f"{name}.json"
        formats = ["--format", "compressed,compressed:1,0", "--format", "compressed,compressed"]
        order = ["--order", "k,i,j", "--timing", name]
        call("simulate", PRODUCT, *files[:2], *formats, *order, "--json", str(path))
        found[name] = json.loads(path.read_text())["cycles"]
    assert found["comal"] - found["sam"] == 42
    assert "use comal or sam" in call("simulate", PRODUCT, *files[:2], "--timing", "dam", code=2)


@pytest.mark.parametrize("sparse", [True, False])
def test_a_matrix_of_one_column_is_a_vector(files: list[str], tmp_path: Path, sparse: bool) -> None:
    vector = kernels.hashed(50, 20, 4)[:, :1]
    scipy.io.mmwrite(tmp_path / "v.mtx", scipy.sparse.coo_matrix(vector) if sparse else vector)
    call("run", "ij,j->i", files[0], str(tmp_path / "v.mtx"), "--out", str(tmp_path / "y.mtx"))
    want = kernels.hashed(50, 20, 1) @ vector[:, 0]
    assert np.array_equal(scipy.io.mmread(tmp_path / "y.mtx").toarray()[0], want)


def test_a_chain_is_faster_fused(files: list[str], tmp_path: Path) -> None:
    cycles = {}
    for fuse in ("none", "all"):
        path = tmp_path / f"{fuse}.json"
        call("run", "ik,kj,jl->il", *files, "--fuse", fuse, "--json", str(path))
        read = json.loads(path.read_text())
        assert read["ok"] and read["error"] < 1e-12
        cycles[fuse] = read["cycles"]
    assert cycles["all"] < cycles["none"]


def test_shallow_channels_stall_or_deadlock(files: list[str]) -> None:
    said = call("simulate", PRODUCT, *files[:2], "--order", "i,k,j", "--depth", "1", code=2)
    assert said.startswith("error: ") or "deadlock" in said.lower() or "error: " in said


def test_page_and_timeline(files: list[str], tmp_path: Path) -> None:
    page, timeline = tmp_path / "page.html", tmp_path / "timeline.json"
    call("simulate", PRODUCT, *files[:2], "--table", "--html", str(page), "--timeline", str(timeline))
    text = page.read_text()
    assert "<svg" in text and "tokens" in text and "http" not in text.replace("http://www.w3.org/2000/svg", "")
    events = json.loads(timeline.read_text())["traceEvents"]
    assert {"X", "M"} <= {e["ph"] for e in events}
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in events if e["ph"] == "X")


def test_a_module_from_a_file(tmp_path: Path) -> None:
    source = tmp_path / "model.py"
    source.write_text(
        "import torch\n"
        "from tilestream.apps.sparse import GCN\n"
        "from tilestream.sparse import graphs\n"
        "def make():\n"
        "    return GCN(6, 4, 3), (graphs.karate().torch(), torch.rand(34, 6, dtype=torch.float64))\n"
    )
    path = tmp_path / "out.json"
    formats = ["--format", "weight1=compressed,compressed", "--format", "weight2=compressed,compressed"]
    call("run", f"{source}:make", *formats, "--fuse", "all", "--json", str(path))
    assert json.loads(path.read_text())["ok"]


def test_search_prints_code(files: list[str], tmp_path: Path) -> None:
    path, plot = tmp_path / "found.json", tmp_path / "found.svg"
    options = ["--budget", "20", "--orders", "2", "--factors", "2", "--json", str(path), "--plot", str(plot)]
    options += ["--bounded", "--depth", "512"]
    said = call("search", "ik,kj,jl->il", *files, *options)
    read = json.loads(path.read_text())
    assert "best schedule:\nSchedule(" in said
    assert isinstance(eval(read["best"], {"Schedule": Schedule}), Schedule)
    assert plot.read_text().startswith("<svg")


def test_reproduce_lists_and_runs(tmp_path: Path) -> None:
    assert "gcn" in call("reproduce", "--list")
    call("reproduce", "sddmm", "--out", str(tmp_path), "--json", str(tmp_path / "all.json"))
    study = json.loads((tmp_path / "sddmm.json").read_text())
    assert all(row["exact"] for row in study["rows"]) and len(study["rows"]) == 9
    assert json.loads((tmp_path / "all.json").read_text())["studies"] == [study]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["simulate", PRODUCT, "gone.mtx", "gone.mtx"], "no file"),
        (["simulate", PRODUCT, "one.mtx"], "takes 2 operands"),
        (["simulate", PRODUCT, "a.mtx", "b.mtx", "--format", "compressed,compressed"], "--format once an operand"),
        (["simulate", PRODUCT, "a.mtx", "b.mtx", "--parallel", "i"], "INDEX=FACTOR"),
        (["simulate", PRODUCT, "a.mtx", "b.mtx", "--parallel", "i=0"], "INDEX=FACTOR"),
        (["simulate", PRODUCT, "a.mtx", "b.mtx", "--order", "i,,j"], "--order"),
        (["simulate", PRODUCT, "a.mtx", "b.mtx", "--engine", "best"], "fast or spec"),
        (["simulate", PRODUCT, "a.mtx", "b.mtx", "--depth", "0"], "--depth"),
        (["simulate", PRODUCT, "a.mtx", "b.mtx", "--memory", "slow"], "none, simple"),
        (["simulate", PRODUCT, "a.mtx", "b.mtx", "--memory", "hbm:banks=8"], "settings of hbm are channels"),
        (["simulate", "ik,kj", "a.mtx", "b.mtx"], "says no result"),
        (["simulate", "gone.py:make", "a.mtx"], "operands of an einsum"),
        (["simulate", "gone.py:make"], "gone.py"),
        (["reproduce", "everything"], "no study 'everything'"),
    ],
)
def test_errors_are_one_line(args: list[str], says: str) -> None:
    said = call(*args, code=2)
    assert says in said and "Traceback" not in said


def test_an_index_that_the_program_lacks(files: list[str]) -> None:
    said = call("search", "ik,kj,jl->il", *files, "--indices", "i,z", code=2)
    assert "no index 'z'" in said and "the program has i" in said


def test_a_file_that_is_no_matrix(tmp_path: Path) -> None:
    path = tmp_path / "x.mtx"
    path.write_text("hello\n")
    assert "no Matrix Market file" in call("simulate", PRODUCT, str(path), str(path), code=2)


def test_options_are_read_as_written() -> None:
    assert load.parse_format("compressed,dense") == Format(("compressed", "dense"))
    assert load.parse_format("compressed,compressed:1,0") == Format(("compressed", "compressed"), (1, 0))
    wanted = Schedule(fuse=(("T0", "T1"), ("T2",)), order=("i", "k"), parallel={"i": 2}, block=4)
    assert load.parse_schedule("T0,T1/T2", "i, k", ["i=2"], 4) == wanted
    assert load.parse_schedule("all", "3", [], 1).order == 3
    assert load.parse_memory("none") == NO_MEMORY and load.parse_memory("simple") == SIMPLE_HBM
