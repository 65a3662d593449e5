"""A node that leaves its region: what comes of it is looked at again, and nothing else."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from modules import Fn, linear
from torch import Tensor, fx, nn

from tilestream.graph import operators, selection
from tilestream.graph.capture import capture
from tilestream.graph.nodes import Unsupported
from tilestream.graph.selection import Cut, partition


def two_chains(m: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    first = m.layers[0](m.layers[1](y).tanh())
    mean, rest = m.layers[2](x).split([1, 12], 1)
    return first, m.layers[0](m.layers[1](rest).relu()) * mean


@pytest.fixture
def graph() -> fx.GraphModule:
    module = Fn(two_chains, linear(13, 9), linear(12, 13), linear(9, 13)).bfloat16()
    x, y = (torch.randn(37, n, dtype=torch.bfloat16) for n in (9, 12))
    with torch.no_grad():
        return capture(module, (x, y)).graphs[0]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each node was looked at by itself (``name``) and each region was made (its last node's ``name!``). The
    ReLU, where it comes with others, is refused once."""
    found: Counter[str] = Counter()
    emit, lower = operators.emit, selection.lower

    def emitted(e: Any, node: fx.Node) -> Any:
        found[node.name] += e.members is None
        return emit(e, node)

    def lowered(owner: Any, nodes: list[fx.Node], *args: Any, **kwargs: Any) -> Any:
        found[f"{nodes[-1].name}!"] += 1
        if relu := [n for n in nodes if n.target is torch.ops.aten.relu.default]:
            raise Unsupported("the test wants it out", relu[0])
        return lower(owner, nodes, *args, **kwargs)

    monkeypatch.setattr(operators, "emit", emitted)
    monkeypatch.setattr(selection, "lower", lowered)
    return found


def described(cuts: tuple[Cut, ...]) -> list[tuple[object, ...]]:
    return [(c.region.name, c.region.program, c.region.arguments, c.nodes, c.outputs) for c in cuts]


def test_only_what_comes_of_a_refused_node_is_looked_at_again(graph: fx.GraphModule, seen: Counter[str]):
    relu = next(n for n in graph.graph.nodes if n.target is torch.ops.aten.relu.default)
    behind, todo = set[fx.Node](), [relu]
    while todo:
        node = todo.pop()
        behind.add(node)
        todo += node.users
    found = partition(graph)
    looked = {n.name: seen[n.name] for n in graph.graph.nodes if n.op == "call_function" and n is not relu}
    assert looked == {n: 2 if n in {b.name for b in behind} else 1 for n in looked} and 2 in looked.values()
    assert any(e.reason == "the test wants it out" for e in found.exclusions)


def test_it_is_what_looking_at_all_again_finds(
    graph: fx.GraphModule, seen: Counter[str], monkeypatch: pytest.MonkeyPatch
):
    found = partition(graph)
    made = {name: n for name, n in seen.items() if name.endswith("!")}
    monkeypatch.setattr(selection, "_behind", lambda refused: set(graph.graph.nodes))
    seen.clear()
    again = partition(graph)
    assert described(found.cuts) == described(again.cuts) and found.exclusions == again.exclusions
    assert len(found.cuts) >= 2 and sum(made.values()) < sum(n for name, n in seen.items() if name.endswith("!"))


def test_the_code_of_a_region_is_written_when_it_runs(graph: fx.GraphModule, monkeypatch: pytest.MonkeyPatch):
    written: list[fx.Graph] = []
    own = fx.Graph.python_code
    monkeypatch.setattr(
        fx.Graph, "python_code", lambda self, *args, **kw: written.append(self) or own(self, *args, **kw)
    )
    region = partition(graph).regions[0]
    assert not written
    values = [torch.zeros(tuple(n.meta["val"].shape), dtype=n.meta["val"].dtype)
              for n in region.graph.graph.find_nodes(op="placeholder")]  # fmt: skip
    assert len(region.graph(*values)) == len(region.results) and written
