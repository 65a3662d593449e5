"""Random ragged pipelines: several tables, passes over the edges, kinds of sums, loops and meshes; and their values."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from ragged_cases import NODES, Case, Given, graph, owners, ragged, softmax, summed
from torch import Tensor as Array

from tilestream.ir.axes import Level, Spread

UNARY: dict[str, Callable[[Array], Array]] = {"tanh": torch.tanh, "relu": torch.relu, "sigmoid": torch.sigmoid}
BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "maximum": torch.maximum,
}
COMBINES = {"": "sum", " combine=max empty=0.0": "amax", " combine=min empty=0.0": "amin"}
SIZES = {"": (), "h": (2,), "h,c": (2, 3)}

Value = tuple[bool, str]
"""Of a tile: whether it is of edges, and its other axes."""


class _Writer:
    """Ops and, beside each, what torch makes of it: every value flat, [edges, ...] or [nodes, ...]."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.lines: list[str] = []
        self.steps: list[Callable[[Given, Given], None]] = []
        self.tiles: dict[str, Value] = {}
        self.tensors: dict[str, Value] = {}

    def write(self, line: str, step: Callable[[Given], Array], value: Value) -> str:
        name, (edges, axes) = f"t{len(self.tiles)}", value
        dims = ",".join(["edges" if edges else "nodes", *filter(None, [axes])])
        self.lines.append(f"{name}[{dims}]:f32 = {line}")
        self.steps.append(lambda values, given, name=name: values.update({name: step(values | given)}))
        self.tiles[name] = value
        return name

    def load(self, edges: bool, axes: str) -> str:
        kind = self.rng.choice("xe") if edges else "n"
        name = f"{kind}{len(self.tensors)}"
        self.tensors[name] = (kind != "n", axes)
        rest = f",{axes}" if axes else ""
        if kind == "x":
            return self.write(f"copy {name}[src[edges]{rest}]", lambda v: v[name][v["src"].long()], (True, axes))
        if kind == "e":
            return self.write(f"copy {name}[edges{rest}]", lambda v: v[name], (True, axes))
        return self.write(f"copy {name}[nodes{rest}]", lambda v: v[name], (False, axes))

    def _any(self, edges: bool | None = None) -> str:
        return self.rng.choice([n for n, v in self.tiles.items() if edges is None or v[0] == edges])

    def elementwise(self) -> None:
        a, b = self._any(), self._any()
        if self.rng.random() < 0.4:
            kind = self.rng.choice(sorted(UNARY))
            self.write(f"{kind} {a}", lambda v: UNARY[kind](v[a]), self.tiles[a])
            return
        kind = self.rng.choice(sorted(BINARY))
        edges, axes = self.tiles[a][0] or self.tiles[b][0], max(self.tiles[a][1], self.tiles[b][1], key=len)
        like = edges, axes
        self.write(f"{kind} {a} {b}", lambda v: BINARY[kind](self._as(v, a, like), self._as(v, b, like)), like)

    def _as(self, values: Given, name: str, like: Value) -> Array:
        """A tile as one of more axes reads it."""
        value, (edges, axes) = values[name], self.tiles[name]
        if like[0] and not edges:
            value = value[owners(values["starts"])]
        return value.reshape(*value.shape, *[1] * (len(SIZES[like[1]]) - len(SIZES[axes])))

    def sum(self) -> None:
        a = self._any(edges=True)
        how = self.rng.choice(sorted(COMBINES))
        axes = self.tiles[a][1]
        self.write(f"product {a}{how}", lambda v: summed(v[a], v["starts"], COMBINES[how]), (False, axes))

    def softmax(self) -> None:
        scores = [n for n, (edges, _) in self.tiles.items() if edges]
        a, b = self.rng.choice(scores), self.rng.choice(scores)
        like = True, max(self.tiles[a][1], self.tiles[b][1], key=len)

        def value(v: Given) -> Array:
            return summed(self._as({**v, a: softmax(v[a], v["starts"])}, a, like) * self._as(v, b, like), v["starts"])

        self.write(f"product {a} {b} combine=softmax", value, (False, like[1]))

    def inner(self) -> None:
        """A sum over features: scores of edges, or of nodes."""
        found = [n for n, (_, axes) in self.tiles.items() if axes == "h,c"]
        a, b = self.rng.choice(found), self.rng.choice(found)
        like = self.tiles[a][0] or self.tiles[b][0], "h,c"
        self.write(f"product {a} {b}", lambda v: (self._as(v, a, like) * self._as(v, b, like)).sum(-1), (like[0], "h"))


def random_ragged(seed: int) -> Case:
    """A pipeline that loads three tables, sums over edges, and stores what nobody uses."""
    rng = random.Random(seed)
    w = _Writer(rng)
    for edges, axes in ((True, "h,c"), (True, "h"), (rng.random() < 0.5, rng.choice(sorted(SIZES)))):
        w.load(edges, axes)
    w.sum()
    for _ in range(rng.randint(1, 8)):
        rng.choice([w.elementwise, w.elementwise, w.sum, w.sum, w.softmax, w.inner])()
    used = " ".join(line.partition(" = ")[2] for line in w.lines)
    stored = [n for n in w.tiles if n not in used.replace(",", " ").split()]
    lines = [*w.lines, *(f"{n} -> Y{n}{_dims(w.tiles[n])}" for n in stored)]
    given = [f"{n}{_dims(w.tensors[n]) if n[0] != 'x' else _dims(w.tensors[n], 'x.rows')}:f32" for n in w.tensors]
    outputs = [f">Y{n}{_dims(w.tiles[n])}:f32" for n in stored]
    indices = "src[edges]:i32 starts[starts.rows]:i32"
    pipeline = ragged(
        "\n".join(lines),
        " ".join([*given, indices, *outputs]),
        f"{NODES} h=2 c=3",
        loops=[("nodes", rng.choice([1, 2, 4])), ("edges", rng.choice([1, 3, 8]))][: rng.choice([0, 1, 2, 2])],
        mesh=_mesh(rng),
    )

    def want(g: Given) -> Given:
        values: Given = {}
        for step in w.steps:
            step(values, g)
        return {f"Y{n}": values[n] for n in stored}

    features = {n: SIZES[axes] for n, (_, axes) in w.tensors.items()}
    return Case(pipeline, lambda lengths: graph(lengths, **features), want)


def _dims(value: Value, first: str = "") -> str:
    edges, axes = value
    return f"[{','.join([first or ('edges' if edges else 'nodes'), *filter(None, [axes])])}]"


def _mesh(rng: random.Random) -> Sequence[Spread]:
    each = [
        Spread(Level.GRID, rng.randint(1, 3), ("nodes",)),
        Spread(Level.CLUSTER, rng.randint(1, 3), (rng.choice(["edges", "nodes"]),)),
        Spread(Level.WARPGROUP, 2, ("edges",)),
    ]
    return rng.sample(each, rng.randint(0, 3))
