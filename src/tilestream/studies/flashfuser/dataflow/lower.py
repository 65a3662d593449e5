"""A dataflow of a chain as a pipeline of axes: what the reference machine executes and kernels are made from.

A group's blocks are directions of the mesh (cls m, n, k, l): ``(m)``, ``(k, l)``, ``(l, n)``, ``(n, l)`` of sizes
cls_m, cls_k, shuffle and reduce. Every exchange of the paper follows from the order of their axes: all-exchange is the
all-reduce over ``(k, l)`` that the activation asks for, shuffle the all-gather over ``(l, n)``, reduce-scatter what
``(n, l)`` owes the store, and inter-cluster reduce the sum in memory over the grid's ``(n)``.
"""

from __future__ import annotations

from dataclasses import replace

from tilestream.ir.axes import Level, Loop, Spread
from tilestream.ir.pipeline import Pipeline, Stage
from tilestream.ir.read import axes, program, tensors
from tilestream.studies.flashfuser.dataflow.chain import Chain, Gate
from tilestream.studies.flashfuser.dataflow.convolve import convolve
from tilestream.studies.flashfuser.dataflow.schedule import AXES, Dataflow

FIRST = {
    Gate.NONE: """
        c[m,n]:f32 = product {A} {B}
        h[m,n] = relu c
    """,
    Gate.SEQUENTIAL: """
        c[m,n]:f32 = product {A} {B}
        u[m,n]:f32 = product {A} {B2}
        g[m,n]:f32 = silu c
        h[m,n] = mul g u
    """,
    # silu on the branch that the flag marks: u + flag (silu(u) - u)
    Gate.SPATIAL: """
        u[m,branch,n]:f32 = product {A} {B}
        g[m,branch,n]:f32 = silu u
        t[m,branch,n]:f32 = sub g u
        f[m,branch,n]:f32 = mul t flag[branch]
        v[m,branch,n]:f32 = add u f
        c[m,n]:f32 = copy v combine=mul
        h[m,n] = copy c
    """,
}
"""From A and B to the middle, C after its activation. Copies and activations part the exchanges: one kind an edge."""

TENSORS = {
    Gate.NONE: "A[m,k] WB[n,k] WD[l,n] >E[m,l]",
    Gate.SEQUENTIAL: "A[m,k] WB[n,k] WB2[n,k] WD[l,n] >E[m,l]",
    Gate.SPATIAL: "A[m,k] WB[branch,n,k] flag[branch] WD[l,n] >E[m,l]",
}


def lower(chain: Chain, flow: Dataflow) -> Pipeline:
    """The pipeline of one stage that runs ``chain`` as ``flow`` says.

    An operand whose block serves every round of the loops inside its own is loaded as a tile of its own, others where
    they are used: so a re-read costs what Chimera's rule says (``volumes``). Of a convolution, M is an image's rows and
    columns, K its taps and channels, and A a view of the image.

    Raises:
        OptionError: tiles or blocks do not come out even.
    """
    flow.check(chain)
    loops = flow.schedule.loops
    halves = chain.gate is Gate.SPATIAL
    spread = "branch,n,k" if halves else "n,k"
    second = ["WB2"] * (chain.gate is Gate.SEQUENTIAL)
    held = [("A", "m,k", "n"), *((b, spread, "m") for b in ("WB", *second))]
    held = [(name, dims) for name, dims, over in held if kept(loops, dims, over)]
    lines = [f"{name.lower()}[{dims}] = load {name}[{dims}]" for name, dims in held]
    operands = {"A": "A[m,k]", "B": f"WB[{spread}]", "B2": "WB2[n,k]", "D": "WD[l,n]"}
    short = {"A": "A", "WB": "B", "WB2": "B2"}
    operands |= {short[name]: name.lower() for name, _ in held}
    first = [FIRST[chain.gate].format(**operands)]
    if kept(loops, "l,n", "m"):
        operands["D"], load = "d", ["d[l,n] = load WD[l,n]"]
        # inside a loop over L it is loaded there; before all else it does not part the two products' loops
        first = first + load if "l" in loops else load + first
    adds = "n" in flow.schedule.spatial and flow.trips(chain)["n"] > 1
    lines += [*first, f"e[m,l]:f32 = product h {operands['D']}", f"e {'+' if adds else '-'}> E[m,l]"]
    sizes = {a: chain.size(a) for a in AXES} | ({"branch": 2} if halves else {})
    stage = Stage("chain", (), _loops(flow), _mesh(chain, flow))
    words, kinds = "\n".join(lines), TENSORS[chain.gate]
    if chain.image is not None:
        words, kinds, sizes, stage = convolve(chain, chain.image, flow.tiles.m, words, kinds, sizes, stage)
    names = axes(" ".join(f"{a}={n}" for a, n in sizes.items()))
    stage = replace(stage, ops=program(words, names))
    return Pipeline(chain.name, tensors(kinds, names), (stage,))


def kept(loops: str, own: str, over: str) -> bool:
    """Whether a block of an operand with axes ``own`` serves all rounds of the loop over ``over``: it lies inside."""
    return over in loops and all(loops.index(a) < loops.index(over) for a in own.split(",") if a in loops)


def _loops(flow: Dataflow) -> tuple[Loop, ...]:
    """A worker's part of L is what it stores: a block's tile, divided by the groups that it is summed over."""
    t = flow.tiles
    tile = {"m": t.m, "n": t.n, "k": t.k, "l": t.l // flow.cluster.reduce}
    return tuple(Loop(a, tile[a]) for a in flow.schedule.loops)


def _mesh(chain: Chain, flow: Dataflow) -> tuple[Spread, ...]:
    trips, c = flow.trips(chain), flow.cluster
    halves = "branch" if chain.gate is Gate.SPATIAL else "k"
    directions = [Spread(Level.GRID, trips[a], (a,)) for a in flow.schedule.spatial]
    directions += [
        Spread(Level.CLUSTER, c.m, ("m",)),
        Spread(flow.middle, c.k, (halves, "l")),
        Spread(flow.middle, c.shuffle, ("l", "n")),
        Spread(flow.tail, c.reduce, ("n", "l")),
    ]
    return tuple(d for d in directions if d.size > 1)
