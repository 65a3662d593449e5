"""``reproduce kitsune``, ``sweep``, and ``simulate`` and ``trace`` of whole models, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilestream.cli.main import app

runner = CliRunner()

PUBLISHED = json.loads((Path(__file__).parent.parent / "benchmarks" / "results" / "kitsune.json").read_text())


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
    assert "data:image/png" in (tmp_path / "out" / "kitsune.html").read_text()


def test_the_same_run_twice_is_the_same_json(tmp_path) -> None:
    for name in ("a", "b"):
        where = ("--json", str(tmp_path / name), "--jobs", "1")
        assert run("reproduce", "kitsune", "--apps", "nerf", "--no-sensitivity", *where).exit_code == 0
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("a", "b"))
    assert {**first, "seconds": 0} == {**second, "seconds": 0}


def test_sweep_over_devices_and_sizes_on_two_workers(tmp_path) -> None:
    where = ("--jobs", "2", "--json", str(tmp_path / "s.json"))
    given = ("--devices", "a100,a100+kitsune", "--size", "rows=4096,65536", "--strategies", "bulk,kitsune")
    done = run("sweep", "nerf", *given, *where)
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert len(rows) == 8
    assert [r["sizes"]["rows"] for r in rows] == [4096] * 4 + [65536] * 4
    small, large = (
        next(r for r in rows if r["sizes"]["rows"] == n and r["execution"] == "bulk") for n in (4096, 65536)
    )
    assert large["time_us"] > 4 * small["time_us"]
    assert all(r["speedup"] == 1 for r in rows if r["execution"] == "bulk")
    assert "2 of 2" in done.output


@pytest.mark.parametrize("model", ["dlrm", "llama_decode"])
def test_simulate_a_whole_model_by_name(model: str, tmp_path) -> None:
    layers = ("--size", "layers=1") if model == "llama_decode" else ()
    done = run("simulate", model, "--device", "h200+kitsune", *layers, "--json", str(tmp_path / "s.json"))
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert [r["execution"] for r in rows] == ["bulk", "vertical", "kitsune"]
    assert rows[0]["dram_bytes"] >= rows[1]["dram_bytes"] >= rows[2]["dram_bytes"]


def test_simulate_a_file_in_training_and_trace_it(tmp_path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        "from torch import nn\n"
        "def make(rows=512):\n"
        "    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).bfloat16()\n"
        "    return net, (torch.randn(rows, 64).bfloat16(),)\n"
    )
    where = ("--out", str(tmp_path / "t.json"), "--json", str(tmp_path / "s.json"))
    done = run("trace", f"{path}:make", "--mode", "training", "--size", "rows=1024", *where)
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X" and e["cat"] == "launch"]
    assert {e["args"]["phase"] for e in slices} == {"forward", "backward"}
    assert len(slices) == sum(r["launches"] for r in rows)
    for pid, row in enumerate(rows, start=1):
        assert max(e["ts"] + e["dur"] for e in slices if e["pid"] == pid) == pytest.approx(row["time_us"], rel=1e-4)
    stages = [e for e in events if e.get("cat") == "stage"]
    assert stages and all(e["tid"] > 0 and "CTAs" in e["args"] for e in stages)
    assert any(key.startswith("waits for") for e in stages for key in e["args"])
    assert any(e["ph"] == "C" and e["name"] == "tensor busy, %" and e["args"]["%"] > 0 for e in events)


def test_the_report_of_a_whole_model_names_stages_and_their_waits(tmp_path) -> None:
    done = run(
        "simulate", "nerf", "--mode", "inference", "--device", "a100+kitsune", "--html", str(tmp_path / "w.html")
    )
    assert done.exit_code == 0, done.output
    text = (tmp_path / "w.html").read_text()
    assert "data:image/png;base64," in text and "http" not in text
    assert "waits, µs a CTA" in text and "queue " in text and "addmm_11" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("reproduce", "kitsune", "--apps", "resnet"), "Table 2 has no 'resnet'"),
        (("reproduce", "kitsune", "--device", "tpu"), "unknown device 'tpu'"),
        (("sweep", "nerf", "--size", "rows"), "not NAME=V1,V2"),
        (("sweep", "nerf", "--size", "rows=0"), "not NAME=V1,V2"),
        (("sweep", "nerf", "--size", "points_of_view=3", "--jobs", "1"), "no size called 'points_of_view'"),
        (("sweep", "nobody", "--jobs", "1"), "no whole model called 'nobody'"),
        (("sweep", "nerf", "--strategies", "magic"), "unknown execution 'magic'"),
        (("simulate", "dlrm", "--size", "batch=1,2"), "one value a size"),
        (("simulate", "dlrm", "--rows", "5"), "--rows is for regions"),
        (("trace", "dlrm", "--queue-depth", "4"), "--queue-depth is for regions"),
        (("simulate", "nerf", "--html", "x.html"), "--html is for whole models"),
        (("simulate", "nerf", "--mode", "dreaming"), "unknown mode 'dreaming'"),
        (("simulate", "dlrm", "--device", "a100+sms*0"), "sms"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, said: str) -> None:
    done = run(*words)
    assert done.exit_code == 2
    assert said in done.output and "Remedy" in done.output and "Traceback" not in done.output
