"""The commands: output, JSON, exit codes, and one-line errors with a remedy."""

from __future__ import annotations

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from tilestream import devices
from tilestream.cli.main import app
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
def missing():
    raise FileNotFoundError("no weights here")
class Takes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(24, 40).bfloat16()
    def forward(self, batch, scale=1, kind="relu"):
        return getattr(torch, kind)(self.linear(batch["x"])) * scale
def nested():
    return Takes(), ({"x": torch.randn(100, 24).bfloat16()}, 2, "tanh")
def keywords():
    return Takes(), {"batch": {"x": torch.randn(100, 24).bfloat16()}, "kind": "tanh", "scale": 2}
def both():
    return Takes(), (({"x": torch.randn(100, 24).bfloat16()},), {"kind": "tanh", "scale": 2})
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(24, 40).bfloat16()
    def forward(self, x):
        x = self.linear(x)
        return x * 2 if x.sum() > 0 else x
def branches():
    return Branches(), torch.randn(100, 24).bfloat16()
def images():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 14 * 14, 8))
    return net.bfloat16().eval(), torch.randn(2, 3, 16, 16).bfloat16()
def drops():
    return nn.Sequential(nn.Linear(24, 40), nn.Dropout(0.5)).bfloat16(), torch.randn(100, 24).bfloat16()
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(24, 8, batch_first=True)
    def forward(self, x):
        return self.lstm(x)[0]
def recurrent():
    return Recurrent(), torch.randn(3, 5, 24)
def float32(rows=65536):
    return nn.Sequential(nn.Linear(136, 256), nn.ReLU(), nn.Linear(256, 8)), torch.randn(rows, 136)
def noise():
    return nn.Linear(24, 40).bfloat16(), torch.randn(4, 24).bfloat16()
def holes():
    net, (x,) = make()
    x[:25] = torch.nan
    return net, (x,)
def nothing():
    net, (x,) = make()
    return net, (x * torch.nan,)
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
    assert all(r["predicted_us"] > 0 and r["bytes"]["dram"] > 0 for r in runs)
    done = run("trace", model, "--out", str(tmp_path / "t.json"))
    assert done.exit_code == 0
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_trace_measured_needs_a_gpu_and_a_region(model: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = run("trace", model, "--measured", "--out", str(tmp_path / "t.json"))
    assert done.exit_code == 2 and not (tmp_path / "t.json").exists()
    assert "no CUDA GPU is visible" in done.output and "run it on an H100 or H200" in done.output
    monkeypatch.setattr("tilestream.cuda.available", lambda: "")
    monkeypatch.setattr("tilestream.devices.detect", lambda: devices.get("h200"))
    done = run("trace", model, "--measured", "--device", "a100")
    assert done.exit_code == 2 and "leave --device out" in done.output


@pytest.mark.smoke
def test_check_is_0_within_the_tolerance(model: str, tmp_path) -> None:
    done = run("check", model, "--target", "reference", "--json", str(tmp_path / "c.json"))
    assert done.exit_code == 0, done.output
    made = json.loads((tmp_path / "c.json").read_text())
    assert set(made["regions"].values()) == {"shared"}
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
        (("explain", "{file}:missing"), "raised FileNotFoundError: no weights here at my.py:19. Remedy: mend it"),
        (("explain", "{file}:make", "--mode", "trainning"), "use inference or training"),
        (("simulate", "nerf", "--strategy", "kitsune"), "strategy"),
        (("simulate", "dlrm", "--size", "batch=1,2"), "one value"),
        (("trace", "dlrm", "--size", "bach=1"), "did you mean 'batch'"),
        (("explain", "chain", "--size", "width=8"), "it takes --rows only"),
        (("explain", "{file}:make", "--size", "width=8"), "a file takes --rows only"),
        (("explain", "llama_prefil"), "did you mean 'llama_prefill'"),
        (("check", "{file}:drops"), "train mode, and its nn.Dropout drops at random. Remedy: return module.eval()"),
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


def test_version() -> None:
    import tilestream

    assert run("--version").output.strip() == f"tilestream {tilestream.__version__}"


def test_help_needs_no_torch() -> None:
    code = "import sys, tilestream.cli; sys.exit(bool({'torch', 'numba'} & set(sys.modules)))"
    import subprocess
    import sys
    from pathlib import Path

    import tilestream

    source = str(Path(tilestream.__file__).parents[1])
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": source}).returncode == 0


@pytest.mark.parametrize("function", ["nested", "keywords", "both"])
def test_inputs_may_be_nested_named_and_no_tensors(model: str, function: str, tmp_path) -> None:
    target = model.replace(":make", f":{function}")
    done = run("check", target, "--target", "reference", "--json", str(tmp_path / "c.json"))
    assert done.exit_code == 0, done.output
    made = json.loads((tmp_path / "c.json").read_text())
    assert made["coverage"]["operators"] == {"dataflow": 3, "inductor": 0, "eager": 0} and made["rows"] == 100
    run("explain", target, "--device", "h200", "--json", str(tmp_path / "e.json"))
    (region,) = json.loads((tmp_path / "e.json").read_text())["regions"]
    assert "aten.tanh.default" in region["operators"] and "aten.mul.Tensor" in region["operators"]


def test_a_hundred_million_rows_take_no_memory(model: str) -> None:
    done = run("explain", model, "--rows", "1000000000000", "--device", "h200")
    assert done.exit_code == 0 and "1,000,000,000,000 rows" in done.output


def test_no_rows_have_no_prediction() -> None:
    done = run("explain", "nerf", "--rows", "0", "--device", "h200")
    assert "no rows: nothing is launched, and nothing predicted" in done.output


def test_a_model_that_branches_on_values_gets_real_ones(model: str) -> None:
    said = " ".join(run("explain", model.replace(":make", ":branches"), "--device", "h200").output.split())
    assert "the model was run to capture it: what it does depends on values at my.py:" in said
    assert "graph break: a branch on a tensor's value at my.py:" in said


def test_training_is_captured_forward_and_backward(model: str, tmp_path) -> None:
    run("explain", model, "--mode", "training", "--device", "h200", "--json", str(tmp_path / "e.json"))
    made = json.loads((tmp_path / "e.json").read_text())
    assert [g["kind"] for g in made["graphs"]] == ["forward", "backward"] and made["mode"] == "train"
    done = run("explain", "chain", "--rows", "64", "--mode", "training", "--device", "h200")
    assert "2 graphs (forward, backward), train mode" in done.output


def test_the_kernel_is_printed_and_written(model: str, tmp_path) -> None:
    where = tmp_path / "kernel.cu"
    done = run("explain", model, "--rows", "65536", "--device", "h200", "--kernel", "--kernel-file", str(where))
    assert "TS_KERNEL" in done.output and "step 0: linear 24>40 + gelu" in done.output
    assert where.read_text().startswith("// region0, vertical")


def test_float32_says_what_to_write_in_explain_and_simulate(model: str) -> None:
    for command in ("explain", "simulate"):
        said = run(command, model.replace(":make", ":float32"), "--device", "h200").output
        assert 'tf32: write torch.set_float32_matmul_precision("high")' in said and "model.bfloat16()" in said
    assert "No pipeline to simulate." in said


def test_the_prediction_has_a_name_and_an_error(model: str) -> None:
    for command in ("explain", "simulate"):
        said = " ".join(run(command, model, "--rows", "65536", "--device", "h200").output.split())
        assert "simulator, 18% mean error on an H200, over kernels of all kinds" in said
        assert "predicted us" in said and "cost model" not in said


def test_check_says_what_it_cannot_compare(model: str, tmp_path) -> None:
    done = run("check", model.replace(":make", ":holes"), "--target", "reference", "--json", str(tmp_path / "c.json"))
    assert done.exit_code == 0 and "25.00% of the result is NaN or infinite" in done.output
    assert json.loads((tmp_path / "c.json").read_text())["not_finite"] == 0.25
    done = run("check", model.replace(":make", ":nothing"), "--target", "reference")
    assert done.exit_code == 2 and "there is nothing to compare" in " ".join(done.output.split())


def test_check_and_explain_agree_on_rows(model: str) -> None:
    target = model.replace(":make", ":images")
    checked = run("check", target, "--target", "reference").output
    assert "inputs 2x3x16x16 on the reference machine" in checked and re.search(r"region0: \w+, 2 rows", checked)
    assert "planned for 2 rows" in run("explain", target, "--device", "h200").output


def test_check_of_a_model_that_runs_eagerly(model: str) -> None:
    done = run("check", model.replace(":make", ":recurrent"), "--target", "reference")
    assert done.exit_code == 0 and "no graph: the model ran eagerly" in done.output and "Inductor: none" in done.output


def test_check_is_seeded(model: str) -> None:
    target = model.replace(":make", ":noise")
    errors = []
    for seed in ("1", "1", "2"):
        torch._dynamo.reset()
        said = run("check", target, "--target", "reference", "--seed", seed).output
        errors.append(re.search(r"error (\S+),", said))
    first, same, other = (e[1] if e else "" for e in errors)
    assert first == same != other


def test_a_bad_device_is_told_before_the_model_is_loaded(tmp_path) -> None:
    path = tmp_path / "loads.py"
    path.write_text("def make():\n    open('loaded', 'w').close()\n")
    done = run("explain", f"{path}:make", "--device", "h2000")
    assert done.exit_code == 2 and "unknown device" in done.stderr and "loading" not in done.stderr


def test_a_json_file_that_cannot_be_written_is_told_before_the_work(model: str, tmp_path) -> None:
    for path in ("/dev/full", "/proc/no/such/place.json"):
        done = run("explain", model, "--json", path)
        assert done.exit_code == 2 and "loading" not in done.stderr
    where = tmp_path / "left.json"
    assert run("explain", "nothing.py:make", "--json", str(where)).exit_code == 2 and not where.exists()


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
