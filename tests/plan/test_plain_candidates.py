"""Whatever kernel a region is planned for, plain torch operators compute the same of its pipeline: what is called where
a kernel cannot be loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from random_pipelines import tensors_for
from real_blocks import Gpt2Block
from torch import Tensor, nn

from tilestream.devices import get
from tilestream.graph.capture import capture
from tilestream.graph.selection import partition
from tilestream.options import Options
from tilestream.plan import planner
from tilestream.plan.turned import turned
from tilestream.reference.whole import run_whole
from tilestream.run import oracle

H200 = get("h200")


class Layers(nn.Module):
    """A square layer with what lies around it, which a transposed weight fits as well."""

    def __init__(self, width: int, gated: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.third, self.norm, self.gated = nn.Linear(width, width), nn.LayerNorm(width), gated

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            return x + self.third(F.silu(self.first(x)) * self.second(x))
        return self.norm(x + self.third(F.gelu(self.first(x))))


MODELS: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "gated": (256, lambda: Layers(256, gated=True)),
    "a norm behind": (256, lambda: Layers(256, gated=False)),
    "wide": (768, lambda: Layers(768, gated=True)),
    "weights that lie transposed": (64, lambda: Gpt2Block(64, 256)),
    "wide ones": (768, lambda: Gpt2Block(768, 768)),
}
"""How wide its rows are, and a model."""


def wide(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.double() for name, t in values.items()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", [16, 300])
@pytest.mark.every(2)
def test_candidates_mean_what_the_region_does(name: str, rows: int) -> None:
    torch.compiler.reset()
    width, make = MODELS[name]
    model = make().bfloat16().eval().to("meta")
    with torch.no_grad():
        (graph,) = capture(model, (torch.randn(rows, width, device="meta", dtype=torch.bfloat16),)).graphs
    tried = 0
    for projections, pays in ((False, lambda _: False), (True, lambda _: True)):
        for region in partition(graph, projections=projections, pays=pays).regions:
            values = tensors_for(region.program, rows)
            exact, own = run_whole(region.program, wide(values)), run_whole(region.program, values)
            for c in planner.proposals(region.program, rows, H200, Options(), turned(region, Options())):
                if c.pipeline is None:
                    continue
                made = run_whole(c.pipeline, values)
                judged = oracle.judge([made[k] for k in exact], [own[k] for k in exact], list(exact.values()))
                assert judged[2], f"{c.name} {c.detail}: {judged}"
                tried += 1
    assert tried > 3
