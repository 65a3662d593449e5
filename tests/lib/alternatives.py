"""Attentions in the place of a library's (``run.attention.Alternative``): by times that a test gives, or timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from tilestream.devices import get
from tilestream.options import Options
from tilestream.plan import chooser
from tilestream.run import prepare
from tilestream.run.attention import Alternative, attention_trial, kind_of, replace_attention
from tilestream.run.target import Target
from tilestream.run.timer import Timer

TARGET = Target("cuda", torch.device("cuda", 0), get("h200"))
UNKEPT = Options(cache=False)


def replaced(
    monkeypatch: pytest.MonkeyPatch, graph: fx.GraphModule, by: Alternative, measure: Any, options: Options = UNKEPT
) -> int:
    """How many attentions of ``graph`` became ``by``. ``measure`` stands for a timer, which gives its times and the
    library's."""
    chooser.forget()
    monkeypatch.setattr(prepare, "measures", lambda *_: True)
    monkeypatch.setattr(Timer, "__call__", measure)
    return replace_attention(graph, by, options, TARGET)


def are_timed(node: fx.Node, by: Alternative) -> bool:
    """Whether both ways of an attention run on the GPU; each is held to float64 before it is timed."""
    asked = chooser.alternative(by.name, kind_of(node), TARGET.hardware)
    made = chooser.decide(asked, Timer(attention_trial(node, by.ours), TARGET))
    return by.fits(node) and all(c.measured_us for c in made.candidates)
