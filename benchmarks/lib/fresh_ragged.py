"""Three sets of forty kernels of segments, drawn by seeds: what the simulator is held against.

On the *validation* set constants were fitted; the *fresh* one was looked at since it was measured; the *third* one is
to be measured once, when its predictions are final. Each is a pipeline as a layer of a
graph network has it, its graph, and what it makes in float64. Widths, heads, dtypes, numbers of nodes and edges and the
kind of graph are drawn; sizes are log-uniform. Seeds and this file were committed before anything of a set was
measured.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp, log

import torch
from torch import Tensor as T

from tilestream.ir.axes import Axis, Level, Loop, Spread
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.lengths import Lengths
from tilestream.ir.pipeline import Pipeline, Role, Stage, Tensor
from tilestream.ir.read import axes, program, tensors

SEEDS = {"validation": 261_124, "fresh": 261_125, "third": 261_129}
SENDERS = 1000
"""Added to a graph's seed where its senders are drawn: of the same one, a uniform graph's senders are its receivers, so
that the edges of a node all read one row. Those of the first two sets' first measurements were."""
NAMES = ("reduce", "weighted", "aggregators", "gated", "softmax", "attention")
COUNTS = {"reduce": 10, "weighted": 6, "aggregators": 6, "gated": 6, "softmax": 6, "attention": 6}
COMBINE = {"sum": "", "max": " combine=max empty=0.0", "min": " combine=min empty=0.0"}
GRAPHS = ("uniform", "power law", "equal", "log-normal")
MOST_BYTES = 6e8
"""Of the rows that edges read."""

Given = Mapping[str, T]


@dataclass(frozen=True)
class RaggedCase:
    """A kernel and its graph.

    Attributes:
        widths: of each table or tensor of edges, behind its rows.
        exact: results in float64, by name, of all tensors in float64 (indices int64) and ``receivers`` [edges].
    """

    name: str
    pipeline: Pipeline
    widths: Mapping[str, tuple[int, ...]]
    dtype: str
    graph: str
    nodes: int
    edges: int
    exact: Callable[[Given], Given]

    def index(self, device: str, seed: int) -> T:
        """Receivers [edges] int64, in no order."""
        g = torch.Generator(device).manual_seed(seed)
        n, e = self.nodes, self.edges
        if self.graph == "equal":
            return torch.arange(e, device=device) % n
        if self.graph == "uniform":
            return torch.randint(n, (e,), generator=g, device=device)
        if self.graph == "power law":
            share = torch.arange(1, n + 1, device=device, dtype=torch.float32) ** -0.75
        else:
            share = torch.exp(torch.randn(n, generator=g, device=device))
        return torch.multinomial(share, e, replacement=True, generator=g)

    def tensors(self, device: str, order: T, receivers: T, seed: int) -> dict[str, T]:
        """All but the bounds: tables [nodes, ...], tensors of edges [edges, ...] and the indices."""
        g = torch.Generator(device).manual_seed(seed + SENDERS)
        src = torch.randint(self.nodes, (self.edges,), generator=g, device=device)
        made: dict[str, T] = {"src": src[order.long()].int(), "order": order}
        for name, width in self.widths.items():
            rows = self.edges if name[0] == "E" else self.nodes
            made[name] = torch.randn(rows, *width, generator=g, device=device).to(TORCH_DTYPES[self.dtype])
        names = {t.name for t in self.pipeline.tensors}
        return {name: value for name, value in made.items() if name in names}

    def lengths(self, starts: T) -> Lengths:
        return Lengths.of(starts.diff().tolist())


def cases(of: str) -> list[RaggedCase]:
    """All forty of a set, the same every time."""
    return [_case(SEEDS[of], kind, number) for kind in NAMES for number in range(COUNTS[kind])]


def _case(seed: int, kind: str, number: int) -> RaggedCase:
    draw = random.Random(f"{seed} {kind} {number}")

    def between(low: float, high: float) -> int:
        return round(exp(draw.uniform(log(low), log(high))))

    dtype = draw.choice(("bf16", "bf16", "f16", "f32"))
    heads, width = 1, 4 * between(4, 72)
    if kind in ("softmax", "attention"):
        heads, width = draw.choice((1, 2, 4, 8)), 8 * between(1, 10)
    graph = draw.choice(GRAPHS)
    nodes, mean = between(20_000, 400_000), between(3, 40)
    most = MOST_BYTES / (heads * width * (4 if dtype == "f32" else 2))
    edges = min(nodes * mean, int(most))
    text, given, widths, exact = _KINDS[kind](draw, heads, width)
    text = re.sub(r"^(\w+\[[\w,]+\]) = ", rf"\1:{dtype} = ", text, flags=re.MULTILINE)
    known = axes(f"nodes edges=starts[nodes] starts.rows x.rows h={heads} c={width}")
    stage = Stage(
        "all", program(text, known), (Loop("nodes", 8), Loop("edges", 8)), (Spread(Level.GRID, 264, ("nodes",)),)
    )
    typed = " ".join(word if ":" in word else f"{word}:{dtype}" for word in given.split())
    busy = Tensor("starts.busy", Role.PARAMETER, (Axis("starts.busy.rows"),), "i32")
    listed = tensors(f"starts[starts.rows]:i32 {typed}", known)
    pipeline = Pipeline("ragged", (*listed, busy), (stage,))
    size = f"{heads} x {width}" if heads > 1 else str(width)
    name = f"{kind} {number}: {size} {dtype}, {nodes:,} nodes, {edges:,} edges, {graph}"
    return RaggedCase(name, pipeline, widths, dtype, graph, nodes, edges, exact)


Kind = tuple[str, str, dict[str, tuple[int, ...]], Callable[[Given], Given]]


def _reduced(g: Given, values: T, how: str = "sum") -> T:
    """Of ``values`` [edges, ...] at each node, 0 where there are none."""
    made = values.new_zeros(g["nodes"].shape[0], *values.shape[1:])
    if how == "sum":
        return made.index_add(0, g["receivers"], values)
    at = g["receivers"].view(-1, *[1] * (values.dim() - 1)).expand(values.shape)
    return made.scatter_reduce(0, at, values, f"a{how}", include_self=False)


def _reduce(draw: random.Random, _: int, width: int) -> Kind:
    how, own = draw.choice(sorted(COMBINE)), draw.random() < 0.5
    lines = ["x[edges,c] = copy X[src[edges],c]", f"s[nodes,c]:f32 = product x{COMBINE[how]}"]
    lines += ["o[nodes,c] = copy O[nodes,c]", "y[nodes,c]:f32 = add s o"] if own else []
    text = "\n".join([*lines, f"{'y' if own else 's'} -> Y[nodes,c]"])
    given = f"src[edges]:i32 X[x.rows,c] {'O[nodes,c] ' if own else ''}>Y[nodes,c]"

    def exact(g: Given) -> Given:
        return {"Y": _reduced(g, g["X"][g["src"]], how) + (g["O"] if own else 0)}

    return text, given, {"X": (width,), **({"O": (width,)} if own else {})}, exact


def _weighted(draw: random.Random, _: int, width: int) -> Kind:
    text = (
        "x[edges,c] = copy X[src[edges],c]\nw[edges] = copy E[order[edges]]\nm[edges,c]:f32 = mul x w\n"
        "s[nodes,c]:f32 = product m\ns -> Y[nodes,c]"
    )
    given = "src[edges]:i32 order[edges]:i32 X[x.rows,c] E[edges] >Y[nodes,c]"
    return (
        text,
        given,
        {"X": (width,), "E": ()},
        lambda g: {"Y": _reduced(g, g["X"][g["src"]] * g["E"][g["order"]][:, None])},
    )


def _aggregators(draw: random.Random, _: int, width: int) -> Kind:
    kinds = draw.sample(sorted(COMBINE), draw.choice((2, 3)))
    lines = ["x[edges,c] = copy X[src[edges],c]"]
    lines += [f"{how}_[nodes,c]:f32 = product x{COMBINE[how]}" for how in kinds]
    lines += [f"{how}_ -> Y{how}[nodes,c]" for how in kinds]
    given = "src[edges]:i32 X[x.rows,c] " + " ".join(f">Y{how}[nodes,c]" for how in kinds)
    return (
        "\n".join(lines),
        given,
        {"X": (width,)},
        lambda g: {f"Y{how}": _reduced(g, g["X"][g["src"]], how) for how in kinds},
    )


def _gated(draw: random.Random, _: int, width: int) -> Kind:
    text = (
        "x[edges,c] = copy X[src[edges],c]\ne[edges,c] = copy E[order[edges],c]\no[nodes,c] = copy O[nodes,c]\n"
        "a[edges,c]:f32 = add e o\ng[edges,c]:f32 = sigmoid a\nm[edges,c]:f32 = mul x g\n"
        "s[nodes,c]:f32 = product m\ns -> Y[nodes,c]"
    )
    given = "src[edges]:i32 order[edges]:i32 X[x.rows,c] E[edges,c] O[nodes,c] >Y[nodes,c]"

    def exact(g: Given) -> Given:
        gate = torch.sigmoid(g["E"][g["order"]] + g["O"][g["receivers"]])
        return {"Y": _reduced(g, g["X"][g["src"]] * gate)}

    return text, given, {"X": (width,), "E": (width,), "O": (width,)}, exact


def _shares(g: Given, scores: T) -> T:
    """Softmax of scores [edges, heads] over each node's edges."""
    most = _reduced(g, scores, "max")
    raised = torch.exp(scores - most[g["receivers"]])
    return raised / _reduced(g, raised)[g["receivers"]]


def _softmax(draw: random.Random, heads: int, width: int) -> Kind:
    text = (
        "a[edges,h] = copy A[src[edges],h]\nb[nodes,h] = copy B[nodes,h]\nt[edges,h]:f32 = add a b\n"
        "l[edges,h]:f32 = mul t scalar=0.2\ns[edges,h]:f32 = maximum t l\nv[edges,h,c] = copy X[src[edges],h,c]\n"
        "y[nodes,h,c]:f32 = product s v combine=softmax\ny -> Y[nodes,h,c]"
    )
    given = "src[edges]:i32 A[x.rows,h] B[nodes,h] X[x.rows,h,c] >Y[nodes,h,c]"

    def exact(g: Given) -> Given:
        scores = torch.nn.functional.leaky_relu(g["A"][g["src"]] + g["B"][g["receivers"]], 0.2)
        return {"Y": _reduced(g, _shares(g, scores)[..., None] * g["X"][g["src"]])}

    return text, given, {"A": (heads,), "B": (heads,), "X": (heads, width)}, exact


def _attention(draw: random.Random, heads: int, width: int) -> Kind:
    text = (
        "k[edges,h,c] = copy K[src[edges],h,c]\nq[nodes,h,c] = copy Q[nodes,h,c]\nd[edges,h]:f32 = product k q\n"
        f"s[edges,h]:f32 = mul d scalar={width**-0.5}\nv[edges,h,c] = copy X[src[edges],h,c]\n"
        "y[nodes,h,c]:f32 = product s v combine=softmax\ny -> Y[nodes,h,c]"
    )
    given = "src[edges]:i32 K[x.rows,h,c] Q[nodes,h,c] X[x.rows,h,c] >Y[nodes,h,c]"

    def exact(g: Given) -> Given:
        scores = (g["K"][g["src"]] * g["Q"][g["receivers"]]).sum(-1) * width**-0.5
        return {"Y": _reduced(g, _shares(g, scores)[..., None] * g["X"][g["src"]])}

    return text, given, {"K": (heads, width), "Q": (heads, width), "X": (heads, width)}, exact


_KINDS: dict[str, Callable[[random.Random, int, int], Kind]] = {
    "reduce": _reduce,
    "weighted": _weighted,
    "aggregators": _aggregators,
    "gated": _gated,
    "softmax": _softmax,
    "attention": _attention,
}
