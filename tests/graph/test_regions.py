"""Selection: convexity, what stays out and why."""

from __future__ import annotations

import eager_regions
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from modules import Fn, linear
from torch import Tensor, fx, nn
from torch.nn import functional as F

from tilestream.graph.capture import capture
from tilestream.graph.convexity import Groups, successors
from tilestream.graph.lowering import MAX_FEATURES, PARTS
from tilestream.graph.selection import POINTWISE, Partition, partition
from tilestream.ir.float32 import MOST_FEATURES, by_parts


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def cut(module: nn.Module, *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Partition:
    found = capture(module.to(dtype), [torch.randn(shape).to(dtype) for shape in shapes])
    return partition(found.graphs[0])


def reasons(found: Partition) -> dict[str, str]:
    return {e.op: e.reason for e in found.exclusions}


def test_an_unknown_operator_is_named_with_its_line():
    found = cut(Fn(lambda m, x: m.layers[0](x).sort(-1)[0], linear(9, 13)), (37, 9))
    (exclusion,) = found.exclusions
    assert exclusion.op == "aten.sort.default"
    assert exclusion.reason == "orders or scans elements"
    assert exclusion.source.startswith("test_regions.py:") and "sort(-1)" in exclusion.source


def test_a_path_through_an_outsider_splits_the_region():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.layers[0](x)
        return m.layers[1](h) + h.cumsum(-1).relu()

    found = cut(Fn(forward, linear(9, 13), linear(13, 13)), (37, 9))
    assert [len(r.operators) for r in found.regions] == [2] and len(found.regions[0].results) == 2
    assert set(reasons(found)) == {"aten.cumsum.default", "aten.relu.default", "aten.add.Tensor"}


@pytest.mark.parametrize(
    ("function", "layers", "shapes", "operator", "says"),
    [
        (lambda m, x: m.layers[0](x), [(9, MAX_FEATURES + 1)], [(37, 9)], "addmm", "513 features wide"),
        (lambda m, x: m.layers[0](x) + x.sum(0), [(9, 9)], [(37, 9)], "sum", "works along rows"),
        (lambda m, x: m.layers[0](x).softmax(0), [(9, 9)], [(37, 9)], "_softmax", "works along rows"),
        (lambda m, x: m.layers[0](x).view(-1).exp(), [(9, 4)], [(37, 9)], "exp", "nothing to stream"),
        (lambda m, x, y: m.layers[0](x)[:, None] + y, [(9, 4)], [(37, 9), (37, 5, 4)], "add", "broadcasts along rows"),
        (lambda m, x: torch.div(m.layers[0](x), 2, rounding_mode="floor"), [(9, 4)], [(37, 9)], "div", "rounding mode"),
        (lambda m, x: m.layers[0](x) > 0, [(9, 4)], [(37, 9)], "gt", "booleans"),
        (lambda m, x: m.layers[0](x)[:, ::2].exp(), [(9, 4)], [(37, 9)], "exp", "nothing to stream"),
    ],
)
@pytest.mark.every(3)
def test_reasons(function, layers, shapes, operator: str, says: str):
    found = cut(Fn(function, *(linear(*sizes) for sizes in layers)), *shapes)
    matching = [e.reason for e in found.exclusions if operator in e.op]
    assert matching and says in matching[0]


def test_float64_falls_back():
    found = cut(linear(9, 13), (37, 9), dtype=torch.float64)
    assert not found.regions
    assert "dtype float64" in reasons(found)["aten.addmm.default"]


def test_float32_is_multiplied_by_parts_under_torchs_default():
    (region,) = cut(linear(9, 13), (37, 9), dtype=torch.float32).regions
    assert by_parts(region.program)
    weight = next(p for p in region.parameters if p.steps[-1:] == PARTS)
    assert region.program.tensor(weight.tensor).shape == (13, 6 * 9)


def test_float32_stays_out_where_its_parts_would_be_less_exact():
    found = cut(linear(MOST_FEATURES + 1, 13), (37, MOST_FEATURES + 1), dtype=torch.float32)
    assert not found.regions and "highest" in reasons(found)["aten.addmm.default"]


def test_float32_follows_torchs_flag(tf32: None):
    (region,) = cut(linear(9, 13), (37, 9), dtype=torch.float32).regions
    assert not by_parts(region.program)


def test_pointwise_alone_is_left_to_inductor():
    found = cut(Fn(lambda m, x: x.exp().relu()), (37, 9))
    assert not found.regions
    assert {e.reason for e in found.exclusions} == {POINTWISE}


def test_different_row_counts_are_different_regions():
    found = cut(Fn(lambda m, x: m.layers[1](m.layers[0](x).mean(1)), linear(9, 13), linear(13, 2)), (4, 5, 9))
    assert [r.rows for r in found.regions] == [20, 4]


def test_attention_keeps_its_linears():
    module = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    found = cut(Fn(lambda m, x: m.layers[0](x, x, x, need_weights=False)[0], module), (2, 5, 16))
    operators = [op for r in found.regions for op in r.operators]
    assert [op for op in operators if "mm" in op] == ["aten.addmm.default"] * 2


def test_a_parameter_of_the_same_region_is_refused():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        keys, queries = m.layers[0](x), m.layers[1](x)
        return queries @ keys.t()

    found = cut(Fn(forward, linear(9, 9), linear(9, 9)), (37, 9))
    shapes = [t.shape for r in found.regions for t in r.program.tensors if len(t.shape) == 2]
    assert (37, 9) in shapes  # the keys are a whole operand of the second product
    for region in found.regions:
        assert len({t.name for t in region.program.tensors}) == len(region.program.tensors)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[fx.Node], set[int]]:
    """A random acyclic fx graph, and which of its nodes may be grouped."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for _ in range(draw(st.integers(2, 14))):
        operands = draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=3))
        nodes.append(graph.call_function(max, tuple(operands)))
    return nodes[1:], draw(st.sets(st.integers(0, len(nodes) - 2)))


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(graphs(), st.randoms())
def test_groups_never_make_a_cycle(made: tuple[list[fx.Node], set[int]], random):
    nodes, chosen = made
    groups = Groups(successors(nodes), {nodes[i]: frozenset() for i in chosen})
    pairs = [(a, b) for a in nodes for b in a.users]
    random.shuffle(pairs)
    for a, b in pairs:
        groups.merge(a, b)
    home = {n: tuple(g) for g in groups.all() for n in g}
    unit = {n: home.get(n, (n,)) for n in nodes}
    after = {u: {unit[s] for n in u for s in successors(nodes)[n]} - {u} for u in set(unit.values())}
    done: set[tuple[fx.Node, ...]] = set()
    while len(done) < len(after):
        ready = [u for u in after if u not in done and not any(u in after[v] for v in after if v not in done)]
        assert ready, "the contracted graph has a cycle"
        done.update(ready)


def test_features_that_a_weight_settles_are_not_dynamic():
    x = torch.randn(37, 64).bfloat16()
    torch._dynamo.maybe_mark_dynamic(x, 0)
    torch._dynamo.maybe_mark_dynamic(x, 1)
    module = Fn(lambda m, x: x + m.layers[0](x), linear(64, 64)).bfloat16()
    found = partition(capture(module, [x]).graphs[0])
    assert not found.exclusions and len(found.regions) == 1


def test_a_result_whose_size_nobody_is_told_stays_outside():
    """How many rows ``unique`` finds is not among what comes in: five times as many are."""

    def function(x: Tensor, weight: Tensor) -> list[Tensor]:
        found = torch.unique(F.linear(x, torch.eye(5, dtype=x.dtype)), dim=0)
        return [found, F.linear(found, weight)]

    inputs = (torch.randn(3, 5, 5)[torch.tensor([0, 1, 1, 2])].bfloat16(), torch.randn(5, 5).bfloat16())
    made = eager_regions.Regions(eager_regions.trace(function, inputs), "vertical")
    for result, want in zip(made(inputs), function(*inputs), strict=True):
        torch.testing.assert_close(result, want, rtol=1e-2, atol=1e-2)
