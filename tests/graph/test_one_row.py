"""Which launches the layers of one row become that change states."""

from __future__ import annotations

import pytest
import torch
from one_rows import GatedRecurrence, recurrent
from torch import Tensor, fx, nn

from benchmarks.lib.recurrent_decoders import RecurrentDecoder
from tilestream.graph.capture import capture
from tilestream.graph.facts import Facts
from tilestream.graph.nodes import is_product
from tilestream.graph.one_row import one_row_layers
from tilestream.graph.rewrites.states import WRITE_STATES
from tilestream.graph.rewrites.table import When, rewrite
from tilestream.graph.selection import Cut, partition
from tilestream.kernels.one_row.model import is_one_row


def graph_of(model: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    with torch.no_grad():
        (graph,) = capture(model.eval(), inputs).graphs
    rewrite(graph, When.ROWS)
    return graph


def cuts_of(graph: fx.GraphModule) -> list[tuple[Cut, int]]:
    """Regions, and how many products each has."""
    cuts = partition(graph, projections=True).cuts
    return [(cut, sum(map(is_product, cut.nodes))) for cut in cuts]


def test_a_layer_is_four_launches() -> None:
    """The products of each; the head is the last one's; what is left are the embedding and the states' one write."""
    model = RecurrentDecoder(layers=2, width=64, hidden=128, vocabulary=40).bfloat16()
    graph = graph_of(model, torch.tensor([3]))
    found = cuts_of(graph)
    assert [products for _, products in found] == [3, 1, 2, 1] * 2 + [1]
    assert all(is_one_row(cut.region.program) for cut, _ in found)
    inside = {n for cut, _ in found for n in cut.nodes}
    left = [str(n.target) for n in graph.graph.nodes if n.op == "call_function" and n not in inside]
    assert set(left) == {"aten.embedding.default", "aten.t.default", "aten.select.int", str(WRITE_STATES)}
    (written,) = graph.graph.find_nodes(op="call_function", target=WRITE_STATES)
    assert [len(args) for args in written.args] == [2 * 3, 2 * 5]  # pyright: ignore[reportArgumentType]


def test_another_recurrence_is_two_launches() -> None:
    found = cuts_of(graph_of(recurrent(64, 96), torch.randn(1, 64, dtype=torch.bfloat16)))
    assert [products for _, products in found] == [3, 1] * 2


def test_graphs_of_several_rows_and_without_states_are_as_they_were() -> None:
    model = GatedRecurrence(64, 96).bfloat16()
    model.state = nn.Buffer(torch.zeros(2, 96))
    for several in (model, model.output):
        graph = graph_of(several, torch.randn(2, 64 if several is model else 96, dtype=torch.bfloat16))
        assert not graph.graph.find_nodes(op="call_function", target=WRITE_STATES)
        assert not list(one_row_layers([*graph.graph.nodes], Facts(), ()))


class Products(nn.Module):
    """Products of two widths, of which one op reads both, and a state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 96), nn.Linear(128, 96), nn.Linear(96, 64)
        self.state = nn.Buffer(torch.zeros(1, 64))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        y = self.last(self.first(x) * self.second(h))
        self.state.copy_(y)
        return y


def test_products_of_two_lengths_take_turns() -> None:
    found = cuts_of(graph_of(Products().bfloat16(), *(torch.randn(1, n, dtype=torch.bfloat16) for n in (64, 128))))
    assert [products for _, products in found] == [1, 1, 1]


class Shifted(nn.Module):
    """A row becomes the row before, whose state it was, and the state that was written is read again."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.before = nn.Buffer(torch.zeros(1, 8)), nn.Buffer(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.before.copy_(self.now[0])
        self.now.copy_(x * 2)
        return self.now + self.before


@torch.no_grad()
def test_states_that_others_become_are_written_before() -> None:
    graph = graph_of(Shifted(), torch.randn(1, 8))
    (written,) = graph.graph.find_nodes(op="call_function", target=WRITE_STATES)
    assert [len(args) for args in written.args] == [1, 1]  # pyright: ignore[reportArgumentType]
    given = {(8,): torch.zeros(8), (1, 8): torch.arange(8.0)[None]}
    arguments = graph.graph.find_nodes(op="placeholder")
    values = {n: given[tuple(n.meta["val"].shape)] for n in arguments}
    (now,), (before,) = written.args[0], [n for n in arguments if values[n].dim() == 1]  # pyright: ignore
    values[now] = torch.ones(1, 8)
    (result,) = graph(*values.values())
    torch.testing.assert_close(result, 2 * given[1, 8] + 1)
    torch.testing.assert_close(values[now], 2 * given[1, 8])
    torch.testing.assert_close(values[before], torch.ones(8))


@pytest.mark.parametrize("rows", [1, 3])
def test_what_writing_together_means(rows: int) -> None:
    states = [torch.zeros(rows, 4), torch.zeros(4)]
    values = [torch.randn(1, 4) for _ in range(rows + 1)]
    WRITE_STATES(states, values)
    torch.testing.assert_close(torch.cat([states[0], states[1][None]]), torch.cat(values))
