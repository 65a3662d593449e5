"""ATen operators lowered to indexed reductions, forward and backward, against PyTorch in float64; what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from tilestream.errors import PipelineDeadlock, VerifyError
from tilestream.graph.nodes import Unsupported
from tilestream.ir.axes import Level, Loop, Spread
from tilestream.ir.pipeline import Pipeline, Queue, Stage
from tilestream.ir.read import axes, tensors
from tilestream.ir.read import program as read
from tilestream.ir.verify import verify
from tilestream.reference.mesh_machine import run_meshes
from tilestream.reference.ops import FLOAT64
from tilestream.studies.kitsune.compiler.free import base
from tilestream.studies.kitsune.lowering.program import program
from tilestream.studies.kitsune.record import record


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def i(most: int, *shape: int) -> torch.Tensor:
    """An index below ``most``."""
    return torch.randint(most, shape)


FORMS: dict[str, tuple[Callable[..., object], tuple[torch.Tensor, ...]]] = {
    "linear": (F.linear, (x(2, 5, 7), x(3, 7), x(3))),
    "linear of one feature": (F.linear, (x(6, 7), x(1, 7), x(1))),
    "addmm scaled": (lambda a, b, c: torch.addmm(c, a, b, alpha=0.5, beta=2.0), (x(4, 6), x(6, 5), x(5))),
    "bmm": (torch.bmm, (x(3, 4, 6), x(3, 6, 5))),
    "baddbmm": (lambda a, b, c: torch.baddbmm(c, a, b, alpha=3.0), (x(3, 4, 6), x(3, 6, 5), x(4, 5))),
    "a matrix by itself": (lambda a: a @ a.t(), (x(5, 7),)),
    "a square by itself": (lambda a: a @ a, (x(5, 5),)),
    "rows by themselves": (lambda a: a @ a.transpose(1, 2), (x(2, 5, 7),)),
    "broadcasts": (lambda a, b, c: a * b + c - 2.0 / (a * a + 1.0), (x(2, 5, 7), x(5, 1), x(7))),
    "activations": (lambda a: F.silu(a) + F.gelu(a) * torch.sigmoid(a) - torch.tanh(F.relu(a)), (x(4, 6),)),
    "layer norm": (lambda a, w, b: F.layer_norm(a, (7,), w, b), (x(2, 5, 7), x(7), x(7))),
    "layer norm of two": (lambda a: F.layer_norm(a, (5, 7)), (x(3, 5, 7),)),
    "softmax": (lambda a: F.softmax(a, -1), (x(2, 5, 7),)),
    "softmax of rows": (lambda a: F.softmax(a, 1), (x(2, 5, 7),)),
    "log softmax": (lambda a: F.log_softmax(a, 0), (x(5, 7),)),
    "rms norm by hand": (lambda a, w: a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-5) * w, (x(2, 5, 8), x(8))),
    "sums": (lambda a: (a.sum(0), a.sum((0, 2), keepdim=True), a.mean(-1), a.sum()), (x(3, 5, 7),)),
    "cat of features": (lambda a, b: torch.relu(torch.cat([a, b, a], -1)), (x(4, 5), x(4, 1))),
    "cat of rows": (lambda a, b: torch.sigmoid(torch.cat([a, b], 0)), (x(4, 5), x(2, 5))),
    "stack": (lambda a, b: torch.relu(torch.stack([a, b], 1)), (x(4, 5), x(4, 5))),
    "slices": (lambda a: torch.relu(a)[:, 1:4] * torch.relu(a)[:, 4:], (x(4, 7),)),
    "slices with a step": (lambda a: torch.relu(a)[:, 1:7:2] * torch.relu(a)[:, 4:], (x(4, 7),)),
    "select": (lambda a: torch.relu(a)[1] * torch.relu(a)[:, 2].sum(), (x(4, 7),)),
    "split": (lambda a: torch.cat([p * 2.0 for p in torch.relu(a).split(3, 1)], 1), (x(4, 6),)),
    "views": (lambda a: torch.relu(torch.relu(a).view(4, 3, 2).permute(1, 0, 2).reshape(3, 8)), (x(2, 2, 6),)),
    "expand": (lambda a: torch.relu(a).unsqueeze(1).expand(4, 3, 5) * 2.0, (x(4, 5),)),
    "rows by an index": (lambda a, j: torch.relu(a.index_select(0, j)), (x(6, 5), i(6, 9).int())),
    "columns by an index": (lambda a, j: a.index_select(-1, j) * 2.0, (x(4, 6), i(6, 9))),
    "an index of two dimensions": (lambda a, j: torch.relu(a[j]).sum(1), (x(6, 5), i(6, 4, 3))),
    "an index from the end": (lambda a, j: torch.relu(a[:, j]), (x(4, 6, 3), i(6, 8) - 6)),
    "pairs by two indices": (lambda a, j, k: a[:, j, k] * 2.0, (x(4, 6, 5), i(6, 8), i(5, 8) - 5)),
    "an index of one element": (lambda a, j: a[j] * 2.0, (x(6, 5), i(6, 1))),
    "a table": (lambda a, j: F.embedding(j, a) * 0.5, (x(7, 4), i(7, 2, 5))),
    "tables, stacked": (
        lambda a, b, j, k: torch.stack([F.embedding(j, a), F.embedding(k, b)], 1),
        (x(7, 4), x(5, 4), i(7, 6), i(5, 6)),
    ),
    "elements by an index": (lambda a, j: torch.gather(a, 1, j) * 2.0, (x(4, 6), i(6, 4, 3))),
    "rows of elements by an index": (lambda a, j: torch.gather(a, 0, j), (x(4, 6, 2), i(4, 5, 6, 2))),
    "sums by an index": (lambda a, j: a.new_zeros(6, 5).index_add(0, j, torch.sin(a)), (x(9, 5), i(6, 9))),
    "sums onto rows": (lambda a, b, j: torch.relu(a).index_add(0, j, b, alpha=0.5), (x(6, 5), x(9, 5), i(6, 9))),
    "sums of columns": (lambda a, b, j: a.index_add(1, j, b * b), (x(4, 6), x(4, 9), i(6, 9))),
    "sums of elements": (lambda a, b, j: a.scatter_add(1, j, b.sigmoid()), (x(4, 6), x(4, 3), i(6, 4, 3))),
    "sums of rows, the index expanded": (
        lambda a, j: a.new_zeros(6, 5).scatter_add(0, j[:, None].expand(9, 5), a),
        (x(9, 5), i(6, 9)),
    ),
    "sums by a list": (lambda a, b, j: a.index_put([j], b, accumulate=True), (x(6, 5), x(2, 4, 5), i(6, 2, 4))),
    "one value to many": (lambda a, b, j: a.index_put([j], b, accumulate=True), (x(6, 5), x(5), i(6, 7))),
    "messages": (
        lambda e, u, v, w, j, k: e.new_zeros(7, 3).index_add(0, k, F.linear(torch.cat([e, u[j], v[k]], 1), w)),
        (x(11, 4), x(7, 5), x(7, 5), x(3, 14), i(7, 11), i(7, 11)),
    ),
    "heads": (
        lambda a, w: torch.softmax(h := F.linear(a, w).view(2, 5, 3, 4).transpose(1, 2), -1) @ h.transpose(2, 3),
        (x(2, 5, 7), x(12, 7)),
    ),
}
"""A function and its inputs, each of which takes a gradient, but for indices."""


class Form(nn.Module):
    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> object:
        return self.function(*inputs)


def written(graph: fx.Graph) -> tuple[Pipeline, object]:
    """All of a graph as a stage without loops."""
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    output = next(n for n in graph.nodes if n.op == "output")
    results = [n for n in dict.fromkeys(output.all_input_nodes) if base(n) in nodes]
    made = program({"all": nodes}, [(n, 0) for n in results])
    stage = Stage("all", (*made.ops["all"], *(op for s in made.stored for op in s.ops)), ())
    return Pipeline("form", made.tensors, (stage,)), made


def wide(value: Any) -> Any:
    """In float64, as what a graph makes of nothing (zeros) is not."""
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def checked(graph: fx.Graph, values: dict[str, torch.Tensor]) -> None:
    """Every result of ``graph``, whose placeholders have ``values``, in float64."""
    p, made = written(graph)
    env = dict(values)
    for node in graph.nodes:
        if node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: env[n.name])  # pyright: ignore
            env[node.name] = wide(node.target(*args, **kwargs))
    given = {g.tensor.name: g.of(env[g.node.name]) for g in made.given}
    taken = {n for op in p.stages[0].ops for v in op.views for n in (v.of, *(at.index for at in v.at or ()))}
    got = run_meshes(p, {n: v for n, v in given.items() if n in taken}, FLOAT64)
    assert made.stored
    for stored in made.stored:
        want = env[stored.result[0].name]
        torch.testing.assert_close(got[stored.tensor.name].reshape(stored.shape), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.every(3)
def test_forward_and_backward(name: str) -> None:
    function, inputs = FORMS[name]
    torch.manual_seed(0)
    forward_only = name == "slices with a step"  # its gradient is refused below
    given = [a.detach().requires_grad_(a.is_floating_point() and not forward_only) for a in inputs]
    recorded = record(Form(function), given, "inference" if forward_only else "training")
    values: dict[str, torch.Tensor] = {}
    for graph in filter(None, (recorded.forward, recorded.backward)):
        for node in graph.nodes:
            if node.op == "placeholder" and node.name not in values:
                place = recorded.places.get(node.name)
                index = isinstance(place, int) and not inputs[place].is_floating_point()
                shape = node.meta["val"].shape
                values[node.name] = inputs[place] if index else torch.randn(shape, dtype=torch.float64)
        if graph is recorded.forward:
            checked(graph, values)
            for node in graph.nodes:
                if node.op == "call_function":
                    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n.name])  # pyright: ignore
                    values[node.name] = wide(node.target(*args, **kwargs))
        elif any(n.op == "call_function" for n in graph.nodes):
            checked(graph, values)


@pytest.mark.parametrize(
    ("function", "inputs", "why"),
    [
        (lambda a: a.sort()[0], (x(4, 5),), "orders or scans elements"),
        (lambda a: a.cumsum(0), (x(4, 5),), "orders or scans elements"),
        (lambda a: torch.where(a > 0, a, 0.0), (x(4, 5),), "booleans"),
        (lambda a, j: torch.relu(a)[j], (x(4, 5), i(4, 3)), "what its own pipeline makes"),
        (lambda a, j: a.index_put([j], a[j]), (x(4, 5), i(4, 3)), "the last would win"),
        (lambda a, j, k: a[j, :, k], (x(4, 5, 6), i(4, 3), i(4, 3)), "that are apart"),
        (lambda a, j: a.new_zeros(4, 5).index_add(0, j, a) + 1.0, (x(3, 5), i(4, 3)), "before it is complete"),
        (lambda a, j: torch.gather(a, 1, j), (x(4, 5), i(5, 3, 2)), "leaves out a part"),
        (lambda a: (b := torch.relu(a)).view(6, 2)[1:5].sum() + b.sum(1).sum(), (x(3, 4),), "that a view divides"),
    ],
)
def test_what_is_not_lowered_says_why(function, inputs, why: str) -> None:
    recorded = record(Form(function), inputs, "inference")
    with pytest.raises(Unsupported, match=why):
        written(recorded.forward)


def test_neighbouring_axes_are_one_and_equal_ones_stay_apart() -> None:
    function, inputs = FORMS["layer norm"]
    p, _ = written(record(Form(function), inputs, "inference").forward)
    assert {a.size for t in p.tensors for a in t.axes} == {10, 7}  # [2, 5] are rows
    p, _ = written(record(Form(FORMS["a matrix by itself"][0]), (x(5, 7),), "inference").forward)
    (product,) = (op for op in p.stages[0].ops if op.kind == "product")
    assert product.out is not None and len({a.name for a in product.out.axes}) == 2


# -- rings between stages of different meshes


@pytest.mark.parametrize("makes", [1, 2, 3, 4])
@pytest.mark.parametrize("takes", [1, 2, 3, 5])
@pytest.mark.every(3)
def test_a_ring_that_the_verifier_accepts_never_stops(makes: int, takes: int) -> None:
    names = axes("rows c=4")
    first = read("a[rows,c] = load X[rows,c]\n b[rows,c] = relu a", names)
    second = read("d[rows,c] = neg b\n d -> Y[rows,c]", names, b="rows,c")

    def made(depth: int) -> Pipeline:
        stages = (
            Stage("first", first, (Loop("rows", 2),), (Spread(Level.GRID, makes, ("rows",)),)),
            Stage("second", second, (Loop("rows", 2),), (Spread(Level.GRID, takes, ("rows",)),)),
        )
        queues = (Queue("b", "first", ("second",), depth=depth),)
        return Pipeline("pair", tensors("X[rows,c]:f32 >Y[rows,c]:f32", names), stages, queues)

    least = next(d for d in range(1, 20) if _accepted(made(d)))
    value = torch.randn(60, 4).double()
    got = run_meshes(made(least), {"X": value}, FLOAT64)["Y"]
    assert torch.equal(got, -value.relu())
    if least > 1:
        with pytest.raises(PipelineDeadlock):
            run_meshes(made(least - 1), {"X": value}, FLOAT64)


def _accepted(p: Pipeline) -> bool:
    try:
        verify(p)
    except VerifyError:
        return False
    return True


def test_a_reader_that_takes_all_at_once_needs_room_for_all() -> None:
    names = axes("rows=8 c=4")
    first = read("a[rows,c] = load X[rows,c]\n b[rows,c] = relu a", names)
    second = read("d[c]:f32 = sum b\n d -> Y[c]", names, b="rows,c")
    stages = (Stage("first", first, (Loop("rows", 2),)), Stage("second", second, ()))
    kinds = tensors("X[rows,c] >Y[c]:f32", names)
    with pytest.raises(VerifyError, match="depth 2 < 4: .* make 1 at once, those of 'second' take 4"):
        verify(Pipeline("all", kinds, stages, (Queue("b", "first", ("second",), depth=2),)))
