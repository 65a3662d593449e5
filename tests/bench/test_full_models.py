"""Whole models that are measured, and those kept aside: the sets, and the three that need no other package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils import flop_counter

from benchmarks.lib import flops
from benchmarks.lib.full_models import FRESH, MODELS, varied
from benchmarks.run import gnn, real_models
from benchmarks.tables import real_tables


def test_models_that_are_kept_aside_are_twenty_others() -> None:
    assert len(FRESH) == 20
    assert not FRESH.keys() & MODELS.keys()
    assert all((m.batch > 0) != (m.inputs is not None) for m in (*MODELS.values(), *FRESH.values()))


@pytest.mark.parametrize("name", ["swiglu-f32", "cross-network", "two-towers"])
def test_small_models_run_in_float64_too(name: str) -> None:
    (case,) = real_models.cases(name, cpu=True)
    (made,) = case.step(case.module, case.module, case.inputs)
    wide = case.module.double()
    (exact,) = case.step(wide, wide, tuple(x.double() for x in case.inputs))
    assert exact.dtype == torch.float64
    assert (made.double() - exact).norm() < 0.02 * exact.norm()


def test_unknown_models_are_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["real_models", "--cpu", "bert-bas"])
    assert real_models.main() == 2
    assert "bert-base" in capsys.readouterr().err


def test_a_model_has_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"case": "two-towers", "us": {"eager": 2.0, "tilestream": 1.0}, "speedup": 2.0}

    def measured(given: object, wanted: list[str], write: object) -> list[dict[str, object]]:
        assert wanted == ["two-towers"]
        write([row])  # pyright: ignore[reportCallIssue]
        return [row]

    monkeypatch.setattr(real_models, "measured", measured)
    monkeypatch.setattr("sys.argv", ["real_models", "--cpu", "two-towers", "--out", str(tmp_path)])
    assert real_models.main() == 0
    told = json.loads((tmp_path / "two-towers.json").read_text())
    assert (told["speedup"], told["set"]) == (2.0, "seen")


class Begun(nn.Module):
    """As timm begins its models: a head of zeros, a layer scale that hides the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)
        self.gamma, self.token = nn.Parameter(torch.full((8, 1, 1), 1e-4)), nn.Parameter(torch.zeros(1, 1, 8))
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x + self.token) * self.gamma.flatten())


def test_no_parameter_is_constant() -> None:
    made, again = Begun().requires_grad_(False), Begun().requires_grad_(False)
    kept = made.head.bias.copy_(torch.arange(4.0)).clone()
    varied(made)
    varied(again)
    assert torch.equal(made.head.bias, kept)
    assert all(p.std() > 0 for p in made.parameters())
    assert torch.equal(made.norm.weight, again.norm.weight)
    assert made.gamma.min() > 0.4
    assert made(torch.randn(3, 1, 8)).sub(kept).abs().mean() > 0.05


@pytest.mark.parametrize("name", ["mixer-s16", "resmlp-12"])
def test_results_of_timms_models_are_not_zeros(name: str) -> None:
    pytest.importorskip("timm")
    module, inputs = MODELS.get(name, FRESH.get(name)).problem("cpu", tiny=True)  # pyright: ignore[reportOptionalMemberAccess]
    assert all(p.numel() < 2 or p.std() > 0 for p in module.parameters())
    assert module(*inputs).std() > 0.01


class Shared(nn.Module):
    """Nine heads of queries for three of keys, as one fused operator."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0]


def test_a_floor_counts_heads_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise AssertionError("sdpa_flop_count: query/key/value shapes are incompatible")

    query = torch.empty(4, 9, 512, 64, dtype=torch.bfloat16, device="meta")
    key = value = torch.empty(4, 3, 512, 64, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(flop_counter, "sdpa_flop_count", refused)  # as torch 2.11 has it
    wanted = 4 * (4 * 9) * 512 * 512 * 64
    assert flops.attention(query.shape, key.shape, value.shape) == wanted
    floor = gnn.floor_us(gnn.Case("shared", Shared(), (query, key, value)))
    assert floor == pytest.approx(1e6 * wanted / gnn.FLOPS_PER_S)


def test_a_row_is_kept_without_its_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: object) -> float:
        raise AssertionError("incompatible")

    monkeypatch.setattr(gnn, "floor_us", refused)
    module, inputs = nn.Linear(4, 4), (torch.randn(2, 4),)
    made = gnn.Made(gnn.Case("linear", module, inputs))
    made.add("eager", cpu=True)
    row = made.measured(cpu=True)
    assert row["us"]["eager"] > 0
    assert "floor_us" not in row
    assert row["failed"] == {"floor": "AssertionError: incompatible"}
    assert "floor FAILED" in gnn.line(row)


def test_the_table_tells_what_was_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = {"us": {"eager": 3.0, "inductor": 2.0, "tilestream": 1.0}, "first_s": {"inductor": 4.0, "tilestream": 2.0}}
    row = {"case": "gpt2", "speedup": 2.0, "floor_us": 0.5, "errors": {"eager": 0.0}, "error_ratio": 0.0, **arms}
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "gpt2.json").write_text(json.dumps(row))
    (tmp_path / "real" / "vit-b16.json").write_text(json.dumps({"case": "vit-b16", "failed": {"measuring": "no"}}))
    monkeypatch.setattr(real_tables, "RESULTS", tmp_path)
    models = {name: MODELS[name] for name in ("gpt2", "vit-b16", "swin-t")}
    told = real_tables.lines(models).replace("\n", " ")
    assert "| gpt2, 4 x 256 tokens | 3.0 | 2.0 | **1.0** | 690 | 2.00 | 2.0 | - | 4 / 2 |" in told
    assert "of 1 of 3" in told
    assert "As fast as wanted: 1 of 1 (gpt2)" in told
    assert "**Not measured: vit-b16** (`no`). **Not measured: swin-t** (`not tried`)." in told
    assert real_tables.gains(models) == {"gpt2, 4 x 256 tokens": 2.0}
