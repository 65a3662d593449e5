"""The protocol of benchmarks: what counts as right, what is counted, what is written down."""

from __future__ import annotations

import io
import json
import shlex
from dataclasses import replace

import pytest
import torch
from modules import Fn
from torch import nn

from tilestream import bench
from tilestream.apps.load import Workload, load
from tilestream.bench import accuracy, arms, dram, first_call, text
from tilestream.bench.environment import command, environment
from tilestream.errors import CaptureError
from tilestream.options import Options
from tilestream.plan.analyse import analyse


@pytest.fixture(scope="module")
def small() -> Workload:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 8)).to(torch.bfloat16).eval()
    return Workload("small", net, (torch.randn(130, 48, dtype=torch.bfloat16),))


def test_eager_is_within_its_own_tolerance_and_poison_is_not(small: Workload) -> None:
    oracle = accuracy.Oracle(small.module, small.inputs)
    (eager,) = oracle.eager
    judged = oracle.judge(eager)
    assert judged.ok and 0 < judged.error == judged.eager_error < 0.02
    unwritten = eager.clone()
    unwritten[-1, -1] = float("nan")
    assert not oracle.judge(unwritten).ok
    assert not oracle.judge(eager.float()).ok  # the right numbers in another dtype
    assert not oracle.judge(eager[:-1]).ok
    assert not oracle.judge(eager + 0.1).ok


def test_oracle_of_a_model_that_does_not_run(small: Workload) -> None:
    with pytest.raises(CaptureError, match="does not run on its inputs"):
        accuracy.Oracle(small.module, (torch.randn(3, 7),))


def test_oracle_of_a_model_that_runs_in_its_own_precision_alone() -> None:
    def forward(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.dtype == torch.bfloat16 else torch.linalg.solve(torch.zeros(3, 3, dtype=x.dtype), x)

    with pytest.raises(CaptureError, match="does not run in float64"):
        accuracy.Oracle(Fn(forward), (torch.randn(3, 3).bfloat16(),))


def test_repeatable_compares_bits(small: Workload) -> None:
    assert accuracy.repeatable(lambda: small.module(*small.inputs))
    assert accuracy.repeatable(lambda: torch.full((3,), float("nan")))
    assert not accuracy.repeatable(lambda: torch.randn(8))
    zeros = iter((torch.zeros(2), -torch.zeros(2)))
    assert not accuracy.repeatable(lambda: next(zeros))


def test_without_a_gpu_the_result_has_error_plan_and_predictions(small: Workload) -> None:
    said: list[str] = []
    planned = replace(small, inputs=(torch.zeros(1, 48, dtype=torch.bfloat16).expand(20000, 48),))
    result = bench.run(small, Options(target="reference"), planned=planned, progress=said.append)
    assert result["ok"] and result["error"] <= 2 * result["eager_error"] + 0.004
    assert set(result["predictions"]) == {"h200", "a100"}
    assert result["predictions"]["h200"]["vertical"] > 0
    assert result["planned_rows"] == 20000 and result["rows"] == 130
    assert result["plan"]["regions"][0]["rows"] == 20000
    moved = result["dram_bytes"]["ir"]
    assert moved["read"] >= 20000 * 48 * 2 and moved["write"] == 20000 * 8 * 2
    assert result["environment"]["torch"] == torch.__version__
    assert any("reference machine" in line for line in said)
    json.dumps(result)
    from rich.console import Console

    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(text.render(result))
    shown = console.export_text()
    assert "dataflow: 3 of 3 operators (100%), 100% of the FLOPs" in shown and "all on Inductor: " in shown
    assert result["plan"]["coverage"]["operators"] == {"dataflow": 3, "inductor": 0, "eager": 0}


def test_predictions_are_of_the_whole_by_strategy(small: Workload) -> None:
    analysis = analyse(small.module, small.inputs, Options(device="h200"))
    found = bench.predictions(analysis, ("h200", "a100"))
    assert (
        found["h200"]["auto"] == analysis.predicted_us
        and found["h200"]["inductor"] == analysis.on_inductor.predicted_us
    )
    forced = analyse(small.module, small.inputs, Options(device="a100", strategy="spatial"))
    assert found["a100"]["spatial"] == forced.predicted_us != found["h200"]["spatial"]


NCU = """==PROF== Connected to process 7
"ID","Process ID","Process Name","Host Name","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","python","h","k0","dram__bytes_read.sum","byte","1,000"
"0","7","python","h","k0","dram__bytes_write.sum","byte","20"
"1","7","python","h","k1","dram__bytes_read.sum","byte","5"
"1","7","python","h","k1","dram__bytes_write.sum","byte","6.5"
"""


def test_counters_are_summed_over_kernels() -> None:
    assert dram.parse(NCU) == {"read": 1005.0, "write": 26.5, "kernels": 2}
    assert dram.parse("==ERROR== no permission\n") is None


def test_no_ncu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert dram.measure("tilestream", "nerf", []) == "ncu is not installed"


def test_environment_names_what_a_figure_was_made_with() -> None:
    made = environment()
    assert {"torch", "triton", "driver", "gpu", "commit", "command", "nvrtc"} <= set(made)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("/somewhere/bin/tilestream bench nerf --json /elsewhere/a.json --rows 7", "tilestream bench nerf --rows 7"),
        (
            "/a/benchmarks/run/wide_layers.py mixer --out=/elsewhere/b.json",
            "python -m benchmarks.run.wide_layers mixer",
        ),
        ("/a/src/tilestream/__main__.py explain 'my model.py:make'", "tilestream explain 'my model.py:make'"),
    ],
)
def test_a_result_names_its_command_without_where_it_went(words: str, told: str) -> None:
    assert command(shlex.split(words)) == told


@pytest.mark.gpu
def test_arms_on_the_gpu_are_timed_alike_and_checked() -> None:
    work = load("meshgraphnets", rows=4096, device="cuda")
    result = bench.run(work, Options(measure=False), arms=("eager", "inductor", "tilestream"))
    assert result["ok"], result["arms"]
    for name in ("eager", "inductor", "tilestream"):
        arm = result["arms"][name]
        assert arm["us_min"] <= arm["us"] <= arm["us_max"] and arm["ok"]
    assert result["best_alternative"] in ("eager", "inductor")


@pytest.mark.gpu
def test_a_poisoned_replay_shows_an_output_that_is_not_written() -> None:
    from tilestream.bench import timing

    out = torch.zeros(64, device="cuda")

    def half() -> torch.Tensor:
        out[:32].fill_(1.0)
        return out

    replayed = accuracy.tensors(timing.poisoned_replay(timing.captured(half)))[0]
    assert replayed[:32].eq(1).all() and replayed[32:].isnan().all()


def test_arm_names_are_those_of_the_result() -> None:
    assert arms.ARMS == ("eager", "inductor", "inductor_max_autotune", "tilestream")


def test_the_first_call_is_timed_cold_warm_and_without_us():
    made = first_call.measure("meshgraphnets", ["--rows", "64", "--target", "reference"], has_byte_code=True)
    for name in ("cold", "warm"):
        parts = made[name]
        assert isinstance(parts, dict) and {"regions", "planning", "torch"} <= set(parts)
        assert sum(parts.values()) == pytest.approx(made[f"{name}_s"])
    assert isinstance(made["capture_s"], float) and made["capture_s"] > 0


def test_the_hosts_time_by_parts():
    from tilestream.bench import host
    from tilestream.report.explain import as_text

    workload = load("classifier", 64)
    torch._dynamo.reset()
    made = host.run(workload, Options(target="reference", cache=False), lambda _: None)
    assert list(made["us"]) == ["eager", "dynamo", "aot", "inductor", "tilestream"]
    assert all(us > 0 for us in made["us"].values()) and made["us"]["dynamo"] < made["us"]["tilestream"]
    said = as_text(text.host(made))
    assert "Dynamo alone: guards, no kernel" in said and "tilestream" in said


@pytest.mark.gpu
def test_the_hosts_time_of_a_region():
    from tilestream.bench import host

    made = host.run(load("classifier", 1024, device="cuda"), Options(cache=False))
    assert len(made["regions"]) == 1 and made["regions"][0] < 40
    assert made["us"]["tilestream"] < made["us"]["inductor"]
