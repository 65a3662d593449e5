"""Graphs run eagerly, but for their regions, which the reference machine runs: the front end without torch.compile.

>>> traced = trace(function, inputs)
>>> run = Regions(traced)
>>> run(inputs)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from rewritten import normal
from streamed import interpreted
from torch import Tensor, fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from tilestream.devices import get
from tilestream.errors import PlanError
from tilestream.graph.capture import boxed
from tilestream.graph.selection import partition
from tilestream.ir.pipeline import Pipeline
from tilestream.ir.shapes import check_shapes
from tilestream.options import Options
from tilestream.plan import planner
from tilestream.run import oracle
from tilestream.run.place import with_sizes

STRATEGIES = ("vertical", "spatial", "bulk")
FEW = 8
"""Elements of a gradient that is a sum over all rows, as a bias's."""
SHAKEN = 4
"""A result that is off by so many times what a rounding of the inputs moves it is wrong."""


def trace(function: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """The functional ATen graph of ``function``, undecomposed, as AOTAutograd hands it to a back end."""

    def flat(*tensors: Tensor) -> list[Any]:
        return pytree.tree_leaves(function(*tensors))

    with torch.no_grad():
        return make_fx(functionalize(flat, remove="mutations"), tracing_mode="fake")(*inputs)


class Regions:
    """A callable that takes the values of the graph's placeholders, and returns those of its outputs.

    ``operators`` are those of each region, and ``taken`` counts them. ``unplanned`` says which regions have no legal
    pipeline of the strategy: the reference machine runs the program as it is.
    """

    def __init__(self, graph: fx.GraphModule, strategy: str = "vertical") -> None:
        self.graph = normal(graph)
        self.unplanned: list[str] = []
        self.operators: list[tuple[str, ...]] = []
        self._home: dict[fx.Node, tuple[Callable[..., Any], tuple[str, ...], tuple[fx.Node, ...]]] = {}
        for cut in partition(self.graph).cuts:
            region = with_sizes(cut.region, self.graph)
            check_shapes(region.program)
            pipeline, problem = pipeline_of(region.program, region.rows, strategy)
            self.unplanned += [problem] if problem else []
            self.operators.append(region.operators)
            call = interpreted(region, pipeline).on_values
            self._home |= dict.fromkeys(cut.nodes, (call, region.arguments, cut.outputs))

    @property
    def taken(self) -> int:
        return sum(map(len, self.operators))

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        nodes = {n.name: n for n in self.graph.graph.nodes}
        known: dict[fx.Node, Any] = {}
        given = iter(values)
        for node in nodes.values():
            if node.op == "placeholder":
                known[node] = next(given)
            elif node.op == "get_attr":
                known[node] = getattr(self.graph, str(node.target))
        with torch.no_grad():
            for node in nodes.values():
                if node.op == "call_function":
                    self._need(node, known, nodes)
            (results,) = next(n for n in nodes.values() if n.op == "output").args
            return list(pytree.tree_map_only(fx.Node, lambda n: self._need(n, known, nodes), results))

    def _need(self, node: fx.Node, known: dict[fx.Node, Any], nodes: dict[str, fx.Node]) -> Any:
        """The value of a node, after those that it needs."""
        wanted = [node]
        while wanted:
            top = wanted[-1]
            if top in known:
                wanted.pop()
                continue
            call, arguments, outputs = self._home.get(top, (None, (), ()))
            needs = [nodes[a] for a in arguments] if call else top.all_input_nodes
            if missing := [n for n in needs if n not in known]:
                wanted += missing
            elif call:
                known.update(zip(outputs, call([known[n] for n in needs]), strict=True))
                if top not in known:  # inside a region, and of no use outside
                    known[top] = None
            else:
                args, kwargs = fx.map_arg((top.args, top.kwargs), lambda n: known[n])
                known[top] = top.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        return known[node]


@lru_cache(maxsize=4096)
def pipeline_of(program: Pipeline, rows: int, strategy: str) -> tuple[Pipeline, str]:
    """A legal pipeline of the strategy for ``program``, or the program itself and why there is none."""
    try:
        made = planner.plan(program, rows, get("h200"), Options(strategy=strategy, cache=False))
    except PlanError as problem:
        return program, problem.cause
    legal = [c.pipeline for c in made.candidates if c.pipeline is not None and not c.rejected]
    return (legal[0], "") if legal else (program, "no legal pipeline")


def compiled(function: Callable[..., Any], strategy: str = "vertical") -> tuple[Callable[..., Any], list[Regions]]:
    """``function`` by way of Dynamo, which knows symbolic sizes, and the graphs that it turns out to have."""
    from torch._dynamo.backends.common import aot_autograd

    made: list[Regions] = []

    def compiler(graph: fx.GraphModule, _: Any) -> Any:
        made.append(Regions(graph, strategy))
        return boxed(made[-1])

    def backend(graph: fx.GraphModule, example: list[Any]) -> Any:
        return aot_autograd(fw_compiler=compiler, inference_compiler=compiler)(graph, example)

    return torch.compile(function, backend=backend), made


class Trained:
    """``function`` with gradients, by AOTAutograd's forward and backward graph: traced once, run many times."""

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
        from functorch.compile import aot_function

        self._function, self._inputs = aot_function(function, self._compiled, self._compiled), inputs
        self._strategy, self._made = "", []

    def run(self, strategy: str = "") -> tuple[list[Any], list[Regions]]:
        """Results and gradients of the inputs; without a ``strategy`` both graphs run eagerly."""
        self._strategy, self._made = strategy, []
        return gradients(self._function, self._inputs), self._made

    def _compiled(self, graph: fx.GraphModule, _: Any) -> Any:
        def call(values: list[Any]) -> Any:
            if not self._strategy:
                return graph(*values)
            self._made.append(Regions(graph, self._strategy))
            return self._made[-1](values)

        return boxed(call)


def gradients(function: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Any]:
    """Results of ``function``, then the gradients of every input that has one, of a sum with fixed weights."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    results = [r for r in pytree.tree_leaves(function(*leaves)) if isinstance(r, Tensor)]
    total = sum((r.double() * _weights(r)).sum() for r in results if r.requires_grad)
    wanted = [x for x in leaves if x.requires_grad]
    found = torch.autograd.grad(total, wanted, allow_unused=True) if isinstance(total, Tensor) else ()
    return [r.detach() for r in results] + [g for g in found if g is not None]


def _weights(result: Tensor) -> Tensor:
    return torch.cos(torch.arange(result.numel(), dtype=torch.float64)).reshape(result.shape)


def judge(
    got: Sequence[Any],
    plain: Sequence[Any],
    exact: Sequence[Any],
    cancels: bool = False,
    terms: int = 1,
    moved: Sequence[float] = (),
) -> str:
    """What is wrong with results: empty, or the worst error. Whatever is not a floating tensor must be equal.

    Args:
        cancels: results are sums over rows, as gradients are, whose terms may cancel. Two roundings more are allowed,
            and where few elements are left, they are held against the size of the other results' elements.
        terms: the most numbers that one result is a sum of; in two orders, sums of n are some sqrt(n) roundings apart.
        moved: by how much one rounding of the inputs moves each exact result. Behind a softmax of large scores, or a
            difference of near numbers, who rounds otherwise than eager is off by as much, and eager may be lucky.
    """
    size = max((x.double().square().mean().sqrt().item() for x in exact if _has_numbers(x)), default=0.0)
    if len(got) != len(plain):
        return f"{len(got)} results for {len(plain)}"
    for i, (mine, theirs, reference64) in enumerate(zip(got, plain, exact, strict=True)):
        if not isinstance(theirs, Tensor):
            if mine != theirs:
                return f"{mine} for {theirs}"
            continue
        if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            return f"{mine.dtype} {tuple(mine.shape)} for {theirs.dtype} {tuple(theirs.shape)}"
        if not theirs.is_floating_point():
            if not torch.equal(mine, theirs):
                return "other integers"
            continue
        error, own = oracle.error(mine, reference64), oracle.error(theirs, reference64)
        if cancels and mine.numel() <= FEW and (norm := reference64.double().norm().item()) > 0:
            error *= norm / max(norm, size * mine.numel() ** 0.5)
        # Where eager happens to be exact: roundings of a 16-bit output, sums in another order in float32.
        roundings = max(8.0, terms**0.5) if mine.dtype == torch.float32 else 4 if cancels else 2
        floor = max(roundings * torch.finfo(mine.dtype).eps, SHAKEN * moved[i] if moved else 0.0)
        allowed = max(oracle.tolerance(own, mine.dtype), floor)
        if error > allowed and not torch.equal(mine, theirs):
            return f"error {error:.2e}, eager's {own:.2e}"
    return ""


def _has_numbers(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.numel() > 0 and bool(x.isfinite().all())


def strategy_of(seed: int) -> str:
    return random.Random(seed).choice(STRATEGIES)
