"""The benchmark that times every way to run a model: its dry run, on the reference machine."""

from __future__ import annotations

import importlib
import sys

import pytest

from tilestream import devices
from tilestream.ir.serialise import pipeline_from_json
from tilestream.plan.candidates import FALLBACK


@pytest.fixture(scope="module")
def benchmark():
    return importlib.import_module("benchmarks.run.candidates")


@pytest.mark.parametrize("model", ["chain 2x128 relu", "mlp 24-40-8 relu", "norm 64-72-48", "residual 32-48-32 gelu"])
@pytest.mark.every(2)
def test_every_candidate_computes_the_model(benchmark, model: str):
    rows = benchmark.dry(model, 4096, devices.get("h200"))
    assert [r.failed for r in rows] == [""] * len(rows)
    assert rows[-1].candidate == FALLBACK and rows[-1].pipeline is None
    ours = [pipeline_from_json(r.pipeline) for r in rows[:-1]]
    assert len(set(map(str, ours))) == len(ours) >= 2
    assert {p.stages[0].placement.dim for p in ours} == {0, 1}
    assert all(r.predicted_us > 0 and r.measured_us is None for r in rows)


def test_without_a_gpu_it_says_so(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["candidates.py"])
    monkeypatch.setattr(benchmark.torch.cuda, "is_available", lambda: False)
    assert benchmark.main() == 1
    assert "--dry-run" in capsys.readouterr().err
