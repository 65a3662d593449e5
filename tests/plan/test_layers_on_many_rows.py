"""Layers of transformers on 513 to thousands of rows: what becomes one launch, by prediction."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tilestream import devices
from tilestream.apps.layers import LAYERS, Layer
from tilestream.graph.capture import capture
from tilestream.graph.nodes import name
from tilestream.options import Options
from tilestream.plan import planner
from tilestream.plan.candidates import prediction_of
from tilestream.plan.find import Found, find
from tilestream.plan.planner import plan

H200 = devices.get("h200")


class FeedForward(nn.Module):
    """Two layers with an activation and a dropout that is off between them, and a residual."""

    def __init__(self, width: int, hidden: int, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.act, self.drop = nn.Linear(width, hidden), nn.Linear(hidden, width), act, nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(self.act(self.up(x))))


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def found_in(module: nn.Module, rows: int, width: int) -> Found:
    with torch.no_grad():
        (graph,) = capture(module.bfloat16().eval(), (torch.randn(rows, width).bfloat16(),)).graphs
    return find(graph, "inference", Options(), H200)


def kinds(found: Found) -> list[list[str]]:
    names = [[name(n).split(".")[1] for n in cut.nodes] for cut in found.cuts]
    return [[n for n in some if n not in ("view", "t", "clone")] for some in names]


@pytest.mark.parametrize(("layer", "rows"), [("bert-qkv", 1024), ("smollm-qkv", 2048)])
def test_a_launch_makes_what_takes_a_library_several(layer: str, rows: int) -> None:
    made = plan(LAYERS[layer].program(), rows, H200, Options(measure=False))
    assert made.chosen.strategy == "shared"
    assert 1.3 * prediction_of(made.chosen) < prediction_of(made.fallback)


@pytest.mark.parametrize(("rows", "any_are"), [(1024, True), (8 * 1024, False)])
def test_tiles_of_a_sum_that_is_not_long_take_few_turns(rows: int, any_are: bool) -> None:
    """What a tile does behind its sum nothing hides, so that many turns of tiles are a library's."""
    program = Layer(768, (3072,), bias=True, act="gelu").program()
    made = planner.proposals(program, rows, H200, Options())
    assert any(c.strategy == "shared" and c.pipeline is not None for c in made) == any_are


@pytest.mark.parametrize(("rows", "regions"), [
    (1024, [["addmm", "gelu"], ["addmm", "add"]]),  # too few tiles of rows for one launch
    (16_384, [["addmm", "gelu"], ["addmm", "add"]]),  # two products of a library, which takes GELU in
])  # fmt: skip
def test_a_block_is_no_region_where_its_products_by_themselves_are_faster(rows: int, regions: list[list[str]]) -> None:
    assert kinds(found_in(FeedForward(768, 3072, nn.GELU()), rows, 768)) == regions


def test_a_block_is_one_region_where_one_launch_may_be_the_fastest() -> None:
    assert kinds(found_in(FeedForward(768, 3072, nn.SiLU()), 16_384, 768)) == [["addmm", "silu", "addmm", "add"]]


def test_a_strategy_by_name_is_asked_of_the_whole_block() -> None:
    module = FeedForward(768, 3072, nn.GELU()).bfloat16().eval()
    with torch.no_grad():
        (graph,) = capture(module, (torch.randn(1024, 768).bfloat16(),)).graphs
    found = find(graph, "inference", Options(strategy="vertical"), H200)
    assert kinds(found) == [["addmm", "gelu", "addmm", "add"]]


def test_a_dropout_that_is_off_divides_no_hidden_layer() -> None:
    found = found_in(FeedForward(192, 768, nn.GELU()), 12_608, 192)
    assert kinds(found) == [["addmm", "gelu", "addmm", "add"]]
    made = planner.proposals(found.regions[0].program, 12_608, H200, Options())
    ours = (c for c in made if c.predicted_us and c.pipeline is not None)
    assert min(ours, key=prediction_of).detail == "hidden layers by chunks"


def test_an_activation_that_reads_its_input_twice_goes_behind_its_product() -> None:
    assert kinds(found_in(FeedForward(768, 3072, quick_gelu), 1024, 768))[0] == ["addmm", "mul", "sigmoid", "mul"]


def test_what_others_read_before_its_end_is_no_epilogue() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(768, 3072)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.up(x)
            return quick_gelu(y), y

    assert all("sigmoid" not in kind for kind in kinds(found_in(Both(), 1024, 768)))
