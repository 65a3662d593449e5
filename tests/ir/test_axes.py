"""Pipelines of any axes and meshes on the reference machine: values against torch, bytes against formulas by hand."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from math import ceil

import pytest
import torch
from random_pipelines import random_pipeline, tensors_for
from random_programs import Limits
from torch.nn import functional as F

from tilestream import cuda, reference
from tilestream.errors import PipelineDeadlock, VerifyError
from tilestream.ir.axes import Level, Loop, Spread
from tilestream.ir.derive import exchanges, held
from tilestream.ir.mesh_traffic import mesh_traffic
from tilestream.ir.pipeline import Pipeline, Queue, Role, Stage, Transport
from tilestream.ir.plain import by_rows
from tilestream.ir.read import axes, program, tensors
from tilestream.ir.text import show_op
from tilestream.ir.verify import verify
from tilestream.kernels.shape import KernelShape, kernel_shape
from tilestream.reference.mesh_machine import Moved, run_meshes
from tilestream.reference.ops import FLOAT64

GRID, CLUSTER, WARPS = Level.GRID, Level.CLUSTER, Level.WARPGROUP
LEVELS = ("shared", "dsm", "l2")
ROWS = 150  # nine tiles of 16 and a ragged one

NAMES = axes("rows k=32 hid=48 out=24")
MLP_TENSORS = tensors("X[rows,k] W1[hid,k] W2[out,hid] >Y[rows,out]", NAMES)
MLP = """
    x[rows,k] = load X[rows,k]
    a[rows,hid] = product x W1[hid,k]
    h[rows,hid] = relu a
    y[rows,out] = product h W2[out,hid]
    y -> Y[rows,out]
"""


def data(p: Pipeline, **sizes: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {}
    for t in p.tensors:
        if t.role is not Role.OUTPUT and not t.dtype.startswith("i"):
            shape = [sizes.get(a.name, a.size) for a in t.axes]
            made[t.name] = torch.randn(shape).bfloat16()
    return made


def mlp(X, W1, W2):
    return {"Y": F.relu(X @ W1.T) @ W2.T}


def checked(p: Pipeline, inputs, oracle) -> Moved:
    """Values in float64 and in working precision; what moved."""
    verify(p)
    assert not by_rows(p)
    moved = Moved()
    wide = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    want = oracle(**wide)
    got = run_meshes(p, wide, FLOAT64, moved)
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12)
    size = {a.name: n for t in p.tensors if t.name in wide for a, n in zip(t.axes, wide[t.name].shape, strict=True)}
    counted = mesh_traffic(p, p.sizes() | size)
    assert {level: counted.get(level, 0) for level in LEVELS} == {level: moved.bytes[level] for level in LEVELS}
    near = reference.run(p, inputs)
    for name, value in want.items():
        assert (near[name].double() - value).norm() <= 0.02 * value.norm(), name
    return moved


def one(ops, loops, *mesh: Spread, kinds=MLP_TENSORS) -> Pipeline:
    return Pipeline("case", kinds, (Stage("s", ops, tuple(Loop(*loop) for loop in loops), mesh),))


@pytest.mark.parametrize(
    ("mesh", "moved"),
    [
        ((Spread(GRID, 3, ("rows",)), Spread(WARPS, 2, ("rows",))), {}),
        ((Spread(GRID, 3, ("rows",)), Spread(WARPS, 2, ("out", "hid"))), {"shared": ROWS * 48 * 2}),
        ((Spread(GRID, 2, ("rows",)), Spread(CLUSTER, 2, ("rows",))), {}),
        ((Spread(CLUSTER, 4, ("out", "hid")),), {"dsm": 3 * ROWS * 48 * 2}),
        ((Spread(CLUSTER, 4, ("hid", "out")),), {"dsm": 3 * ROWS * 24 * 4}),
    ],
)
def test_one_block_over_any_mesh(mesh, moved) -> None:
    p = one(program(MLP, NAMES), [("rows", 16)], *mesh)
    found = checked(p, data(p, rows=ROWS), mlp).bytes
    assert {level: found[level] for level in ("shared", "dsm")} == {"shared": 0, "dsm": 0, **moved}


def test_the_order_of_a_direction_chooses_the_exchange() -> None:
    def how(*order: str) -> list[str]:
        (stage,) = one(program(MLP, NAMES), [("rows", 16)], Spread(CLUSTER, 4, order)).stages
        return [e.how for e in exchanges(stage)]

    assert how("out", "hid") == ["all-gather"] and how("hid", "out") == ["reduce-scatter"] and how("rows") == []


def test_a_feed_forward_block_in_chunks_never_holds_its_middle() -> None:
    p = one(program(MLP, NAMES), [("rows", 16), ("hid", 8)], Spread(GRID, 2, ("rows",)), Spread(WARPS, 2, ("rows",)))
    checked(p, data(p, rows=ROWS), mlp)
    (stage,) = p.stages
    assert {t: held(stage, t) for t in "xahy"} == {"x": ("k",), "a": (), "h": (), "y": ("out",)}


GATED = """
    x[rows,k] = load X[rows,k]
    a[rows,hid] = product x W1[hid,k]
    b[rows,hid] = product x W3[hid,k]
    g[rows,hid] = silu a
    h[rows,hid] = mul g b
    y[rows,out] = product h W2[out,hid]
    y -> Y[rows,out]
"""


@pytest.mark.parametrize("loops", [[("rows", 16)], [("rows", 16), ("hid", 8)], [("hid", 8), ("rows", 16)]])
@pytest.mark.parametrize("order", [("hid", "out"), ("out", "hid"), ("rows",)])
@pytest.mark.every(3)
def test_a_gated_block(loops, order) -> None:
    kinds = (*MLP_TENSORS, *tensors("W3[hid,k]", NAMES))
    p = one(program(GATED, NAMES), loops, Spread(CLUSTER, 2, order), kinds=kinds)
    checked(p, data(p, rows=ROWS), lambda X, W1, W2, W3: {"Y": (F.silu(X @ W1.T) * (X @ W3.T)) @ W2.T})


@pytest.mark.parametrize("order", [("hid",), ("k", "hid")])
def test_partial_results_are_added_in_memory(order) -> None:
    ops = program(MLP.replace("y -> Y", "y +> Y"), NAMES)
    kinds = (*MLP_TENSORS[:-1], *tensors(">Y[rows,out]:f32", NAMES))
    p = one(ops, [("hid", 8)], Spread(GRID, 3, order), kinds=kinds)
    checked(p, data(p, rows=20), mlp)


def test_flashfusers_cluster_moves_what_the_paper_counts() -> None:
    """Clusters (m, n, k, l) = (2, 4, 2, 4), two of them along n; gate and up are the two halves of k."""
    m, n, k, out, clusters = 16, 64, 8, 32, 2
    names = axes(f"m={m} n={n} k={k} l={out} branch=2")
    ops = program(
        """
        x[m,k] = load X[m,k]
        u[m,branch,n]:f32 = product x W1[branch,n,k]
        s[m,branch,n]:f32 = mul u scale[branch]
        c[m,n]:f32 = copy s combine=mul
        h[m,n] = copy c
        e[m,l]:f32 = product h W2[l,n]
        e +> E[m,l]
        """,
        names,
    )
    mesh = (
        Spread(GRID, clusters, ("n",)),
        Spread(CLUSTER, 2, ("m",)),
        Spread(CLUSTER, 2, ("branch", "l")),
        Spread(CLUSTER, 2, ("l", "n")),
        Spread(CLUSTER, 2, ("n", "l")),
    )
    kinds = tensors("X[m,k] W1[branch,n,k] W2[l,n] scale[branch] >E[m,l]:f32", names)
    p = one(ops, [], *mesh, kinds=kinds)
    moved = checked(p, data(p), lambda X, W1, W2, scale: {"E": (scale.prod() * (X @ W1[0].T) * (X @ W1[1].T)) @ W2.T})
    exchange = 2 * (2 - 1) * m * n * 4  # dsm_all_exchange, cls_k (cls_k - 1) M N 4
    shuffle = 2 * (2 - 1) * m * n * 2  # dsm_shuffle, cls_k (cls_shuffle - 1) M N 2
    scatter = (2 - 1) * clusters * m * out * 4  # dsm_reduce_scatter, (cls_reduce - 1) P M L 4
    assert moved.bytes["dsm"] == exchange + shuffle + scatter
    assert set(moved.collectives) == {"all-reduce dsm", "all-gather dsm", "reduce-scatter dsm"}


def test_a_layer_wider_than_a_block_takes_a_second_pass_for_its_statistics() -> None:
    names = axes("rows k=32 out=64")
    ops = program(
        """
        x[rows,k] = load X[rows,k]
        y[rows,out]:f32 = product x W1[out,k]
        sum[rows]:f32 = sum y
        sq[rows,out]:f32 = mul y y
        squares[rows]:f32 = sum sq
        mean[rows]:f32 = mul sum scalar=0.015625
        ms[rows]:f32 = mul squares scalar=0.015625
        mm[rows]:f32 = mul mean mean
        var[rows]:f32 = sub ms mm
        eps[rows]:f32 = add var scalar=1e-5
        r[rows]:f32 = rsqrt eps
        c[rows,out]:f32 = sub y mean
        n[rows,out] = mul c r
        n -> Y[rows,out]
        """,
        names,
    )
    kinds = tensors("X[rows,k] W1[out,k] >Y[rows,out]", names)
    p = one(ops, [("rows", 16), ("out", 16)], Spread(GRID, 2, ("rows",)), kinds=kinds)
    checked(p, data(p, rows=ROWS), lambda X, W1: {"Y": F.layer_norm(X @ W1.T, (64,))})
    assert held(p.stages[0], "y") == ("out",) and held(p.stages[0], "n") == ()


def spatial(depth: int) -> Pipeline:
    first = program("\n".join(MLP.splitlines()[:3]), NAMES)
    second = program("h[rows,hid] = relu a", NAMES, a="rows,hid")
    third = program("y[rows,out] = product h W2[out,hid]\n y -> Y[rows,out]", NAMES, h="rows,hid")
    rows = (Loop("rows", 16),)
    stages = (
        Stage("up", first, rows, (Spread(GRID, 2, ("rows",)),), ("W1",)),
        Stage("act", second, rows, (Spread(GRID, 1, ("rows",)),)),
        Stage("down", third, rows, (Spread(GRID, 3, ("rows",)),), ("W2",)),
    )
    queues = (Queue("a", "up", ("act",), depth=depth), Queue("h", "act", ("down",), depth=depth))
    return Pipeline("spatial", MLP_TENSORS, stages, queues)


def test_stages_side_by_side() -> None:
    p = spatial(4)
    queues = 2 * 2 * ROWS * 48 * 2  # written once and read once
    weights = (2 * 48 * 32 + 3 * 24 * 48) * 2  # once a CTA
    assert checked(p, data(p, rows=ROWS), mlp).bytes["l2"] == queues + weights + ROWS * (32 + 24) * 2
    with pytest.raises(VerifyError, match="depth 1 < 2: the workers of stage 'up'"):
        verify(spatial(1))
    with pytest.raises(PipelineDeadlock, match="room for 2 tiles.*depth 1"):
        run_meshes(spatial(1), data(p, rows=ROWS), FLOAT64)


def test_a_layer_by_columns_feeds_one_by_columns() -> None:
    second = program(
        "h[rows,hid] = relu a\n y[rows,out] = product h W2[out,hid]\n y -> Y[rows,out]", NAMES, a="rows,hid"
    )
    rows = (Loop("rows", 16),)
    stages = (
        Stage("up", program("\n".join(MLP.splitlines()[:3]), NAMES), rows, (Spread(GRID, 4, ("hid",)),)),
        Stage("down", second, rows, (Spread(GRID, 2, ("out",)),)),
    )
    p = Pipeline("wide", MLP_TENSORS, stages, (Queue("a", "up", ("down",)),))
    moved = checked(p, data(p, rows=ROWS), mlp)
    assert moved.collectives["all-gather l2"] == ceil(ROWS / 16)  # each CTA of the second takes four parts of a tile


def test_gradients_of_a_layer_stay_while_rows_stream_past() -> None:
    """dz goes to both; dX streams; dW and db accumulate, two partial sums of each, and are reduced."""
    names = axes("rows k=32 out=24")
    mask = "g[rows,out] = load DY[rows,out]\n y[rows,out] = load Y[rows,out]\n dz[rows,out] = relu_backward g y"
    dw = """
        x[rows,k] = load X[rows,k]
        dw[out,k]:f32 = product dz x
        db[out]:f32 = sum dz
        db -> DB[out]
    """
    rows = (Loop("rows", 16),)
    by_rows = Spread(GRID, 2, ("rows",))
    stages = (
        Stage("mask", program(mask, names), rows, (by_rows,)),
        Stage(
            "dx", program("dx[rows,k] = product dz W[out,k]\n dx -> DX[rows,k]", names, dz="rows,out"), rows, (by_rows,)
        ),
        Stage("dw", program(dw, names, dz="rows,out"), rows, (by_rows, Spread(GRID, 2, ("out",)))),
        Stage("final", program("dw -> DW[out,k]", names, dw="out,k"), (), (Spread(GRID, 2, ("out",)),)),
    )
    queues = (Queue("dz", "mask", ("dx", "dw"), depth=6), Queue("dw", "dw", ("final",), depth=1))
    kinds = tensors("DY[rows,out] Y[rows,out] X[rows,k] W[out,k] >DX[rows,k] >DW[out,k] >DB[out]:f32", names)
    p = Pipeline("backward", kinds, stages, queues)

    def oracle(DY, Y, X, W):
        dz = DY * (Y > 0)
        return {"DX": dz @ W, "DW": dz.T @ X, "DB": dz.sum(0)}

    moved = checked(p, data(p, rows=ROWS), oracle)
    assert moved.collectives["reduction tree l2"] == 1


def test_messages_are_gathered_and_added_by_index() -> None:
    """``cat(e, v[senders], v[receivers]) W``, and the sum of messages at the nodes."""
    names = axes("edges nodes c=8 f=12")
    ops = program(
        """
        e[edges,c] = load E[edges,c]
        s[edges,c] = load V[senders[edges],c]
        r[edges,c] = load V[receivers[edges],c]
        a[edges,f]:f32 = product e W[f,c]
        b[edges,f]:f32 = product s W[f,c+8]
        d[edges,f]:f32 = product r W[f,c+16]
        ab[edges,f]:f32 = add a b
        m[edges,f] = add ab d
        m +> M[receivers[edges],f]
        """,
        {**names, "cc": axes("cc=24")["cc"]},
    )
    kinds = tensors(
        "E[edges,c] V[nodes,c] senders[edges]:i64 receivers[edges]:i64 W[f,cc] >M[nodes,f]:f32", names | axes("cc=24")
    )
    p = one(ops, [("edges", 16)], Spread(GRID, 3, ("edges",)), kinds=kinds)
    inputs = data(p, edges=70, nodes=20)
    inputs |= {n: torch.randint(0, 20, (70,)) for n in ("senders", "receivers")}

    def oracle(E, V, W, senders, receivers):
        m = torch.cat([E, V[senders], V[receivers]], 1) @ W.T
        return {"M": torch.zeros(20, 12, dtype=m.dtype).index_add(0, receivers, m)}

    checked(p, inputs, oracle)


def test_a_convolution_is_a_product_over_taps() -> None:
    names = axes("n=2 h=9 w=9 c=4 o=6 kh=3 kw=3")
    ops = program(
        "p[n,h,w,kh,kw,c] = load X[n,h+kh-1,w+kw-1,c]\n y[n,h,w,o]:f32 = product p W[o,kh,kw,c]\n y -> Y[n,h,w,o]",
        names,
    )
    p = one(
        ops, [("h", 2), ("kh", 1)], Spread(GRID, 2, ("h",)), kinds=tensors("X[n,h,w,c] W[o,kh,kw,c] >Y[n,h,w,o]", names)
    )

    def oracle(X, W):
        return {"Y": F.conv2d(X.permute(0, 3, 1, 2), W.permute(0, 3, 1, 2), padding=1).permute(0, 2, 3, 1)}

    checked(p, data(p), oracle)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.every(3)
def test_random_loops_and_meshes_of_a_block(seed: int) -> None:
    """What the verifier accepts is right, whatever loops over and divides which axis."""
    rng = random.Random(seed)
    tiles = {"rows": 8, "k": 8, "hid": 12, "out": 6}
    loops = [(a, tiles[a]) for a in rng.sample(sorted(tiles), rng.randint(0, 3))]
    mesh = tuple(
        Spread(
            level, rng.choice((2, 3) if level is GRID else (2,)), tuple(rng.sample(sorted(tiles), rng.randint(1, 3)))
        )
        for level in rng.sample((GRID, CLUSTER, WARPS), rng.randint(1, 3))
    )
    kinds = (*MLP_TENSORS, *tensors("W3[hid,k]", NAMES))
    p = one(program(GATED, NAMES), loops, *mesh, kinds=kinds)
    try:
        verify(p)
    except VerifyError as refused:
        assert re.search(r"workers that divide it|on other axes", str(refused)), refused
        return
    inputs = {n: x.double() for n, x in data(p, rows=50).items()}
    want = (F.silu(inputs["X"] @ inputs["W1"].T) * (inputs["X"] @ inputs["W3"].T)) @ inputs["W2"].T
    torch.testing.assert_close(run_meshes(p, inputs, FLOAT64)["Y"], want, rtol=1e-12, atol=1e-12)


# -- what is refused, with the arithmetic


@pytest.mark.parametrize(
    ("text", "loops", "mesh", "why"),
    [
        (MLP, [("rows", 16), ("n", 8)], (), "loops over 'n', which none of its ops has"),
        (MLP, [("rows", 16)], (Spread(CLUSTER, 32, ("rows",)),), "32 = 32 > 16 workers at level 'cluster'"),
        (MLP, [], (Spread(CLUSTER, 16, ("k",)), Spread(CLUSTER, 2, ("out",))), "16 x 2 = 32 > 16"),
        (MLP, [("hid", 16)], (Spread(GRID, 4, ("hid",)),), "hid 48 / 16 = 3 blocks < 4 workers.*1 would have none"),
        (MLP, [("rows", 16)], (Spread(GRID, 2, ("n",)),), "none of its ops has an axis of the 2 workers that divide n"),
        (MLP.replace("W1[hid,k]", "W1[hid,k+1]"), [("rows", 16)], (), "W1' dimension 'k': 1 \\+ 32 = 33 > 32"),
        (MLP.replace("W1[hid,k]", "W1[hid]"), [("rows", 16)], (), "1 coordinates of 'W1', and it has 2 dimensions"),
        (MLP.replace("X[rows,k]", "X[who[rows],k]"), [("rows", 16)], (), "gathers by 'who', which is no tensor"),
        (MLP.replace("X[rows,k]", "X[W1[rows],k]"), [("rows", 16)], (), "gathers by 'W1' of dtype bf16 with 2 dim"),
        (
            MLP.replace("-> Y[rows,out]", "-> Y[order[rows],out]"),
            [("rows", 16)],
            (),
            "can have one order: the last",
        ),
        (MLP.replace("y -> Y[rows,out]", "y -> Y[rows,0]"), [("rows", 16)], (), "a store cannot sum over out"),
        (MLP.replace("y -> Y", "y -> X"), [("rows", 16)], (), "writes input or parameter 'X'"),
        (
            MLP.replace("product h W2[out,hid]", "product h W2[out,hid] combine=max").replace("->", "+>"),
            [("hid", 16)],
            (Spread(GRID, 2, ("hid",)),),
            "adds in memory what is to be combined by max",
        ),
    ],
)
def test_wrong_pipelines_are_told_the_numbers(text, loops, mesh, why) -> None:
    names = {**NAMES, **axes("n=4")}
    kinds = (*MLP_TENSORS, *tensors("order[rows]:i64", names))
    with pytest.raises(VerifyError, match=why):
        verify(one(program(text, names), loops, *mesh, kinds=kinds))


@pytest.mark.parametrize(
    ("made", "taken", "least", "dead"),
    [
        ((3, 1), (2, 1), 24, 4),  # 3 + 2 - 1 blocks of the outer loop, each with all 6 of the inner one
        ((2, 3), (2, 2), 8, 5),  # 2 along the outer loop both, 3 + 2 - 1 along the inner one
        ((2, 3), (2, 3), 6, 5),
    ],
)
def test_rings_of_two_loops_hold_all_of_the_inner_one_where_the_outer_steps_differ(made, taken, least, dead) -> None:
    names = axes("i=12 j=6")
    ops = program(
        """
        x[i,j] = load X[i,j]
        y[i,j] = relu x
        y -> Y[i,j]
        """,
        names,
    )

    def pipeline(depth: int) -> Pipeline:
        ends = zip(("first", "last"), (ops[:1], ops[1:]), (made, taken), strict=True)
        stages = tuple(
            Stage(
                name,
                part,
                (Loop("i", 1), Loop("j", 1)),
                tuple(Spread(Level.GRID, n, (a,)) for a, n in zip("ij", at, strict=True)),
            )
            for name, part, at in ends
        )
        return Pipeline("two", tensors("X[i,j] >Y[i,j]", names), stages, (Queue("x", "first", ("last",), depth=depth),))

    p = pipeline(least)
    checked(p, data(p), lambda X: {"Y": X.relu()})
    with pytest.raises(VerifyError, match=f"depth {least - 1} < {least}"):
        verify(pipeline(least - 1))
    with pytest.raises(PipelineDeadlock):
        run_meshes(pipeline(dead), data(p), FLOAT64)


def test_a_ring_around_a_sum_would_deadlock_at_any_depth_below_the_whole() -> None:
    names = axes("rows=160 k=8")
    rows = (Loop("rows", 16),)
    first = program("x[rows,k] = load X[rows,k]", names)
    total = program("s[k]:f32 = sum x combine=sum", names, x="rows,k")
    last = program("y[rows,k] = mul x s\n y -> Y[rows,k]", names, x="rows,k", s="k")
    stages = (Stage("a", first, rows), Stage("b", total, rows), Stage("c", last, rows))
    kinds = tensors("X[rows,k] >Y[rows,k]", names)

    def made(depth: int) -> Pipeline:
        queues = (Queue("x", "a", ("b", "c"), depth=depth), Queue("s", "b", ("c",), depth=1))
        return Pipeline("sum", kinds, stages, queues)

    with pytest.raises(VerifyError, match="depth 4.*'c' takes none before stage 'b' has summed.*160 / 16 = 10 tiles"):
        verify(made(4))
    with pytest.raises(PipelineDeadlock):
        run_meshes(made(4), data(made(4)), FLOAT64)
    checked(made(10), data(made(10)), lambda X: {"Y": X * X.sum(0)})


def test_text_of_ops_can_be_read_back() -> None:
    for text in (MLP, GATED):
        ops = program(text, NAMES)
        again = program("\n".join(map(show_op, ops)), NAMES)
        assert again == ops


# -- kernels


@pytest.mark.parametrize(
    ("loops", "mesh", "shape"),
    [
        ([("rows", 16)], (Spread(GRID, 2, ("rows",)),), KernelShape.ROW_STREAM),
        ([("rows", 16)], (Spread(WARPS, 2, ("out", "hid")),), KernelShape.ROW_STREAM),
        ([("rows", 16), ("hid", 8)], (Spread(GRID, 2, ("rows",)),), KernelShape.CHUNKED_CONTRACTION),
        ([("hid", 8)], (Spread(CLUSTER, 4, ("hid", "out")),), KernelShape.SHARED_TILE),
        ([("hid", 8)], (Spread(CLUSTER, 4, ("out", "hid")),), KernelShape.SHARED_TILE),
        ([("hid", 8)], (), KernelShape.ONE_CTA),
        ([("hid", 8)], (Spread(GRID, 3, ("hid",)),), KernelShape.STATIONARY_SUM),
    ],
)
def test_the_kernel_shape_follows_from_what_is_summed_and_exchanged(loops, mesh, shape) -> None:
    p = one(program(MLP, NAMES), loops, *mesh)
    assert kernel_shape(p.stages[0]) is shape
    with pytest.raises(VerifyError, match="no kernel can be made of pipeline 'case'"):
        cuda.sources(p)


@pytest.mark.parametrize("changes", [{"tile": 32}, {"transport": Transport.DSM}])
def test_row_pipelines_that_kernels_cannot_run_run_on_the_reference_machine(changes) -> None:
    p = random_pipeline(5, Limits(max_width=24, ops=8, launches=1))
    assert p.queues
    if "tile" in changes:
        loops = (Loop("rows", changes["tile"]),)
        other = p.with_stages(tuple(replace(s, loops=loops) for s in p.stages))
    else:
        other = p.with_stages(p.stages, tuple(replace(q, transport=changes["transport"]) for q in p.queues))
    inputs = {n: x.double() for n, x in tensors_for(p, rows=200).items()}
    want = reference.run(p, inputs, precision="float64")
    got = reference.run(other, inputs, precision="float64")
    assert all(torch.allclose(got[n], want[n], equal_nan=True) for n in want)
    with pytest.raises(VerifyError, match="no kernel can be made of pipeline"):
        cuda.sources(other)
