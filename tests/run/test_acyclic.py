"""Launches of weight gradients never wait for each other in a circle, and read what is in the graph by then."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_reference import compiled
from random_training import wrong
from streamed import without_inductor
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from tilestream.devices import get
from tilestream.graph.convexity import in_order
from tilestream.graph.rewrites.broadcasts import put_off_expands
from tilestream.graph.rewrites.table import rewrite
from tilestream.graph.settled import settle
from tilestream.options import Options
from tilestream.plan.find import Found
from tilestream.plan.gradient_launches import GradientLaunch, gradient_launches, gradient_sites
from tilestream.plan.plan_graph import plan_graph
from tilestream.run import oracle, prepare
from tilestream.run.graphs import Measured
from tilestream.run.place import Calls
from tilestream.run.target import Target

pytestmark = pytest.mark.usefixtures("fresh", "without_inductor")

OPTIONS = Options(target="reference", cache=False)


def launches(graph: fx.Graph) -> list[GradientLaunch]:
    return gradient_launches(gradient_sites(graph, get("h200"), 1), get("h200"), [])


def traced(function: Callable[..., list[Tensor]], *shapes: tuple[int, ...]) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*(torch.zeros(s).bfloat16() for s in shapes))


def check(owner: fx.GraphModule) -> int:
    """Put the launches of a graph in place on the reference machine, which changes no result; how many there are."""
    values = [torch.randn(n.meta["val"].shape).bfloat16() for n in owner.graph.find_nodes(op="placeholder")]
    want = owner(*values)
    with oracle.Float64():
        exact = owner(*values)
    target = Target("reference", torch.device("cpu"), get("h200"))
    found = Found((), (), 0, owner, "backward", tuple(gradient_sites(owner.graph, target.hardware, 1)))
    made = plan_graph(found, Measured(OPTIONS, target), target.hardware)
    calls = Calls(owner)
    for each in made:
        assert isinstance(each.of, GradientLaunch)
        calls.of_sums(each.of, each.program, target.kind)
    calls.settle()
    assert oracle.judge(owner(*values), want, exact)[2]
    return len(made)


def of_one(dy: Tensor, a: Tensor, h: Tensor) -> list[Tensor]:
    """Two products of one dY: the second reads what the first makes."""
    first = dy.t() @ a
    return [first, dy.t() @ (h @ first).relu()]


def of_its_sum(dy: Tensor, a: Tensor) -> list[Tensor]:
    """A product that reads the sum over rows of the same dY."""
    total = dy.sum(0)
    return [total, dy.t() @ (a * total[0])]


def of_a_product(dy: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    """A product whose dY is another's result, and a third beside it."""
    first = dy.t() @ a
    return [first.t() @ b, first.t() @ (b * 2)]


def crosswise(dy: Tensor, dz: Tensor, a: Tensor, h: Tensor) -> list[Tensor]:
    """Two pairs, each of one gradient: the second of each reads the first of the other."""
    one, two = dy.t() @ a, dz.t() @ a
    return [one, two, dy.t() @ (h @ two), dz.t() @ (h @ one)]


@pytest.mark.parametrize(("function", "shapes", "count"), [
    (of_one, ((65, 16), (65, 24), (65, 16)), 2),
    (of_its_sum, ((65, 16), (65, 24)), 1),
    (of_a_product, ((65, 16), (65, 24), (16, 8)), 2),
    (crosswise, ((65, 16), (65, 16), (65, 24), (65, 16)), 3),
])  # fmt: skip
def test_what_waits_for_each_other_is_no_launch(
    function: Callable[..., list[Tensor]], shapes: tuple[tuple[int, ...], ...], count: int
):
    owner = traced(function, *shapes)
    found = launches(owner.graph)
    groups = [[node for site in launch.sites for node in site.nodes] for launch in found]
    alone = [[n] for n in owner.graph.nodes if all(n not in group for group in groups)]
    in_order([*groups, *alone], lambda n: n.all_input_nodes)  # would raise
    assert check(owner) == count


def test_regions_count_as_one_when_launches_are_begun():
    """Before regions are placed, a launch may wait for a region's one node, and the region's other for the launch."""

    def run(dy: Tensor, a: Tensor, h: Tensor) -> list[Tensor]:
        left, right = dy.relu(), dy.sigmoid()  # of one region
        later = (h @ (left.t() @ a)).relu()  # which, in it, makes the region wait for the first product
        return [later, right.t() @ a]

    owner = traced(run, (65, 16), (65, 24), (65, 16))
    relu, sigmoid, later = (n for n in owner.graph.nodes if "relu" in n.name or "sigmoid" in n.name)
    sites = gradient_sites(owner.graph, get("h200"), 1)
    assert len(sites) == 2
    assert len(gradient_launches(sites, get("h200"), [[relu, sigmoid]])) == 1
    # `later` with the second gradient: the second product waits for that region, which waits for the first.
    apart = gradient_launches(sites, get("h200"), [[relu], [sigmoid, later]])
    assert [len(launch.sites) for launch in apart] == [1, 1]


def test_one_row_of_one_column():
    """The gradient of one column's input looks like a weight's: `t(dY) @ W`, of which dY is a launch's result."""
    net = nn.Sequential(nn.Linear(8, 1), nn.Linear(1, 64)).bfloat16()
    x = torch.randn(1, 8).bfloat16().requires_grad_()
    wanted = [x, *net.parameters()]
    want = torch.autograd.grad(net(x).sum(), wanted)
    got = torch.autograd.grad(compiled(net)(x).sum(), wanted)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.05)


class Beside(nn.Module):
    """An input beside other columns: its gradient is a slice of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 16).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.cat([x, x.detach().repeat(1, 4)], -1))


@pytest.mark.usefixtures("quick")
def test_a_gradient_that_is_a_slice_has_its_strides():
    """As eager, AOTAutograd and Inductor give it: [37, 4] by (20, 1)."""
    module = Beside()

    def strides(function: Any) -> tuple[int, ...]:
        x = torch.ones(37, 4).bfloat16().requires_grad_()
        return torch.autograd.grad(function(x).float().square().sum(), x)[0].stride()

    assert strides(compiled(module)) == strides(torch.compile(module, backend="aot_eager")) == strides(module)


def test_the_gradient_of_a_mean_has_elements_of_its_own():
    """Autograd's ``expand(g) / n``: an expand of ``g / n`` would be one element in many places, which a caller sees."""

    def returned(g: Tensor, x: Tensor) -> Tensor:
        return g.expand(37, 8) / 8

    def used(g: Tensor, x: Tensor) -> Tensor:
        return g.expand(37, 8) / 8 * x

    for function, count in ((returned, 0), (used, 2)):
        assert rewrite(traced(function, (37, 1), (37, 8)), put_off_expands) == count


def test_a_circle_is_named():
    owner = fx.symbolic_trace(lambda x: (x + 1) * 2)
    add, multiply = (n for n in owner.graph.nodes if n.op == "call_function")
    add.args = (multiply, 1)
    with pytest.raises(RuntimeError, match="no order of the graph has its operands first: add"):
        settle(owner, sort=True)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tf32: None):
    without_inductor(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.usefixtures("quick")
def test_random_training_steps():
    """Under TILESTREAM_STRICT, as all tests are: an exception of ours would be raised."""
    for seed in (
        *range(5),
        301,
        483,
    ):  # the last two: sums of one column; a gradient of three dimensions between launches
        assert not (found := wrong(seed)), f"seed {seed}: {found}"
    assert any(a.name.startswith("gradients") for a in prepare.analyses())


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick")
def test_many_random_training_steps():
    count, start = (int(n) for n in os.environ.get("TILESTREAM_GRAPHS", "1000@0").split("@"))
    problems = []
    for seed in range(start, start + count):
        try:
            found = wrong(seed)
        except Exception as failure:
            found = f"{type(failure).__name__}: {failure}"
        if found:
            problems.append(f"seed {seed}: {found}")
            print(problems[-1], flush=True)
    assert not problems
