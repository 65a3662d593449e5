"""The commands: output, JSON, exit codes, and one-line errors with a remedy."""

from __future__ import annotations

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from tilestream.cli import app
from tilestream.cuda.compile import compiler_version

runner = CliRunner()


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()  # a command is a process of its own


MODEL = """
import torch
from torch import nn
def make(rows=100):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 5)).to(torch.bfloat16)
    return net, (torch.randn(rows, 24, dtype=torch.bfloat16),)
def sorts():
    class Sorts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(24, 40)
        def forward(self, x):
            return torch.sort(torch.relu(self.linear(x)), dim=0).values
    return Sorts().to(torch.bfloat16), (torch.randn(100, 24, dtype=torch.bfloat16),)
def mismatched():
    return nn.Linear(24, 40), (torch.randn(100, 23),)
"""


@pytest.fixture
def model(tmp_path) -> str:
    path = tmp_path / "my.py"
    path.write_text(MODEL)
    return f"{path}:make"


def run(*words: str):
    return runner.invoke(app, list(words), catch_exceptions=False)


@pytest.mark.smoke
def test_explain_a_file_and_write_json(model: str, tmp_path) -> None:
    done = run("explain", model, "--rows", "300", "--device", "h200", "--json", str(tmp_path / "e.json"))
    assert done.exit_code == 0
    said = " ".join(done.output.split())  # the folder's name decides where lines are broken
    assert "dataflow: 3 of 3 operators (100%), 100% of the FLOPs in 1 region" in said and "300 rows" in said
    made = json.loads((tmp_path / "e.json").read_text())
    assert made["regions"][0]["rows"] == 300 and made["device"] == "h200"


def test_explain_gives_the_reason_and_line_of_what_stays_out(model: str) -> None:
    done = run("explain", model.replace(":make", ":sorts"), "--device", "h200")
    assert done.exit_code == 0
    assert "sort" in done.output and "my.py:14 in forward" in done.output


def test_explain_a_named_model_plans_for_all_its_rows(tmp_path) -> None:
    done = run("explain", "nerf", "--device", "h200", "--html", str(tmp_path / "r.html"))
    assert done.exit_code == 0
    assert "262,144 rows" in done.output and "319>256" in done.output
    assert "319→256" in (tmp_path / "r.html").read_text()


def test_a_forced_strategy_is_the_one_chosen(model: str, tmp_path) -> None:
    path = tmp_path / "e.json"
    run("explain", model, "--strategy", "spatial", "--queue-depth", "512", "--device", "h200", "--json", str(path))
    chosen = json.loads(path.read_text())["regions"][0]["chosen"]
    assert chosen["strategy"] == "spatial"
    assert {q["depth"] for q in chosen["pipeline"]["launches"][0]["queues"]} == {512}


@pytest.mark.smoke
def test_simulate_and_trace(model: str, tmp_path) -> None:
    done = run("simulate", model, "--rows", "5000", "--json", str(tmp_path / "s.json"))
    assert done.exit_code == 0
    runs = json.loads((tmp_path / "s.json").read_text())["runs"]
    assert {"vertical", "bulk"} <= {r["strategy"] for r in runs}
    assert all(r["simulated_us"] > 0 and r["bytes"]["dram"] > 0 for r in runs)
    done = run("trace", model, "--out", str(tmp_path / "t.json"))
    assert done.exit_code == 0
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


@pytest.mark.smoke
def test_check_is_0_within_the_tolerance(model: str, tmp_path) -> None:
    done = run("check", model, "--target", "reference", "--json", str(tmp_path / "c.json"))
    assert done.exit_code == 0, done.output
    made = json.loads((tmp_path / "c.json").read_text())
    assert set(made["regions"].values()) == {"vertical"}
    assert made["ok"] and made["repeatable"] and 0 < made["error"]


def test_check_says_where_a_region_went_to_inductor(model: str) -> None:
    done = run("check", model, "--strategy", "spatial", "--queue-depth", "2", "--target", "reference")
    assert done.exit_code == 0 and "region0: inductor" in done.output


def test_check_is_1_where_a_result_is_wrong(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilestream.bench import accuracy, arms

    plain = arms.compiled

    def off_by_a_little(module, options):
        return lambda *inputs: accuracy.tensors(plain(module, options)(*inputs))[0] * 1.05

    monkeypatch.setattr(arms, "compiled", off_by_a_little)
    done = run("check", model, "--target", "reference")
    assert done.exit_code == 1 and "OUTSIDE" in done.output


def test_bench_on_the_reference_machine(model: str, tmp_path) -> None:
    done = run("bench", model, "--target", "reference", "--json", str(tmp_path / "b.json"))
    assert done.exit_code == 0, done.output
    made = json.loads((tmp_path / "b.json").read_text())
    assert made["arms"]["tilestream"]["error"] == made["error"]
    assert made["plan"]["regions"] and made["predictions"]["a100"] is not None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("explain", "nothing.py:make"), "there is no file"),
        (("explain", "{file}:mak"), "it has: make"),
        (("check", "{file}:mismatched"), "does not run on its inputs"),
        (("explain", "{file}:mismatched"), "could not be captured"),
        (("simulate", "nerf", "--device", "h2000"), "h200"),
        (("explain", "nerf", "--strategy", "spacial"), "did you mean 'spatial'"),
        (("explain", "nerf", "--strategy", "vertical", "--queue-depth", "4"), "contradicts"),
        (("bench", "nerf", "--arms", "eager,fast"), "use some of eager"),
        (("check", "nerf", "--rows", "-1"), "--rows is -1"),
        (("explain", "{file}:make", "--json", "/proc/no/such/place.json"), "error:"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(model: str, words: tuple[str, ...], says: str) -> None:
    done = run(*(w.replace("{file}", model.removesuffix(":make")) for w in words))
    assert done.exit_code == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and says in errors[0]
    assert "Traceback" not in done.output


def test_kernels_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in ("check", "bench"):
        done = run(command, "chain", "--rows", "8", "--target", "cuda")
        assert done.exit_code == 2 and "no GPU" in done.stderr and "--target reference" in done.stderr
    done = run("bench", "queues")
    assert done.exit_code == 2 and "run this on an H100 or H200" in done.stderr


def test_debug_shows_the_exception() -> None:
    from tilestream.errors import CaptureError

    with pytest.raises(CaptureError):
        run("explain", "nothing.py:make", "--debug")


def test_help_names_every_command() -> None:
    done = run("--help")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.output)
    assert all(word in plain for word in ("demo", "explain", "simulate", "trace", "check", "bench"))


def test_demo_writes_its_files_and_passes(tmp_path) -> None:
    done = run("demo", "--out", str(tmp_path / "d"), "--json", str(tmp_path / "d.json"))
    assert done.exit_code == 0, done.output
    made = json.loads((tmp_path / "d.json").read_text())
    assert made["ok"] and len(made["checks"]) == 3
    if compiler_version() == "none":
        assert "NVRTC" in made["kernels"]
    else:
        assert made["kernels"] and all(k["spilled bytes"] == "0" for k in made["kernels"])
    assert (tmp_path / "d" / "report.html").stat().st_size > 20_000
    assert json.loads((tmp_path / "d" / "timeline.json").read_text())["traceEvents"]
    for rows in ("262144", "16384"):
        for device in ("h200", "a100"):
            assert set(made["predictions"][rows][device]) >= {"bulk", "vertical", "spatial"}
