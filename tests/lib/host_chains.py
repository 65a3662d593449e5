"""Runs backward chains' kernels on the host, and holds their gradients against float64's."""

from __future__ import annotations

from pathlib import Path

import torch
from backward_chains import data, eager

from tilestream.cuda.host.build import HostRun, run_on_host
from tilestream.ir.pipeline import Pipeline


def run(p: Pipeline, inputs: dict[str, torch.Tensor], folder: Path, **options) -> dict[str, torch.Tensor]:
    return run_on_host(p, inputs, HostRun(folder=folder, **options))


def check(p: Pipeline, rows: int, folder: Path, **options) -> dict[str, torch.Tensor]:
    """Every gradient is as near to float64 as eager's, or at twice its distance at most."""
    inputs = data(p, rows)
    got, want, own = run(p, inputs, folder, **options), eager(p, inputs, torch.float64), eager(p, inputs)
    assert got.keys() == want.keys()
    for name, value in want.items():
        size = float(value.norm().clamp_min(1e-30))
        error, allowed = (float((x[name].double() - value).norm()) / size for x in (got, own))
        assert error <= 2 * allowed + 1e-5, f"{name}: error {error:.2e}, eager's {allowed:.2e}"
    return got
