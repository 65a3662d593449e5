"""Whole blocks of real models, written in plain torch: weights as GPT-2 has them, batches of one weight, any width."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from real_blocks import Gpt2Block, Mixing
from torch import nn

from tilestream.graph.capture import capture
from tilestream.graph.selection import Partition, partition
from tilestream.run.backend import tilestream


def cut(module: nn.Module, *shape: int) -> Partition:
    torch.compiler.reset()
    with torch.device("meta"):
        x = torch.randn(shape, dtype=torch.bfloat16)
    with torch.no_grad():
        (graph,) = capture(module.bfloat16().eval().to("meta"), (x,)).graphs
    return partition(graph)


def kinds(found: Partition) -> list[list[str]]:
    return [[op.kind for op in r.program.stages[0].ops] for r in found.regions]


def judged(module: nn.Module, x: torch.Tensor, strategy: str = "auto") -> tuple[float, float]:
    """Errors against float64, relative: compiled for the reference machine, and eager."""
    options = {"target": "reference", "strategy": strategy}
    with torch.no_grad():
        got = torch.compile(module, backend=tilestream, options=options)(x).double()
        near = module(x).double()
        want = module.double()(x.double())
    return float((got - want).norm() / want.norm()), float((near - want).norm() / want.norm())


@pytest.mark.parametrize("rows", [1, 16, 128, 512])
@pytest.mark.every(2)
def test_gpt2s_block_at_its_real_width_is_a_region_at_every_number_of_few_rows(rows: int) -> None:
    found = cut(Gpt2Block(768, 3072), 1, rows, 768)
    (ops,) = kinds(found)
    assert ops.count("linear") == 2 and "layer_norm" in ops and ops[-2:] == ["add", "store"]
    (region,) = found.regions
    assert region.rows == rows and found.exclusions == ()
    assert [p.steps for p in region.parameters if len(region.program.tensor(p.tensor).shape) == 2] == [(("t",),)] * 2


def test_gpt2s_block_gives_the_right_values(fresh: None) -> None:
    torch.manual_seed(0)
    module = Gpt2Block(48, 520).bfloat16().eval()
    error, own = judged(module, torch.randn(1, 3, 48).bfloat16(), "shared")
    assert error < 2 * own


@pytest.mark.parametrize(("width", "hidden"), [(384, 1536), (192, 768), (48, 520)])
def test_narrow_blocks_with_a_wide_middle_are_whole(width: int, hidden: int) -> None:
    """DeiT's, MiniLM's: a row stream could have their second layer, and would leave the first one outside."""

    class Ffn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(F.gelu(self.up(self.norm(x))))

    found = cut(Ffn(), 16, width)
    assert kinds(found) == [["load", "layer_norm", "linear", "gelu", "linear", "add", "store"]]
    assert found.exclusions == () and [r.name for r in found.regions] == ["region0"]


def test_row_streams_around_a_block_stay_and_are_counted_on() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 48), nn.Sigmoid())
            self.up, self.down = nn.Linear(48, 520), nn.Linear(520, 48)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.first(x)
            return y, self.down(self.up(y).relu())

    found = cut(Two(), 16, 32)
    assert [r.name for r in found.regions] == ["region0", "region1"]
    assert [ops.count("linear") for ops in kinds(found)] == [2, 2] and "sigmoid" in kinds(found)[0]


def test_a_batch_of_products_by_one_weight_is_a_linear() -> None:
    found = cut(Mixing(196, 384, 768), 32, 196, 768)
    assert kinds(found) == [["load", "linear", "gelu", "linear", "store"]]
    assert found.regions[0].rows == 32 * 768


def test_a_batch_of_weights_stays_outside() -> None:
    class Batch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 32, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.bmm(x, self.weight)

    (left,) = cut(Batch(), 4, 16, 32).exclusions
    assert left.reason == "a batch of matrices: rows do not share one weight"


def test_token_mixing_gives_the_right_values(fresh: None) -> None:
    torch.manual_seed(0)
    error, own = judged(Mixing(12, 24, 40).bfloat16().eval(), torch.randn(3, 12, 40).bfloat16())
    assert error < 2 * own
