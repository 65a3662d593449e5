"""Where a chain of gradients is cut, so that little lives at once in a backward graph."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from torch import fx

from tilestream.apps.models import find
from tilestream.bench.saved import peak, saved
from tilestream.graph.kept import MOST_RESULTS, SMALL_BYTES, pieces
from tilestream.graph.live import Live
from tilestream.graph.nodes import aten

WIDTH = 256
ROWS = SMALL_BYTES // (2 * WIDTH) // 3
GRADIENT = 2 * WIDTH * ROWS
INDUCTORS_PEAK = 367 * 2**20
"""Of NeRF's step at 65,536 points, measured on an H200 (``benchmarks/results/training.json``)."""
UNCOUNTED = 6 * 2**20
"""What that step takes besides its backward graph: results, the loss, parameters' gradients, sums' partial sums."""


def chain(layers: int) -> tuple[fx.Graph, list[fx.Node]]:
    """A backward graph of equal layers with ReLUs, whose results were saved; and its gradients of activations."""
    graph = fx.Graph()

    def given(name: str, *shape: int) -> fx.Node:
        node = graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, device="meta", dtype=torch.bfloat16)
        return node

    def made(target: object, *args: object) -> fx.Node:
        node = graph.call_function(target, args)  # pyright: ignore[reportArgumentType]
        values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
        node.meta["val"] = target(*values)  # pyright: ignore[reportCallIssue]
        return node

    weights = [given(f"primals_{n}", WIDTH, WIDTH) for n in range(layers)]
    saved_rows = [given(f"relu_{n}", ROWS, WIDTH) for n in range(layers)]
    g = given("tangents_1", ROWS, WIDTH)
    group, sums = [], []
    for weight, row in zip(weights, reversed(saved_rows), strict=True):
        sums.append(made(aten.mm.default, made(aten.t.default, g), row))
        product = made(aten.mm.default, g, weight)
        g = made(aten.threshold_backward.default, product, row, 0)
        group += [product, g]
    graph.output((*sums, g))
    return graph, group


def steps(group: list[fx.Node]) -> list[list[fx.Node]]:
    return [group[n : n + 2] for n in range(0, len(group), 2)]


def test_what_lives_is_counted_by_steps() -> None:
    _, group = chain(5)
    live = Live.of(steps(group))
    weights = 5 * 2 * WIDTH * WIDTH
    # What was saved for a layer is freed by its weight's gradient; what comes in and what is made live beside it.
    assert [live.during(n, n + 1) - weights for n in range(5)] == [GRADIENT * (5 - n + 2) for n in range(5)]
    assert live.during(1, 4) - live.during(1, 2) == 2 * GRADIENT


@pytest.mark.parametrize("layers", [4, 7, 9])
def test_the_cut_has_the_lowest_peak_of_all(layers: int) -> None:
    _, group = chain(layers)
    found = pieces(group)
    assert [n for piece in found for n in piece] == group
    live = Live.of(steps(group))

    def most(bounds: tuple[int, ...]) -> int:
        return max(live.during(start, end) for start, end in pairwise(bounds))

    count = -(-layers // MOST_RESULTS)
    others = [(0, *cuts, layers) for cuts in combinations(range(1, layers), count - 1)]
    lengths = [len(piece) // 2 for piece in found]
    bounds = tuple(sum(lengths[:n]) for n in range(len(found) + 1))
    assert len(found) == count and most(bounds) == min(map(most, others))
    assert lengths == sorted(lengths)  # most of what was saved is there at first


def test_small_groups_and_what_was_spared_stay_whole() -> None:
    _, group = chain(4)
    assert len(pieces(group)) == 2
    assert pieces(group[:6]) == [group[:6]]
    assert pieces(group, spared=SMALL_BYTES) == [group]


def test_columns_are_no_gradients_to_count() -> None:
    graph, group = chain(3)
    wide, *others = group
    with graph.inserting_after(wide):
        column = graph.call_function(aten.mean.dim, (wide, [-1], True))
    column.meta["val"] = torch.empty(ROWS, 1, device="meta")
    graph.output_node().args = ((*graph.output_node().args[0], column),)  # pyright: ignore
    assert len(pieces([wide, column, *others])) == 1


def test_the_peak_of_a_graph_in_its_order() -> None:
    graph, _ = chain(2)
    weight = 2 * WIDTH * WIDTH
    # Two saved, the tangent and the product with it, or that and its derivative; a weight's gradient, which stays.
    assert peak(graph) == 4 * GRADIENT + weight


def test_nerf_takes_at_most_what_inductor_takes() -> None:
    module, inputs = find("nerf").make(training=True, rows=65_536)
    assert saved(module, inputs, least_rows=4096).ours.peak + UNCOUNTED <= INDUCTORS_PEAK
