"""The queue benchmark: what it measures is legal and compiles; its figures need a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tilestream import devices, reference
from tilestream.bench import queue_pipeline
from tilestream.cli.main import app
from tilestream.cuda import compile_only
from tilestream.errors import DeviceError, OptionError
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Transport
from tilestream.kernels.fits import verify_on

EVERY = queue_pipeline.cases(queue_pipeline.PAYLOADS, queue_pipeline.DEPTHS, ("l2", "dram"))


def test_every_combination_fits_an_h200():
    h200 = devices.get("h200")
    assert len(EVERY) == len(queue_pipeline.PAYLOADS) * (len(queue_pipeline.DEPTHS) + 1)
    for case in EVERY:
        made = queue_pipeline.pipeline(case, h200.sms // 2)
        verify_on(made, h200)
        assert made.tile_rows * made.tiles()["tile"].row_bytes == case.payload
        launches = 1 if case.transport is Transport.L2 else 2
        assert len(cut_at_dram(made)) == launches


@pytest.mark.parametrize("case", [EVERY[0], EVERY[-2], EVERY[-1]], ids=str)
def test_the_pipelines_compute_the_largest_sum(case: queue_pipeline.Case):
    x, row = torch.randn(200, 1).bfloat16(), torch.randn(case.width).bfloat16()
    got = reference.run(queue_pipeline.pipeline(case, 2), {"x": x, "row": row})["y"]
    assert torch.equal(got, (x.float() + row.float().max()).bfloat16())


@pytest.mark.nvrtc
@pytest.mark.parametrize("case", [EVERY[0], EVERY[-6], EVERY[-1]], ids=str)
def test_the_kernels_compile_without_spills(case: queue_pipeline.Case):
    assert all(report.spills == 0 for report in compile_only(queue_pipeline.pipeline(case, 66)))


def test_runs_through_dram_do_not_stay_in_l2():
    for case in EVERY:
        tiles = queue_pipeline.tiles_for(case, 66, 50 << 20)
        assert tiles > 100 * 66
        if case.transport is Transport.DRAM:
            assert tiles * case.payload > 3.9 * (50 << 20)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"payloads": (1000,)}, "multiple of 1024"),
        ({"payloads": (131_072,)}, "65536 bytes"),
        ({"depths": (3,)}, "even number"),
        ({"transports": ("dsm",)}, "use some of l2, dram"),
    ],
)
def test_impossible_combinations_are_refused(given: dict, says: str):
    with pytest.raises(OptionError, match=says):
        queue_pipeline.run(**given)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="Remedy: run this on an H100 or H200"):
        queue_pipeline.run()
    done = CliRunner().invoke(app, ["bench", "queues"], catch_exceptions=False)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: queues can only be measured on a Hopper GPU")


@pytest.mark.gpu
def test_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    short = queue_pipeline.run

    def quick(progress):
        return short(payloads=(2_048, 65_536), depths=(4,), seconds=0.5, progress=progress)

    monkeypatch.setattr(queue_pipeline, "run", quick)
    path = tmp_path / "queues.json"
    done = CliRunner().invoke(app, ["bench", "queues", "--json", str(path)], catch_exceptions=False)
    assert done.exit_code == 0 and "payload" in done.output
    rows = {(r["transport"], r["payload_bytes"]): r for r in json.loads(path.read_text())["queues"]}
    assert set(rows) == {(t, p) for t in ("l2", "dram") for p in (2_048, 65_536)}
    for row in rows.values():
        # A tile cannot pass faster than the L2 of any Hopper GPU moves its bytes, nor slower than a launch.
        assert 0.05 < row["us_a_tile"] < 50
        assert 0.01 < row["payload_tb_per_s"] < 6
    assert rows["l2", 65_536]["payload_tb_per_s"] > rows["l2", 2_048]["payload_tb_per_s"]
