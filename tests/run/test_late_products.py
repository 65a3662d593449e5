"""Gradients of gathered rows: rows of dY are summed at nodes, and multiplied there."""

from __future__ import annotations

import pytest
import torch
from test_messages_training import Step, check, gradients, mesh
from torch import Tensor, fx, nn

from tilestream.graph.nodes import aten, packet
from tilestream.graph.rewrites.operators import SEGMENT_REDUCE
from tilestream.plan import messages

NODES, EDGES, WIDTH = 40, 150, 16


@pytest.fixture(autouse=True)
def _cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sums pay, too."""
    monkeypatch.setattr(messages, "atomics_us", lambda _: 1e9)


class Block(nn.Module):
    """A layer on edges and both of their ends, or on senders alone; ``outs`` of it are added up at receivers."""

    def __init__(self, ends: int = 2, outs: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.net = nn.Linear((1 + ends) * WIDTH if ends > 1 else WIDTH, outs)
        self.ends = ends

    def forward(self, v: Tensor, e: Tensor, senders: Tensor, receivers: Tensor) -> Tensor:
        v = torch.relu(self.first(v))
        given = [e, v[senders], v.index_select(0, receivers)] if self.ends > 1 else [v[senders]]
        made = self.net(torch.cat(given, -1) if self.ends > 1 else given[0])
        return v.new_zeros(len(v), made.shape[1]).index_add(0, receivers, torch.relu(made))


def given(edges: int = EDGES, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    v, senders, receivers = mesh(NODES, edges, WIDTH, dtype)
    return v, torch.randn(edges, WIDTH).to(dtype), senders, receivers


def rows_of_products(graph: fx.GraphModule) -> list[int]:
    """Of each ``dX`` or ``S W`` its rows, and of each dW what it sums over."""
    found = [n for n in graph.graph.nodes if packet(n) is aten.mm]
    return sorted(max(n.args[0].meta["val"].shape) for n in found)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("ends", [1, 2])
@pytest.mark.every(2)
def test_products_behind_a_sum_have_a_row_for_each_node(ends: int, dynamic: bool) -> None:
    module = Block(ends).bfloat16()
    step = Step(module, dynamic=dynamic)
    check(module, step, *given())
    (_, backward) = step.graphs
    sums = backward.graph.find_nodes(op="call_function", target=SEGMENT_REDUCE)
    assert [s.meta["val"].shape[1] for s in sums] == [WIDTH] * ends
    assert len({s.args[1] for s in sums}) == 1, "the same dY, in one order for each end"
    if not dynamic:
        # Of nodes: dX and dW of the first layer, S W and S.T v of each end. Of edges: dX and dW of what is theirs.
        assert rows_of_products(backward) == [NODES] * (2 + 2 * ends) + [EDGES] * (2 if ends > 1 else 0)
    gathers = [n for n in backward.graph.nodes if packet(n) in (aten.index, aten.index_select)]
    assert len(gathers) == 1, "the gradient of what was added up, and no row of v"


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (Block().bfloat16(), given(edges=2 * NODES - 1)),  # a row of S for almost every edge
        (Block(outs=32).bfloat16(), given()),  # S would be wider than what it stands for
        (Block(), given(dtype=torch.float32)),  # whose sums are atomics
    ],
    ids=["few edges", "wide outputs", "fp32"],
)
def test_what_would_not_pay_is_multiplied_edge_by_edge(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    step = Step(module)
    gradients(step, module, inputs)
    assert rows_of_products(step.graphs[1]).count(NODES) == 2, "the first layer's"


def test_columns_that_are_multiplied_late_are_multiplied_only_there() -> None:
    """Edges of one kind of nodes, few of another: dX has the columns of the edge and of the many."""

    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3 * WIDTH, WIDTH)

        def forward(self, e: Tensor, many: Tensor, few: Tensor, senders: Tensor, receivers: Tensor) -> Tensor:
            return self.net(torch.cat([torch.relu(e), torch.relu(many)[senders], torch.relu(few)[receivers]], -1))

    few, senders, receivers = mesh(NODES, EDGES, WIDTH)
    many, e = torch.randn(EDGES, WIDTH).bfloat16(), torch.randn(EDGES, WIDTH).bfloat16()
    module = Ends().bfloat16()
    step = Step(module)
    check(module, step, e, many, few, senders, receivers)
    made = [n.meta["val"].shape for n in step.graphs[1].graph.nodes if packet(n) is aten.mm]
    assert (EDGES, 2 * WIDTH) in made and (NODES, WIDTH) in made and (EDGES, 3 * WIDTH) not in made
