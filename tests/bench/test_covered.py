"""The script that counts which share of common models' FLOPs runs in regions."""

from __future__ import annotations

import importlib
import json
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn


@pytest.fixture
def covered() -> ModuleType:
    return importlib.import_module("benchmarks.tables.covered")


class Attends(nn.Module):
    """A chain that streams, then rows multiplied with each other, which is nobody's region."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x)
        return h @ h.t()


def test_flops_are_counted_once(covered: ModuleType, monkeypatch: pytest.MonkeyPatch):
    rows = 8192
    monkeypatch.setitem(covered.MODELS, "attends", lambda: (Attends().bfloat16(), [torch.randn(rows, 64).bfloat16()]))
    row = covered.measured("attends", training=False)
    chain, products = 2 * 2 * rows * 64 * 64, 2 * rows * rows * 64
    assert (row.chosen, row.regions) == (chain, chain)
    assert products + chain <= row.flops <= 1.01 * (products + chain)
    assert row.flops - row.chosen == sum(row.causes.values())
    assert max(row.causes, key=row.causes.__getitem__).startswith("`mm.default`")


def test_the_page_has_the_last_result(covered: ModuleType):
    result = json.loads(covered.RESULT.read_text())
    rows = [covered.Row(**row) for row in result["rows"]]
    assert covered.written(rows) in covered.PAGE.read_text(), "run benchmarks/tables/covered.py --tables"
    assert all(row.chosen <= row.regions <= row.flops for row in rows)
    assert len(rows) == 2 * len(covered.MODELS)
