"""Stationary sums on the GPU: values against float64, beside eager's; the same bits twice; replays of CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from replays import check_replays
from stationary import Layer, data, exact, gradients
from torch import Tensor

from tilestream import cuda
from tilestream.devices import get
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.pipeline import Pipeline, Role
from tilestream.plan.gradients import Gradient, weight_gradients

pytestmark = pytest.mark.gpu

CASES = {
    "one CTA": gradients(Layer(64, 64)),
    "256x256": gradients(Layer(256, 256, (2, 1), 66, "o")),
    "ragged": gradients(Layer(136, 200, (2, 1), 33, "o", weight="f32", bias_dtype="bf16")),
    "k over warpgroups": gradients(Layer(48, 328, (1, 1), 132, "k", dtype="f16", weight="f16")),
    "wide": gradients(Layer(512, 512, (4, 2), 16, "o", bias=False)),
    "odd rows": gradients(Layer(72, 27, (1, 1), 40, "o"), Layer(1, 63, splits=20), Layer(3, 128, splits=20)),
    "narrow": gradients(Layer(8, 8, splits=60)),
}
ROWS = (0, 1, 63, 64, 65, 1000, 40_000)


def eager(p: Pipeline, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """As autograd computes them."""
    made = {}
    for t in p.by_role(Role.OUTPUT):
        dy, x = inputs[t.name.replace(t.name[:2], "DY")], inputs[t.name.replace(t.name[:2], "X")]
        made[t.name] = (dy.t() @ x if t.name.startswith("DW") else dy.sum(0)).to(TORCH_DTYPES[t.dtype])
    return made


def poisoned(p: Pipeline) -> dict[str, Tensor]:
    return {
        t.name: torch.full(t.shape, float("nan"), dtype=TORCH_DTYPES[t.dtype], device="cuda")
        for t in p.by_role(Role.OUTPUT)
    }


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    p = CASES[name]
    compiled = cuda.build(p)
    for rows in ROWS:
        inputs = data(p, rows, seed=rows, device="cuda")
        got = compiled(inputs, rows, out=poisoned(p))
        torch.cuda.synchronize()
        own = eager(p, inputs)
        for what, want in exact(p, inputs).items():
            size = float(want.norm()) + 1e-30
            error = float((got[what].double() - want).norm()) / size
            allowed = 2 * float((own[what].double() - want).norm()) / size + 1e-5
            assert error <= allowed, f"{what}, {rows} rows: error {error:.2e}, eager's {allowed / 2:.2e}"
        again = compiled(inputs, rows, out=poisoned(p))
        torch.cuda.synchronize()
        assert all(torch.equal(got[what], again[what]) for what in got), rows


def test_a_graph_is_replayed_without_a_reset() -> None:
    p = CASES["256x256"]
    check_replays(cuda.build(p), data(p, 5000, device="cuda"), 5000, poisoned(p))


def test_a_planned_mlp() -> None:
    layers = [
        Gradient(f"DY{n}", f"X{n}", f"DW{n}", out, k, f"DB{n}")
        for n, (k, out) in enumerate(((63, 256), (256, 256), (319, 256), (256, 3)))
    ]
    p = weight_gradients("mlp", layers, get("h200"))
    compiled, rows = cuda.build(p), 30_001
    inputs = data(p, rows, device="cuda")
    got, own = compiled(inputs, rows, out=poisoned(p)), eager(p, inputs)
    torch.cuda.synchronize()
    for what, want in exact(p, inputs).items():
        assert (got[what].double() - want).norm() <= 2 * (own[what].double() - want).norm() + 1e-5 * want.norm(), what
