"""What benchmarks count: ranges of Nsight Compute's CSV, sums in fp16, bytes of a plan's launches, joined results."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from places import BENCHMARKS

from tilestream.options import Options
from tilestream.plan.analyse import analyse

CSV = """==PROF== Connected to process 7
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","at::cuda::spin_kernel(long)","dram__bytes_read.sum","byte","900"
"0","7","at::cuda::spin_kernel(long)","lts__t_bytes.sum","byte","900"
"1","7","gemm","dram__bytes_read.sum","byte","1,000"
"1","7","gemm","dram__bytes_write.sum","byte","20"
"2","7","relu","lts__t_bytes.sum","byte","5"
"3","7","at::cuda::spin_kernel(long)","dram__bytes_read.sum","byte","900"
"4","7","chain","dram__bytes_read.sum","byte","6"
"""


def test_a_range_begins_with_a_mark_that_counts_for_nothing() -> None:
    counted = importlib.import_module("benchmarks.lib.counted")
    first, second = counted.ranges(CSV)
    assert first == {"read": 1000.0, "written": 20.0, "l2": 5.0, "kernels": 2}
    assert second == {"read": 6.0, "written": 0.0, "l2": 0.0, "kernels": 1}
    assert counted.ranges("==ERROR== no permission\n") == []


def test_sums_in_half_precision_stall_where_sums_in_float_go_on() -> None:
    tiny = importlib.import_module("benchmarks.lib.tiny_cuda_nn")
    ones = torch.ones(1, 4096, dtype=torch.float16)
    small = torch.full((4096, 1), 1 / 32, dtype=torch.float16)
    assert tiny.summed(ones, small, 4096).item() == 128.0
    assert tiny.summed(ones, small, 1).item() == 64.0  # 64 + 1/32 is 64 in fp16


def test_emulated_gradients_are_gradients() -> None:
    mlps = importlib.import_module("benchmarks.run.mlps")
    errors = mlps.measured(32, 2, 256, ["eager"], device="cpu")["errors"]
    assert errors["eager"]["weights"] < errors["tiny-cuda-nn, emulated"]["weights"] < 0.1


@pytest.mark.parametrize("case", ["block", "G4"])
def test_every_launch_of_a_plan_has_its_bytes(case: str) -> None:
    traffic = importlib.import_module("benchmarks.run.traffic")
    module, (x,) = traffic.made(case, "meta")
    with torch.no_grad():
        strategy = "vertical" if case == "block" else "auto"  # its products by themselves are a library's
        plan = analyse(module, (x,), Options(device="h200", strategy=strategy)).whole
    weights = sum(p.nbytes for p in module.parameters())
    assert sum(launch.bytes for launch in plan.launches) == weights + 2 * x.nbytes


def test_losses_of_several_processes_are_one_result(tmp_path: Path) -> None:
    losses = importlib.import_module("benchmarks.run.losses")
    paths = []
    for arm, ends in (("tilestream", (1.0, 1.3)), ("eager", (1.1, 1.2))):
        runs = [losses.Run("nerf", arm, n, 1000, 2.0, end, (end,), 1.0) for n, end in enumerate(ends)]
        paths.append(tmp_path / f"{arm}.json")
        losses.written(paths[-1], [losses.summary("nerf", arm, runs)], 1000, {"gpu": "one"})
    out = tmp_path / "all.json"
    made = losses.main(["--join", *map(str, paths), "--json", str(out)])
    assert [t.arm for t in made] == ["eager", "tilestream"] and made[0].mean == pytest.approx(1.15)
    kept = json.loads(out.read_text())
    assert kept["environment"] == {"gpu": "one"} and kept["trained"][1]["runs"][1]["end"] == 1.3


@pytest.mark.parametrize("case", ["nerf_65536"])
def test_gains_are_also_told_against_the_fastest_of_inductors_runs(case: str) -> None:
    short = importlib.import_module("benchmarks.tables.short_table")
    steps = short.training_rows()
    whole = json.loads((BENCHMARKS / "results" / "whole" / f"{case}.json").read_text())
    for made in (steps[case], whole):
        assert round(made["arms"]["inductor"]["us"]) in made["inductor_us_of_runs"]
        told = short.gain(made)
        assert told.last == pytest.approx(made["speedup"])
        assert told.least == pytest.approx(min(made["inductor_us_of_runs"]) / made["arms"]["tilestream"]["us"])
        assert str(told) == f"{told.last:.2f} ({told.least:.2f})"
    assert str(short.gain(steps["dlrm_2048"])) == f"{steps['dlrm_2048']['speedup']:.2f}"


@pytest.mark.parametrize(("whole", "case"), [("nerf_16384", "nerf_small"), ("nerf_262144", "nerf")])
def test_one_model_of_two_tables_is_held_against_the_fastest_of_both(whole: str, case: str) -> None:
    one, other = (json.loads((BENCHMARKS / "results" / f"{n}.json").read_text()) for n in (f"whole/{whole}", case))
    least = min(a["us"] for name, a in {**other["arms"], **one["arms"]}.items() if name != "tilestream")
    assert one["speedup"] <= least / one["arms"]["tilestream"]["us"] * 1.001
    assert round(other["arms"]["inductor"]["us"]) in one["inductor_us_of_runs"]


def test_the_first_table_has_what_is_lost() -> None:
    short = importlib.import_module("benchmarks.tables.short_table")
    heads, rows = short.rows()
    assert len(rows) >= 6 and all(len(row) == len(heads) for row in rows)
    least = [float(row[3].split(" to ")[0]) for row in rows]
    assert min(least) < 1 < max(least)


def test_the_page_of_applications_is_in_step_with_the_results() -> None:
    applications = importlib.import_module("benchmarks.tables.applications")
    text = applications.PAGE.read_text(encoding="utf-8")
    assert applications.filled(text) == text, "run benchmarks/tables/applications.py"
