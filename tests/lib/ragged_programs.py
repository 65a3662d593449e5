"""Ragged pipelines as layers of graph networks have them, their tensors on a graph, and what they are in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor as T

from tilestream.ir.axes import At, Axis, Level, Loop, Spread, View, along
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.pipeline import Pipeline, Role, Stage, Tensor, Tile, TileOp
from tilestream.kernels.segments.layout import LONG, PIECE_EDGES

NODES, EDGES = Axis("nodes"), Axis("edges", of="nodes", bounds="starts")
STARTS = Tensor("starts", Role.PARAMETER, (Axis("starts.rows"),), "i32")
BUSY = Tensor("starts.busy", Role.PARAMETER, (Axis("starts.busy.rows"),), "i32")


@dataclass
class Graph:
    """Edges sorted by receiver: ``src`` and ``dst`` [edges], ``order`` of the list as it was given."""

    nodes: int
    index: T

    def __post_init__(self) -> None:
        self.dst, order = torch.sort(self.index, stable=True)
        self.order = order.int()
        self.src = torch.randint(self.nodes, (len(self.index),), dtype=torch.int32)
        self.starts = torch.searchsorted(self.dst, torch.arange(self.nodes + 1), out_int32=True)
        items = []
        for node, edges in enumerate(self.starts.diff().tolist()):
            pieces = -(-edges // PIECE_EDGES) if edges > LONG else 0
            items += [(node, piece << 16 | pieces) for piece in range(pieces)]
        count = len(items)
        listed = [items[k] for k in torch.randperm(count).tolist()]  # in any order
        words = torch.zeros(2 + 2 * (len(self.index) // LONG), dtype=torch.int32)
        words[0] = count
        if items:
            words[1 : 1 + 2 * count] = torch.tensor(listed, dtype=torch.int32).flatten()
        self.busy = words

    @property
    def edges(self) -> int:
        return len(self.index)

    def sums(self, values: T, how: str = "sum", empty: float = 0.0) -> T:
        """Of float64 ``values`` [edges, ...] at each node."""
        shape = (self.nodes, *values.shape[1:])
        at = self.dst.view(-1, *[1] * (values.dim() - 1)).expand(values.shape)
        if how == "sum":
            return torch.zeros(shape, dtype=torch.float64).index_add(0, self.dst, values)
        made = torch.full(shape, empty, dtype=torch.float64)
        return made.scatter_reduce(0, at, values, f"a{how}", include_self=False)


def uniform(nodes: int, edges: int, busy: int = 0) -> Graph:
    """Nothing arrives at the last node; ``busy`` edges or more at the first."""
    index = torch.randint(max(1, nodes - 1), (edges,))
    index[torch.randperm(edges)[:busy]] = 0
    return Graph(nodes, index)


@dataclass
class Case:
    """A pipeline, its tensors besides the graph's, and what it should make of them."""

    ops: list[TileOp] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    made: dict[str, Callable[[Graph], T]] = field(default_factory=dict)
    exact: Callable[[Graph, Mapping[str, T]], Mapping[str, T]] | None = None

    def tensor(
        self, name: str, role: Role, axes: tuple[Axis, ...], dtype: str, made: Callable[[Graph], T] | None = None
    ):
        if all(t.name != name for t in self.tensors):
            self.tensors.append(Tensor(name, role, axes, dtype))
            if made is not None:
                self.made[name] = made

    def table(
        self, tile: str, axes: tuple[Axis, ...], dtype: str, index: str = "", of: str = "", every: int = 1
    ) -> str:
        """A tile [edges, *axes] of a table's rows through an index, or [nodes, *axes] of its own."""
        of = of or f"{tile}_of"
        sizes = [a.size or 1 for a in axes]

        def rows(g: Graph) -> T:
            return torch.randn(every * g.nodes, *sizes).to(TORCH_DTYPES[dtype])

        self.tensor(of, Role.PARAMETER, (Axis(f"{of}.rows"), *axes), dtype, rows)
        if index:
            self.tensor(index, Role.INPUT, (EDGES,), "i32")
        first = At(("edges",), index=index) if index else At(("nodes",))
        at = (first, *(At((a.name,)) for a in axes))
        self.op("copy", tile, (EDGES if index else NODES, *axes), dtype, tensors=(View(of, at),))
        return tile

    def messages(self, tile: str, axes: tuple[Axis, ...], dtype: str, index: str = "order") -> str:
        """A tile [edges, *axes] of a tensor of edges in their own order, or in that of ``dst``."""
        sizes = [a.size or 1 for a in axes]
        self.tensor(
            tile + "_of", Role.INPUT, (EDGES, *axes), dtype,
            lambda g: torch.randn(g.edges, *sizes).to(TORCH_DTYPES[dtype]),
        )  # fmt: skip
        if index:
            self.tensor(index, Role.INPUT, (EDGES,), "i32")
        at = (At(("edges",), index=index), *(At((a.name,)) for a in axes))
        return self.op("copy", tile, (EDGES, *axes), dtype, tensors=(View(tile + "_of", at),))

    def vector(self, name: str, axes: tuple[Axis, ...], dtype: str) -> View:
        sizes = [a.size or 1 for a in axes]
        self.tensor(name, Role.PARAMETER, axes, dtype, lambda _: torch.randn(*sizes).to(TORCH_DTYPES[dtype]))
        return along(name, [a.name for a in axes])

    def op(
        self, kind: str, tile: str, axes: tuple[Axis, ...], dtype: str = "f32", ins: tuple[str, ...] = (),
        tensors: tuple[View, ...] = (), combine: str = "sum", **attrs: float,
    ) -> str:  # fmt: skip
        tiles = {o.out.name: o.out for o in self.ops if o.out is not None}
        views = tuple(along(name, [a.name for a in tiles[name].axes]) for name in ins)
        self.ops.append(TileOp(kind, Tile(tile, axes, dtype), views, tensors, tuple(attrs.items()), combine=combine))
        return tile

    def store(self, tile: str, to: str, dtype: str, index: str = "") -> None:
        axes = next(o.out.axes for o in self.ops if o.out is not None and o.out.name == tile)
        self.tensor(to, Role.OUTPUT, axes, dtype)
        at = tuple(At((a.name,), index=index if a is EDGES else "") for a in axes)
        self.ops.append(TileOp("store", None, (along(tile, [a.name for a in axes]),), (View(to, at),)))

    def pipeline(self, busy: bool = True) -> Pipeline:
        stage = Stage(
            "all", tuple(self.ops), (Loop("nodes", 8), Loop("edges", 8)), (Spread(Level.GRID, 264, ("nodes",)),)
        )
        # Inputs first, results last.
        tensors = sorted(self.tensors, key=lambda t: t.role is Role.OUTPUT)
        extra = (STARTS, BUSY) if busy else (STARTS,)
        return Pipeline("ragged", (*extra, *tensors), (stage,))

    def given(self, g: Graph) -> dict[str, T]:
        fixed = {"starts": g.starts, "starts.busy": g.busy, "src": g.src, "dst": g.dst.int(), "order": g.order}
        wanted = {t.name for t in self.tensors} | {"starts", "starts.busy"}
        return {n: t for n, t in fixed.items() if n in wanted} | {n: make(g) for n, make in self.made.items()}

    def wanted(self, g: Graph, given: Mapping[str, T]) -> Mapping[str, T]:
        """In float64, of the tensors as they are."""
        assert self.exact is not None
        wide = {n: t.double() if t.is_floating_point() else t.long() for n, t in given.items()}
        return self.exact(g, wide)


def gather_sum(features: int, dtype: str, combine: str = "sum", base: bool = True) -> Case:
    """GIN: (1 + eps) x_i plus the sum of neighbours; or their largest or smallest, 0 where there are none."""
    c, f = Case(), Axis("f", features)
    attrs = {} if combine == "sum" else {"empty": 0.0}
    c.table("xj", (f,), dtype, "src", of="x")
    c.op("product", "s", (NODES, f), ins=("xj",), combine=combine, **attrs)
    if base:
        c.table("xi", (f,), dtype, of="x")
        c.op("mul", "m", (NODES, f), ins=("xi",), scalar=1.5)
        c.op("add", "o", (NODES, f), ins=("s", "m"))
    c.store("o" if base else "s", "y", dtype)
    c.exact = lambda g, t: {"y": g.sums(t["x"][t["src"]], combine) + (1.5 * t["x"][: g.nodes] if base else 0.0)}
    return c


def aggregators(features: int, dtype: str) -> Case:
    """PNA: mean, largest, smallest and standard deviation of relu(x_j + e_ij), with weights of edges in the mean."""
    c, f = Case(), Axis("f", features)
    c.table("xj", (f,), dtype, "src", of="x")
    c.messages("e", (f,), dtype)
    c.op("add", "a", (EDGES, f), ins=("xj", "e"))
    c.op("relu", "r", (EDGES, f), ins=("a",))
    c.op("fill", "one", (EDGES,), value=1.0)
    c.op("product", "count", (NODES,), ins=("one",))
    c.op("maximum", "many", (NODES,), ins=("count",), scalar=1.0)
    for how in ("sum", "max", "min"):
        attrs = {} if how == "sum" else {"empty": 0.0}
        c.op("product", how, (NODES, f), ins=("r",), combine=how, **attrs)
    c.op("product", "squares", (NODES, f), ins=("r", "r"))
    c.op("div", "mean", (NODES, f), ins=("sum", "many"))
    c.op("div", "mean2", (NODES, f), ins=("squares", "many"))
    c.op("square", "square", (NODES, f), ins=("mean",))
    c.op("sub", "var", (NODES, f), ins=("mean2", "square"))
    c.op("relu", "above", (NODES, f), ins=("var",))
    c.op("add", "safe", (NODES, f), ins=("above",), scalar=0.01)
    c.op("sqrt", "std", (NODES, f), ins=("safe",))
    for name in ("mean", "max", "min", "std"):
        c.store(name, f"y_{name}", dtype)

    def exact(g: Graph, t: Mapping[str, T]) -> Mapping[str, T]:
        r = (t["x"][t["src"]] + t["e_of"][t["order"]]).relu()
        many = g.starts.diff().double().clamp(min=1)[:, None]
        mean, square = g.sums(r) / many, g.sums(r * r) / many
        std = ((square - mean**2).relu() + 0.01).sqrt()
        return {"y_mean": mean, "y_max": g.sums(r, "max"), "y_min": g.sums(r, "min"), "y_std": std}

    c.exact = exact
    return c


def weighted(features: int, dtype: str, heads: int = 0) -> Case:
    """GCN: the sum of w_ij x_j with a weight an edge, or an edge and head, and a bias; the weights' sums beside it."""
    c, f = Case(), Axis("c", features)
    h = (Axis("h", heads),) if heads else ()
    c.table("xj", (*h, f), dtype, "src", of="x")
    c.messages("w", h, "f32")
    c.op("product", "s", (NODES, *h, f), ins=("xj", "w"))
    c.op("product", "total", (NODES, *h), ins=("w",))
    c.op("add", "o", (NODES, *h, f), ins=("s",), tensors=(c.vector("bias", (*h, f), dtype),))
    c.store("o", "y", dtype)
    c.store("total", "y_total", "f32")

    def exact(g: Graph, t: Mapping[str, T]) -> Mapping[str, T]:
        w = t["w_of"][t["order"]]
        return {"y": g.sums(t["x"][t["src"]] * w[..., None]) + t["bias"], "y_total": g.sums(w)}

    c.exact = exact
    return c


def attention(heads: int, features: int, dtype: str, fused: bool, alpha: bool = False, highest: bool = False) -> Case:
    """GAT: softmax over a node's edges of leaky(a_i + b_j), which weighs rows x_j; ``alpha`` is a result of edges, and
    the ``highest`` of the rows another of nodes."""
    c, h, f = Case(), Axis("h", heads), Axis("c", features)
    c.table("bj", (h,), "f32", "src", of="b")
    c.table("ai", (h,), "f32", of="a")
    c.table("xj", (h, f), dtype, "src", of="x")
    c.op("add", "z", (EDGES, h), ins=("bj", "ai"))
    c.op("mul", "low", (EDGES, h), ins=("z",), scalar=0.2)
    c.op("maximum", "score", (EDGES, h), ins=("z", "low"))
    if fused:
        c.op("product", "o", (NODES, h, f), ins=("score", "xj"), combine="softmax")
    else:
        c.op("product", "most", (NODES, h), ins=("score",), combine="max", empty=0.0)
        c.op("sub", "further", (EDGES, h), ins=("score", "most"))
        c.op("exp", "p", (EDGES, h), ins=("further",))
        c.op("product", "sum", (NODES, h), ins=("p",))
        c.op("add", "sums", (NODES, h), ins=("sum",), scalar=1e-16)
        c.op("div", "alpha", (EDGES, h), ins=("p", "sums"))
        c.op("product", "o", (NODES, h, f), ins=("alpha", "xj"))
    c.store("o", "y", dtype)
    if highest:
        c.op("relu", "above", (EDGES, h, f), ins=("xj",))
        c.op("product", "high", (NODES, h, f), ins=("above",), combine="max", empty=0.0)
        c.store("high", "y_high", dtype)
    if alpha:
        c.tensor("order", Role.INPUT, (EDGES,), "i32")
        c.store("alpha", "y_alpha", "f32", "order")

    def exact(g: Graph, t: Mapping[str, T]) -> Mapping[str, T]:
        z = t["b"][t["src"]] + t["a"][g.dst]
        p = (torch.maximum(z, 0.2 * z) - g.sums(torch.maximum(z, 0.2 * z), "max")[g.dst]).exp()
        weight = p / g.sums(p)[g.dst]
        y = {"y": g.sums(weight[..., None] * t["x"][t["src"]])}
        if highest:
            y["y_high"] = g.sums(t["x"][t["src"]].relu(), "max")
        if alpha:
            y["y_alpha"] = torch.empty_like(weight).index_copy(0, t["order"], weight)
        return y

    c.exact = exact
    return c


def dot_products(heads: int, features: int, dtype: str) -> Case:
    """TransformerConv: scores q_i . k_j, with features of edges added to values. Keys have an axis of their own."""
    c, h, f, k = Case(), Axis("h", heads), Axis("c", features), Axis("k", features)
    c.table("q", (h, k), dtype)
    c.table("kj", (h, k), dtype, "src", of="k_of")
    c.table("vj", (h, f), dtype, "src", of="v")
    c.messages("e", (h, f), dtype)
    c.op("product", "dot", (EDGES, h), ins=("kj", "q"))
    c.op("mul", "score", (EDGES, h), ins=("dot",), scalar=features**-0.5)
    c.op("add", "value", (EDGES, h, f), ins=("vj", "e"))
    c.op("product", "o", (NODES, h, f), ins=("score", "value"), combine="softmax")
    c.store("o", "y", dtype)

    def exact(g: Graph, t: Mapping[str, T]) -> Mapping[str, T]:
        e = t["e_of"][t["order"]]
        score = (t["k_of"][t["src"]] * t["q_of"][g.dst]).sum(-1) * features**-0.5
        p = (score - g.sums(score, "max")[g.dst]).exp()
        return {"y": g.sums((p / g.sums(p)[g.dst])[..., None] * (t["v"][t["src"]] + e))}

    c.exact = exact
    return c


def error(got: T, wanted: T) -> float:
    """Relative, in the norm."""
    return float((got.double() - wanted).norm() / (wanted.norm() + 1e-30))
