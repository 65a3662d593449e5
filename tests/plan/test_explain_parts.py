"""What ``explain`` tells of a model by parts: regions, weight gradients and what is left, as they would run."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from tilestream.devices import get
from tilestream.options import Options
from tilestream.plan.analyse import analyse
from tilestream.plan.analysis import Analysis
from tilestream.plan.predicted import predictions
from tilestream.report.explain import Report
from tilestream.report.parts import INDUCTOR, parts

ROWS = 65_536


class Skip(nn.Module):
    """A network whose second layer takes the input again, beside the first one's result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 128), nn.Linear(192, 128), nn.Linear(128, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        return self.head(torch.relu(self.second(torch.cat([x, h], -1))))


@cache
def step() -> Analysis:
    x = torch.empty(ROWS, 64, dtype=torch.bfloat16, device="meta")
    return analyse(Skip().bfloat16().to("meta"), (x,), Options(), get("h200"), training=True)


def test_regions_and_weight_gradients_are_apart() -> None:
    found = parts(step())
    assert [(p.graph, p.name) for p in found][:2] == [("forward", "regions"), ("backward", "regions")]
    assert ("backward", "weight gradients") in [(p.graph, p.name) for p in found]
    assert sum(p.predicted_us for p in found) == pytest.approx(step().predicted_us)
    text = str(Report(step()))
    assert "in 2 regions and 1 launch of weight gradients; Inductor:" in text
    assert "weight gradients graph1.gradients0: " in text and f"summed over {ROWS:,} rows, backward graph" in text


def test_weight_gradients_name_their_modules() -> None:
    (sums,) = [r for r in step().regions if r.kind == "weight gradients"]
    assert set(sums.modules) == {"first", "second", "head"}
    (told,) = [r for r in Report(step()).json()["regions"] if r["kind"] == "weight gradients"]
    assert set(told["modules"]) == {"first", "second", "head"}


def test_shares_of_flops_are_of_all_products() -> None:
    found = parts(step())
    layers = 64 * 128 + 192 * 128 + 128 * 8
    assert sum(p.flops for p in found if p.name == "weight gradients") == 2 * ROWS * layers
    assert all(p.flops == 0 for p in found if p.name == INDUCTOR)  # what is left multiplies nothing


def test_columns_that_nobody_wants_are_not_computed_in_what_is_told() -> None:
    """The gradient of the joined input goes to its hidden part alone: 128 of 192 columns."""
    (backward,) = [r for r in step().regions if r.kind == "region" and r.graph == 1]
    weights = {t.shape for t in backward.program.tensors if len(t.shape) == 2 and t.shape[0] == 128}
    assert (128, 128) in weights and (192, 128) not in {t.shape for t in backward.program.tensors}


def test_copies_of_transposed_weights_count() -> None:
    """Weights of a backward region lie as its products do not read them."""
    forward, backward = (r for r in step().regions if r.kind == "region")
    assert forward.turned_us == 0 and backward.turned_us > 1
    assert "its weights lie transposed" in str(Report(step()))


def test_a_lone_product_is_told_as_it_runs() -> None:
    x = torch.empty(ROWS, 64, dtype=torch.bfloat16, device="meta")
    model = nn.Linear(64, 64).bfloat16().to("meta").requires_grad_(False)
    made = analyse(model, (x,), Options(), get("h200"))
    assert made.regions[0].runner == "inductor" and "a product by itself" in str(Report(made))
    asked = analyse(model, (x,), Options(target="reference"), get("h200"))
    assert asked.regions[0].runner != "inductor"


def test_an_activation_inside_of_inductors_products_is_told() -> None:
    """Beside what streams the candidate `inductor` is faster than Inductor alone, and the text says why. Where nothing
    else streams, it is what all on Inductor is."""
    x = torch.empty(ROWS, 64, dtype=torch.bfloat16, device="meta")
    for act, told in ((nn.ReLU, True), (nn.GELU, True), (nn.SiLU, False)):
        model = nn.Sequential(nn.Linear(64, 256), act(), nn.Linear(256, 256), act(), nn.Linear(256, 8))
        with torch.no_grad():
            a = analyse(model.bfloat16().to("meta"), (x,), Options(), get("h200"))
        (region,) = a.regions
        assert region.plan is not None
        (fallback,) = (c for c in region.plan.candidates if c.strategy == "fallback")
        assert region.alone and a.candidate_us(region, fallback) == pytest.approx(a.inductor_predicted_us)
        assert "inside of products" not in str(Report(a))
        beside = replace(region, alone=False)
        own = a.candidate_us(beside, fallback)
        assert own is not None and a.inductor_predicted_us is not None
        assert (own < 0.95 * a.inductor_predicted_us) is told
        assert ("inductor: 2 activations inside of products" in str(Report(replace(a, regions=(beside,))))) is told


def test_a_strategy_that_no_region_has_is_not_among_the_predictions() -> None:
    """Sums of gradients are no region's choice; a row stream on many rows shares no tile."""
    assert set(predictions(step())) == {"auto", "vertical", "spatial", "bulk", "inductor"}
