"""Keywords of ``explain`` and ``simulate``: options of tilestream, arguments of the model, and both at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilestream
from tilestream.errors import OptionError
from tilestream.options import Options
from tilestream.report.keywords import split


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 256).bfloat16().eval()

    def forward(self, x: Tensor, scale: float = 1.0, *, device: str = "", flags: tuple[bool, ...] = ()) -> Tensor:
        return self.layer(x) * scale


def anything(x: Tensor, **named: Any) -> Tensor:
    return x


def test_a_name_goes_where_it_is_known():
    options, keywords = split(Scaled(), {"scale": 2, "strategy": "bulk"})
    assert options == Options(strategy="bulk") and keywords == {"scale": 2}
    options, keywords = split(anything, {"strategy": "bulk", "whatever": 3})
    assert options == Options(strategy="bulk") and keywords == {"whatever": 3}


def test_what_is_given_as_such_needs_no_guess():
    options, keywords = split(Scaled(), {}, {"device": "a100"}, {"device": "mine"})
    assert options.device == "a100" and keywords == {"device": "mine"}
    assert split(Scaled(), {}, Options(strategy="bulk"))[0].strategy == "bulk"


@pytest.mark.parametrize(
    ("named", "options", "says"),
    [
        (
            {"device": "h200"},
            None,
            "'device' is an option of tilestream and an argument of Scaled.forward. Remedy: write",
        ),
        (
            {"sclae": 2},
            None,
            "'sclae' is neither an option nor an argument of Scaled.forward. Remedy: did",
        ),
        ({"stratgy": "bulk"}, None, "did you mean 'strategy'"),
        ({"nothing": 1}, None, "options are any_order, attention, cache, "),
        ({"strategy": "bulk"}, {"strategy": "bulk"}, "'strategy' is given twice"),
        ({"training": True}, None, "neither"),
    ],
)
def test_a_name_that_is_unclear_is_an_error(named: dict[str, Any], options: dict[str, Any] | None, says: str):
    with pytest.raises(OptionError, match=says):
        split(Scaled(), named, options)


def test_explain_and_simulate_take_the_models_keywords():
    x = torch.zeros(1, 1, dtype=torch.bfloat16).expand(65536, 64)
    report = tilestream.explain(Scaled(), x, scale=2, options={"device": "h200"})
    assert {"aten.addmm.default", "aten.mul.Tensor"} == set(report.analysis.regions[0].operators)
    assert report.analysis.device == "h200"
    assert tilestream.simulate(Scaled(), x, scale=2, strategy="vertical").runs[0].strategy == "vertical"
    with pytest.raises(OptionError, match="an argument of Scaled.forward"):
        tilestream.simulate(Scaled(), x, device="a100")
    assert tilestream.simulate(Scaled(), x, options={"device": "a100"}).analysis.device == "a100"


def test_training_is_explains_own_word():
    def forward(x: Tensor, training: bool = False) -> Tensor:
        return x * 2 if training else x * 3

    x = torch.randn(3, 9)
    with pytest.raises(OptionError, match="'training' is an option of tilestream and an argument of forward"):
        tilestream.explain(forward, x, training=True)
    made = tilestream.explain(forward, x, kwargs={"training": True})
    assert [g.kind for g in made.analysis.graphs] == ["inference"]
    trained = tilestream.explain(Scaled(), torch.randn(37, 64).bfloat16(), training=True)
    assert [g.kind for g in trained.analysis.graphs] == ["forward", "backward"]
