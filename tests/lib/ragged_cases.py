"""What has an axis whose bounds are read from a tensor, written in the IR, beside what torch makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor as Array
from torch.nn import functional as F

from tilestream.ir.axes import Level, Loop, Spread
from tilestream.ir.pipeline import Pipeline, Stage
from tilestream.ir.read import axes, program, tensors

LENGTHS = (3, 0, 17, 1, 0, 0, 40, 8, 2, 0, 5, 1)
"""Edges of each node: none first and last as well, some many."""

Given = dict[str, Array]


@dataclass(frozen=True)
class Case:
    """A pipeline, what it is given of edges by these lengths (in float64), and what torch makes of that."""

    pipeline: Pipeline
    given: Callable[[Sequence[int]], Given]
    want: Callable[[Given], Given]


def ragged(
    text: str,
    given: str,
    names: str,
    loops: Sequence[tuple[str, int]] = (("nodes", 4), ("edges", 8)),
    mesh: Sequence[Spread] = (Spread(Level.GRID, 2, ("nodes",)),),
) -> Pipeline:
    known = axes(names)
    stage = Stage("s", program(text, known), tuple(Loop(*loop) for loop in loops), tuple(mesh))
    return Pipeline("ragged", tensors(given, known), (stage,))


def bounds(lengths: Sequence[int]) -> Array:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def owners(starts: Array) -> Array:
    return torch.repeat_interleave(starts.diff().long())


def graph(lengths: Sequence[int], rows: int = 20, **features: Sequence[int]) -> Given:
    """Sorted edges from random senders, and features by their first letter: of x rows, of edges, of nodes, or whole."""
    torch.manual_seed(0)
    starts = bounds(lengths)
    edges = int(starts[-1])
    made: Given = {"starts": starts, "src": torch.randint(rows, (edges,)).int()}
    for name, sizes in features.items():
        first = {"x": rows, "e": edges, "n": len(lengths)}.get(name[0])
        made[name] = torch.randn([*([first] if first is not None else []), *sizes], dtype=torch.float64)
    return made


def summed(values: Array, starts: Array, how: str = "sum", empty: float = 0.0) -> Array:
    nodes = len(starts) - 1
    out = torch.full([nodes, *values.shape[1:]], empty, dtype=values.dtype)
    index = owners(starts).reshape(-1, *[1] * (values.dim() - 1)).expand_as(values)
    return out.scatter_reduce(0, index, values, how, include_self=False)


def softmax(score: Array, starts: Array) -> Array:
    """Of each edge's score among those of its node, as torch_geometric.utils.softmax."""
    to = owners(starts)
    score = (score - summed(score, starts, "amax")[to]).exp()
    return score / summed(score, starts)[to]


NODES = "nodes edges=starts[nodes] x.rows starts.rows"
INDEX = "src[edges]:i32 starts[starts.rows]:i32"

GIN = Case(
    ragged(
        """
        m[edges,f] = copy x[src[edges],f]
        s[nodes,f]:f32 = product m
        i[nodes,f] = copy x[nodes,f]
        w[nodes,f]:f32 = mul i scalar=1.5
        o[nodes,f]:f32 = add s w
        o -> Y[nodes,f]
        """,
        f"x[x.rows,f] {INDEX} >Y[nodes,f]",
        f"{NODES} f=6",
    ),
    lambda lengths: graph(lengths, x=(6,)),
    lambda g: {"Y": summed(g["x"][g["src"]], g["starts"]) + 1.5 * g["x"][: len(g["starts"]) - 1]},
)

MEAN = Case(
    ragged(
        """
        one[edges]:f32 = fill value=1.0
        n[nodes]:f32 = product one
        d[nodes]:f32 = maximum n scalar=1.0
        m[edges,f] = copy x[src[edges],f]
        s[nodes,f]:f32 = product m
        o[nodes,f]:f32 = div s d
        o -> Y[nodes,f]
        """,
        f"x[x.rows,f] {INDEX} >Y[nodes,f]",
        f"{NODES} f=6",
    ),
    lambda lengths: graph(lengths, x=(6,)),
    lambda g: {"Y": summed(g["x"][g["src"]], g["starts"], "mean")},
)


def _aggregated(g: Given) -> Given:
    m = g["x"][g["src"]]
    mean, squares = summed(m, g["starts"], "mean"), summed(m * m, g["starts"], "mean")
    std = ((squares - mean * mean).relu() + 1e-5).sqrt()
    return {
        "Mean": mean,
        "Max": summed(m, g["starts"], "amax"),
        "Min": summed(m, g["starts"], "amin"),
        "Std": std,
    }


PNA = Case(
    ragged(
        """
        one[edges]:f32 = fill value=1.0
        n[nodes]:f32 = product one
        d[nodes]:f32 = maximum n scalar=1.0
        m[edges,f]:f32 = copy x[src[edges],f]
        s[nodes,f]:f32 = product m
        mean[nodes,f]:f32 = div s d
        hi[nodes,f]:f32 = product m empty=0.0 combine=max
        lo[nodes,f]:f32 = product m empty=0.0 combine=min
        q[edges,f]:f32 = square m
        qs[nodes,f]:f32 = product q
        qm[nodes,f]:f32 = div qs d
        mm[nodes,f]:f32 = square mean
        v[nodes,f]:f32 = sub qm mm
        r[nodes,f]:f32 = relu v
        e[nodes,f]:f32 = add r scalar=1e-5
        std[nodes,f]:f32 = sqrt e
        mean -> Mean[nodes,f]
        hi -> Max[nodes,f]
        lo -> Min[nodes,f]
        std -> Std[nodes,f]
        """,
        f"x[x.rows,f] {INDEX} >Mean[nodes,f] >Max[nodes,f] >Min[nodes,f] >Std[nodes,f]",
        f"{NODES} f=6",
    ),
    lambda lengths: graph(lengths, x=(6,)),
    _aggregated,
)

SCORES = """
    l[edges,h]:f32 = copy xa[src[edges],h]
    r[nodes,h]:f32 = copy nb[nodes,h]
    u[edges,h]:f32 = add l r
    v[edges,h]:f32 = mul u scalar=0.2
    s[edges,h]:f32 = maximum u v
    m[edges,h,c] = copy x[src[edges],h,c]
"""
GAT_TENSORS = f"x[x.rows,h,c] xa[x.rows,h] nb[nodes,h] {INDEX} >Y[nodes,h,c]"
GAT_NAMES = f"{NODES} h=2 c=3"


def _gat(g: Given) -> Given:
    alpha = softmax(F.leaky_relu(g["xa"][g["src"]] + g["nb"][owners(g["starts"])], 0.2), g["starts"])
    return {"Y": summed(alpha[..., None] * g["x"][g["src"]], g["starts"])}


def _of_heads(lengths: Sequence[int]) -> Given:
    return graph(lengths, x=(2, 3), xa=(2,), nb=(2,))


PASSES = f"""{SCORES}
    hi[nodes,h]:f32 = product s combine=max
    d[edges,h]:f32 = sub s hi
    e[edges,h]:f32 = exp d
    z[nodes,h]:f32 = product e
    a[edges,h]:f32 = div e z
    y[nodes,h,c]:f32 = product a m
    y -> Y[nodes,h,c]
"""
GAT = Case(ragged(PASSES, GAT_TENSORS, GAT_NAMES), _of_heads, _gat)

GAT_SOFTMAX = Case(
    ragged(f"{SCORES}\ny[nodes,h,c]:f32 = product s m combine=softmax\ny -> Y[nodes,h,c]", GAT_TENSORS, GAT_NAMES),
    _of_heads,
    _gat,
)

GAT_SPLIT = Case(
    ragged(
        f"{SCORES}\ny[nodes,h,c]:f32 = product s m combine=softmax\ny -> Y[nodes,h,c]",
        GAT_TENSORS,
        GAT_NAMES,
        mesh=(Spread(Level.GRID, 2, ("nodes",)), Spread(Level.CLUSTER, 3, ("edges",))),
    ),
    _of_heads,
    _gat,
)


def _transformer(g: Given) -> Given:
    to = owners(g["starts"])
    score = (g["nq"][to] * g["xk"][g["src"]]).sum(-1) / 3**0.5
    return {"Y": summed(softmax(score, g["starts"])[..., None] * g["xv"][g["src"]], g["starts"])}


TRANSFORMER_CONV = Case(
    ragged(
        f"""
        q[nodes,h,c]:f32 = copy nq[nodes,h,c]
        k[edges,h,c]:f32 = copy xk[src[edges],h,c]
        p[edges,h]:f32 = product q k
        s[edges,h]:f32 = mul p scalar={3**-0.5}
        v[edges,h,c]:f32 = copy xv[src[edges],h,c]
        y[nodes,h,c]:f32 = product s v combine=softmax
        y -> Y[nodes,h,c]
        """,
        f"nq[nodes,h,c] xk[x.rows,h,c] xv[x.rows,h,c] {INDEX} >Y[nodes,h,c]",
        GAT_NAMES,
    ),
    lambda lengths: graph(lengths, nq=(2, 3), xk=(2, 3), xv=(2, 3)),
    _transformer,
)


def _bags(g: Given) -> Given:
    table, index, starts = g["x"], g["src"].long(), g["starts"].long()
    weighted = F.embedding_bag(index, table, starts, mode="sum", include_last_offset=True, per_sample_weights=g["ew"])
    return {"Y": weighted, "Max": F.embedding_bag(index, table, starts, mode="max", include_last_offset=True)}


BAGS = Case(
    ragged(
        """
        r[edges,f]:f32 = copy x[src[edges],f]
        w[edges]:f32 = copy ew[edges]
        s[nodes,f]:f32 = product r w
        m[nodes,f]:f32 = product r empty=0.0 combine=max
        s -> Y[nodes,f]
        m -> Max[nodes,f]
        """,
        f"x[x.rows,f] ew[edges] {INDEX} >Y[nodes,f] >Max[nodes,f]",
        f"{NODES} f=6",
    ),
    lambda lengths: graph(lengths, x=(6,), ew=()),
    _bags,
)


def _messages(g: Given) -> Given:
    e = g["e"][g["order"]]
    h = F.relu(torch.cat([e, g["x"][g["src"]]], 1) @ torch.cat([g["W1"], g["W2"]], 1).T) @ g["W3"].T
    updated = torch.empty_like(h)
    updated[g["order"]] = h
    return {"Y": summed(h, g["starts"]), "E": updated}


def _of_messages(lengths: Sequence[int]) -> Given:
    made = graph(lengths, x=(4,), e=(5,), W1=(8, 5), W2=(8, 4), W3=(6, 8))
    return {**made, "order": torch.randperm(len(made["src"])).int()}


MESSAGES = Case(  # an MLP of each edge, which keeps its own order, and the sum of its results at each node
    ragged(
        """
        a[edges,k] = copy e[order[edges],k]
        b[edges,l] = copy x[src[edges],l]
        p[edges,hid]:f32 = product a W1[hid,k]
        q[edges,hid]:f32 = product b W2[hid,l]
        u[edges,hid]:f32 = add p q
        h[edges,hid] = relu u
        o[edges,f] = product h W3[f,hid]
        o -> E[order[edges],f]
        s[nodes,f]:f32 = product o
        s -> Y[nodes,f]
        """,
        f"x[x.rows,l] e[edges,k] order[edges]:i32 W1[hid,k] W2[hid,l] W3[f,hid] {INDEX} >Y[nodes,f] >E[edges,f]",
        f"{NODES} k=5 l=4 hid=8 f=6",
    ),
    _of_messages,
    _messages,
)


def _packed(lengths: Sequence[int]) -> Given:
    made = graph(lengths, eq=(2, 4), ek=(2, 4), ev=(2, 4))
    place = torch.arange(len(made["src"])) - made["starts"][owners(made["starts"])]
    del made["src"]
    return {**made, "kstarts": made["starts"], "qplace": place.double(), "kplace": place.double()}


def _attention(g: Given) -> Given:
    out = torch.zeros_like(g["eq"])
    for a, b in zip(g["starts"].tolist(), g["starts"].tolist()[1:], strict=False):
        q, k, v = (g[n][a:b].transpose(0, 1) for n in ("eq", "ek", "ev"))
        out[a:b] = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
    return {"Y": out}


PACKED = Case(  # causal attention over packed sequences: two ragged axes of one outer
    ragged(
        """
        q[queries,h,c] = copy eq[queries,h,c]
        k[keys,h,c] = copy ek[keys,h,c]
        p[queries,keys,h]:f32 = product q k
        s[queries,keys,h]:f32 = mul p scalar=0.5
        at[queries]:f32 = copy qplace[queries]
        to[keys]:f32 = copy kplace[keys]
        later[queries,keys]:f32 = sub to at
        no[queries,keys]:f32 = fill value=-inf
        mask[queries,keys]:f32 = relu_backward no later
        t[queries,keys,h]:f32 = add s mask
        v[keys,h,c] = copy ev[keys,h,c]
        y[queries,h,c]:f32 = product t v combine=softmax
        y -> Y[queries,h,c]
        """,
        "eq[queries,h,c] ek[keys,h,c] ev[keys,h,c] qplace[queries]:f32 kplace[keys]:f32 starts[starts.rows]:i32"
        " kstarts[starts.rows]:i32 >Y[queries,h,c]",
        "seqs queries=starts[seqs] keys=kstarts[seqs] starts.rows h=2 c=4",
        loops=(("seqs", 1), ("queries", 4), ("keys", 8)),
        mesh=(Spread(Level.GRID, 2, ("seqs",)),),
    ),
    _packed,
    _attention,
)

BLOCK = 4


def _blocks(lengths: Sequence[int]) -> Given:
    """Each block of queries sees some blocks of keys, each once; of none the result is zero."""
    made = graph([min(n, 6) for n in lengths], rows=6, xk=(BLOCK, 4), xv=(BLOCK, 4), nq=(BLOCK, 4))
    starts = made["starts"].tolist()
    listed = [torch.randperm(6)[: b - a] for a, b in zip(starts, starts[1:], strict=False)]
    made["src"] = torch.cat([torch.empty(0).long(), *listed]).int()
    return made


def _block_sparse(g: Given) -> Given:
    out = torch.zeros_like(g["nq"])
    for block, (a, b) in enumerate(zip(g["starts"].tolist(), g["starts"].tolist()[1:], strict=False)):
        if a < b:
            k, v = (g[n][g["src"][a:b]].flatten(0, 1) for n in ("xk", "xv"))
            out[block] = F.scaled_dot_product_attention(g["nq"][None, block], k[None], v[None])[0]
    return {"Y": out}


BLOCK_SPARSE = Case(
    ragged(
        """
        q[nodes,i,c] = copy nq[nodes,i,c]
        k[edges,j,c] = copy xk[src[edges],j,c]
        p[edges,i,j]:f32 = product q k
        s[edges,i,j]:f32 = mul p scalar=0.5
        v[edges,j,c] = copy xv[src[edges],j,c]
        y[nodes,i,c]:f32 = product s v combine=softmax
        y -> Y[nodes,i,c]
        """,
        f"nq[nodes,i,c] xk[x.rows,j,c] xv[x.rows,j,c] {INDEX} >Y[nodes,i,c]",
        f"{NODES} i={BLOCK} j={BLOCK} c=4",
        loops=(("nodes", 1), ("edges", 2)),
    ),
    _blocks,
    _block_sparse,
)


def _routed(lengths: Sequence[int]) -> Given:
    return graph(lengths, x=(4,), ew=(), nW1=(8, 4), nW2=(4, 8))


def _experts(g: Given) -> Given:
    out = torch.zeros_like(g["x"])
    for expert, (a, b) in enumerate(zip(g["starts"].tolist(), g["starts"].tolist()[1:], strict=False)):
        rows = g["src"][a:b].long()
        made = F.silu(g["x"][rows] @ g["nW1"][expert].T) @ g["nW2"][expert].T
        out.index_add_(0, rows, made * g["ew"][a:b, None])
    return {"Y": out}


EXPERTS = Case(  # rows sorted by the expert that they are routed to, with the gate's weight of each
    ragged(
        """
        a[edges,k] = copy x[src[edges],k]
        b[edges,hid]:f32 = product a nW1[nodes,hid,k]
        h[edges,hid] = silu b
        o[edges,out]:f32 = product h nW2[nodes,out,hid]
        w[edges]:f32 = copy ew[edges]
        y[edges,out]:f32 = mul o w
        y +> Y[src[edges],out]
        """,
        f"x[x.rows,k] ew[edges] nW1[nodes,hid,k] nW2[nodes,out,hid] {INDEX} >Y[x.rows,out]",
        f"{NODES} k=4 hid=8 out=4",
        loops=(("nodes", 1), ("edges", 16)),
    ),
    _routed,
    _experts,
)


def _decoded(lengths: Sequence[int]) -> Given:
    """A cache of 20 slots, of which each sequence has some, in any order; a query of two groups of two heads."""
    return graph(lengths, xk=(2, 4), xv=(2, 4), nq=(2, 3, 4))


def _decode(g: Given) -> Given:
    out = torch.zeros_like(g["nq"])
    for b, (first, last) in enumerate(zip(g["starts"].tolist(), g["starts"].tolist()[1:], strict=False)):
        if first < last:
            k, v = (g[n][g["src"][first:last]].transpose(0, 1) for n in ("xk", "xv"))
            query = g["nq"][b].flatten(0, 1)[:, None]
            made = F.scaled_dot_product_attention(query[None], k[None], v[None], enable_gqa=True)
            out[b] = made[0, :, 0].unflatten(0, (2, 3))
    return {"Y": out}


DECODE = Case(  # grouped heads, one token of each sequence, keys in a paged cache, split over a cluster
    ragged(
        """
        q[nodes,h,g,c] = copy nq[nodes,h,g,c]
        k[edges,h,c] = copy xk[src[edges],h,c]
        p[edges,h,g]:f32 = product q k
        s[edges,h,g]:f32 = mul p scalar=0.5
        v[edges,h,c] = copy xv[src[edges],h,c]
        y[nodes,h,g,c]:f32 = product s v combine=softmax
        y -> Y[nodes,h,g,c]
        """,
        f"nq[nodes,h,g,c] xk[x.rows,h,c] xv[x.rows,h,c] {INDEX} >Y[nodes,h,g,c]",
        f"{NODES} h=2 g=3 c=4",
        loops=(("nodes", 1), ("edges", 8)),
        mesh=(Spread(Level.GRID, 2, ("nodes",)), Spread(Level.CLUSTER, 4, ("edges",))),
    ),
    _decoded,
    _decode,
)

CASES: dict[str, Case] = {
    "GIN": GIN,
    "mean": MEAN,
    "PNA": PNA,
    "GAT in passes": GAT,
    "GAT by softmax": GAT_SOFTMAX,
    "GAT over a cluster": GAT_SPLIT,
    "TransformerConv": TRANSFORMER_CONV,
    "embedding bags": BAGS,
    "message passing": MESSAGES,
    "packed sequences": PACKED,
    "block-sparse attention": BLOCK_SPARSE,
    "experts": EXPERTS,
    "GQA decode": DECODE,
}
