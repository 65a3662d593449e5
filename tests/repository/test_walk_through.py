"""docs/walk-through.md names functions in the order in which they are first called: the models walk again."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from places import ROOT
from torch import Tensor, nn

import tilestream
from tilestream import cuda
from tilestream.apps.models import find
from tilestream.options import Options
from tilestream.plan.analyse import analyse

PACKAGE = str(Path(tilestream.__file__).parent) + "/"
PAGE = ROOT / "docs" / "walk-through.md"


class Walk:
    """Functions of ours by module and name, in the order of their first calls. A trace of calls, not of lines."""

    def __init__(self) -> None:
        self.first: dict[str, int] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):
            module = code.co_filename.removeprefix(PACKAGE).removesuffix(".py").replace("/", ".")
            name = f"{module.removesuffix('__init__').rstrip('.')}.{code.co_qualname}".lstrip(".")
            self.first.setdefault(name, len(self.first))


def nerf(walk: Walk) -> None:
    module, inputs = find("nerf").make(device="cpu", rows=256, width=232)  # of which no other test has kept plans
    compiled = torch.compile(module, backend="tilestream", options={"target": "reference", "cache": False})
    sys.settrace(walk)
    with torch.no_grad():
        compiled(*inputs)


def mesh_graph_nets(walk: Walk) -> None:
    module, inputs = find("mgn").make(device="cpu", training=True, batch=1, steps=1)
    sys.settrace(walk)
    report = tilestream.explain(module, *inputs, training=True, device="h200", cache=False)
    assert "EncodeProcessDecode" in str(report)
    assert {region.kind for region in report.analysis.regions} >= {"region", "backward chain"}


class FeedForward(nn.Module):
    """A gated layer with a norm in front and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(1024)
        self.gate, self.up = (nn.Linear(1024, 3072, bias=False) for _ in range(2))
        self.down = nn.Linear(3072, 1024, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def decoder(walk: Walk) -> None:
    sys.settrace(walk)
    found = analyse(FeedForward().bfloat16().eval(), (torch.randn(1, 1024).bfloat16(),), Options(cache=False))
    plan = found.regions[0].plan
    assert plan is not None and plan.chosen.pipeline is not None
    cuda.compile_only(plan.chosen.pipeline)


def told() -> list[list[str]]:
    """The functions of each list of the page."""
    parts = PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
    return [re.findall(r"^\d+\. `([\w.]+)`:", part, re.MULTILINE) for part in parts]


@pytest.mark.parametrize(("number", "run"), list(enumerate((nerf, mesh_graph_nets, decoder))))
def test_a_model_walks_as_the_page_says(number: int, run: Callable[[Walk], None]) -> None:
    torch._dynamo.reset()
    cuda.cache.forget()
    before, walk = sys.gettrace(), Walk()
    try:
        run(walk)
    finally:
        sys.settrace(before)
    names = [name if name in walk.first else f"__init__.{name}" for name in told()[number]]
    assert len(names) > 5
    missing = [name for name in names if name not in walk.first]
    assert not missing, f"never called: {missing}"
    assert names == sorted(names, key=walk.first.__getitem__)
