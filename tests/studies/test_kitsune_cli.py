"""``reproduce kitsune`` and ``sweep`` from the command line."""

from __future__ import annotations

import json

import pytest
from places import BENCHMARKS
from typer.testing import CliRunner

from tilestream.cli.main import app

runner = CliRunner()

PUBLISHED = json.loads((BENCHMARKS / "results" / "kitsune.json").read_text())


def run(*words: str):
    return runner.invoke(app, list(words), catch_exceptions=False)


def test_reproduce_two_rows_of_table_2(tmp_path) -> None:
    where = ("--json", str(tmp_path / "k.json"), "--out", str(tmp_path / "out"), "--jobs", "1")
    done = run("reproduce", "kitsune", "--apps", "nerf,dlrm", "--modes", "inference", "--no-sensitivity", *where)
    assert done.exit_code == 0, done.output
    assert "NERF inf" in done.output and "98.58" in done.output
    rows = {r["app"]: r for r in json.loads((tmp_path / "k.json").read_text())["rows"]}
    nerf, dlrm = rows["nerf"], rows["dlrm"]
    for name in ("operators", "fused_vertical", "fused_kitsune"):
        assert nerf[name] == nerf["paper"][name] and dlrm[name] == dlrm["paper"][name]
    for row in (nerf, dlrm):
        for name in ("traffic_vertical", "traffic_kitsune"):
            assert abs(row[name] - row["paper"][name]) <= 5, (row["app"], name)
        assert row["mode"] == "inference" and row["speedup"] > 1
        published = next(r for r in PUBLISHED["rows"] if (r["app"], r["mode"]) == (row["app"], row["mode"]))
        assert row["speedup"] == pytest.approx(published["speedup"], rel=1e-3), "run reproduce and kitsune_tables.py"
    assert "65,536 points" in done.output  # NeRF's batch was chosen by the row: the other one stands beside it
    assert [other["what"] for other in dlrm["others"]] == [] and nerf["others"][0]["speedup"] > nerf["speedup"]
    assert "data:image/png" in (tmp_path / "out" / "kitsune.html").read_text()


def test_the_same_run_twice_is_the_same_json(tmp_path) -> None:
    for name in ("a", "b"):
        where = ("--json", str(tmp_path / name), "--jobs", "1")
        assert run("reproduce", "kitsune", "--apps", "nerf", "--no-sensitivity", *where).exit_code == 0
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("a", "b"))
    assert {**first, "seconds": 0} == {**second, "seconds": 0}


def test_sweep_over_devices_and_sizes_on_two_workers(tmp_path) -> None:
    where = ("--jobs", "2", "--json", str(tmp_path / "s.json"))
    given = ("--devices", "a100,a100+kitsune", "--size", "rows=4096,65536", "--strategies", "paper:bulk,paper:kitsune")
    done = run("sweep", "nerf", *given, *where)
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert len(rows) == 8
    assert [r["sizes"]["rows"] for r in rows] == [4096] * 4 + [65536] * 4
    small, large = (
        next(r for r in rows if r["sizes"]["rows"] == n and r["strategy"] == "paper:bulk") for n in (4096, 65536)
    )
    assert large["time_us"] > 4 * small["time_us"]
    assert all(r["speedup"] == 1 for r in rows if r["strategy"] == "paper:bulk")
    assert "2 of 2" in done.output


def test_the_compilers_plans_in_a_sweep_are_those_of_simulate(tmp_path) -> None:
    """ "vertical" was 487 us in a sweep, which was a paper's design of that name, where ``simulate`` said 124."""
    size, names = ("--size", "rows=4096"), "auto,vertical,spatial,shared,bulk,inductor,paper:vertical"
    for words in (
        ("sweep", "nerf", *size, "--devices", "h200", "--strategies", names, "--jobs", "1"),
        ("simulate", "nerf", *size, "--device", "h200"),
    ):
        done = run(*words, "--json", str(tmp_path / words[0]))
        assert done.exit_code == 0, done.output
    rows = {r["strategy"]: r for r in json.loads((tmp_path / "sweep").read_text())["rows"]}
    shown = json.loads((tmp_path / "simulate").read_text())["predictions"]
    assert {name: r["time_us"] for name, r in rows.items() if name in shown} == pytest.approx(shown, rel=1e-12)
    assert rows["shared"]["time_us"] is None and "shared" not in shown
    assert rows["inductor"]["speedup"] == 1 and rows["paper:vertical"]["speedup"] is None
    assert rows["paper:vertical"]["time_us"] != rows["vertical"]["time_us"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("reproduce", "kitsune", "--apps", "resnet"), "Table 2 has no 'resnet'"),
        (("reproduce", "kitsune", "--device", "tpu"), "unknown device 'tpu'"),
        (("sweep", "nerf", "--size", "rows"), "not NAME=V1,V2"),
        (("sweep", "nerf", "--size", "rows=0"), "not NAME=V1,V2"),
        (("sweep", "nerf", "--size", "points_of_view=3", "--jobs", "1"), "no size called 'points_of_view'"),
        (("sweep", "nobody", "--jobs", "1"), "no whole model called 'nobody'"),
        (("sweep", "nerf", "--strategies", "magic"), "unknown strategy 'magic'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, said: str) -> None:
    done = run(*words)
    assert done.exit_code == 2
    assert said in done.output and "Remedy" in done.output and "Traceback" not in done.output
