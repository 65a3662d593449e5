"""The table of operators: its page, and the reasons for what is not in it."""

from __future__ import annotations

import re

import pytest
import torch
from modules import Fn, linear
from places import DOCS
from torch import nn

from tilestream.graph.capture import capture
from tilestream.graph.operators import RULES
from tilestream.graph.operators.reasons import UNKNOWN
from tilestream.graph.rewrites import norms
from tilestream.graph.selection import partition

PAGE = DOCS / "operators.md"


def test_the_page_lists_every_operator():
    table = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    named = {name for row in table for name in re.findall(r"`(\w+)`", row)}
    rules = {str(op).split(".")[-1] for op in RULES if str(op).startswith(("aten", "prims"))}
    assert rules <= named, f"add to docs/operators.md: {sorted(rules - named)}"
    before_selection = {"split", *(str(op).split(".")[-1] for op in norms.RULES)}
    assert named - rules == before_selection, f"no rule for: {sorted(named - rules - before_selection)}"


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda m, x: m.layers[0](x)[torch.tensor([1, 0])], "gathers rows"),
        (lambda m, x: torch.zeros_like(x).index_add(0, torch.zeros(37, dtype=torch.long), m.layers[0](x)), "scatters"),
        (lambda m, x: nn.functional.dropout(m.layers[0](x), 0.5, training=True), "call model.eval()"),
        (lambda m, x: nn.functional.batch_norm(m.layers[0](x), None, None, training=True), "call model.eval()"),
        (lambda m, x: m.layers[0](x).cumsum(-1), "orders or scans"),
        (lambda m, x: torch.where(m.layers[0](x) > 0, x, 0), "booleans"),
        (lambda m, x: torch.fft.fft(m.layers[0](x)).real, UNKNOWN),
    ],
)
def test_reasons_of_operators_without_a_rule(function, says: str):
    torch._dynamo.reset()
    (graph,) = capture(Fn(function, linear(9, 9)), [torch.randn(37, 9)]).graphs
    assert any(says in e.reason for e in partition(graph).exclusions)


def test_a_product_of_unlike_dtypes_is_left_to_torch():
    """A GPU's capture lets it through (torch 2.11), and parts of float32 would take it."""
    torch._dynamo.reset()
    (graph,) = capture(linear(9, 9), [torch.randn(37, 9)]).graphs
    for node in graph.graph.nodes:
        if node.op == "placeholder" and node.meta["val"].shape == (9, 9):
            node.meta["val"] = node.meta["val"].bfloat16()
    assert any("which torch refuses" in e.reason for e in partition(graph).exclusions)
