"""Simulated times of kernels of segments beside what they took: docs/kernels.md, on two graphs that were in view when
its form was chosen. They are of kernels as they were before their loops became shorter."""

from __future__ import annotations

from statistics import mean

import numpy as np
import pytest
from ragged_cases import CASES, GAT_TENSORS, PASSES, SCORES, ragged

from tilestream.devices import get
from tilestream.ir.lengths import Lengths
from tilestream.ir.pipeline import Pipeline
from tilestream.ir.text import show_op
from tilestream.simulator import simulate

H200 = get("h200")
NODES, EDGES = 100_000, 1_000_000
GATHERED = "m[edges,f] = copy x[src[edges],f]\ns[nodes,f]:f32 = product m\n"
ONE_PASS = f"{SCORES}\ny[nodes,h,c]:f32 = product s m combine=softmax\ny -> Y[nodes,h,c]"

WITH_EDGES = """
    q[nodes,h,c] = copy nq[nodes,h,c]
    k[edges,h,c] = copy xk[src[edges],h,c]
    e[edges,h,c] = copy ee[order[edges],h,c]
    ke[edges,h,c]:f32 = add k e
    p[edges,h]:f32 = product q ke
    s[edges,h]:f32 = mul p scalar=0.17
    v[edges,h,c] = copy xv[src[edges],h,c]
    ve[edges,h,c]:f32 = add v e
    y[nodes,h,c]:f32 = product s ve combine=softmax
    y -> Y[nodes,h,c]
"""
OF_EDGES = "nq[nodes,h,c] xk[x.rows,h,c] xv[x.rows,h,c] ee[edges,h,c] order[edges]:i32 >Y[nodes,h,c]"


def told(text: str, given: str, sizes: str) -> Pipeline:
    """With the list of busy nodes that sorting makes."""
    names = f"nodes edges=starts[nodes] x.rows starts.rows starts.busy.rows {sizes}"
    index = "src[edges]:i32 starts[starts.rows]:i32 starts.busy[starts.busy.rows]:i32"
    inputs, outputs = given.split(" >", 1)
    return ragged(text, f"{inputs.split(' src')[0]} {index} >{outputs}", names)


def again(name: str, given: str, sizes: str) -> Pipeline:
    """A case with other sizes."""
    return told("\n".join(map(show_op, CASES[name].pipeline.stages[0].ops)), given, sizes)


X = "x[x.rows,f] >Y[nodes,f]"
PNA = "x[x.rows,f] >Mean[nodes,f] >Max[nodes,f] >Min[nodes,f] >Std[nodes,f]"
MEASURED: dict[str, tuple[Pipeline, float, float | None]] = {
    "GIN, 64": (again("GIN", X, "f=64"), 23.4, 35.6),
    "mean, 128": (again("mean", X, "f=128"), 42.1, 55.0),
    "sum, 64 f32": (
        told(f"{GATHERED}s -> Y[nodes,f]", "x[x.rows,f]:f32 >Y[nodes,f]:f32", "f=64"),
        43.4,
        None,
    ),
    "sum, 33": (told(f"{GATHERED}s -> Y[nodes,f]", X, "f=33"), 50.2, None),
    "PNA, 64": (again("PNA", PNA, "f=64"), 45.3, 74.7),
    "PNA, 128": (again("PNA", PNA, "f=128"), 85.6, 111.0),
    "GAT, one pass": (told(ONE_PASS, GAT_TENSORS, "h=4 c=64"), 121.0, 130.0),
    "TransformerConv": (told(WITH_EDGES, OF_EDGES, "h=4 c=32"), 188.0, 198.0),
    "GAT, three passes": (told(PASSES, GAT_TENSORS, "h=4 c=64"), 182.0, None),
}
"""Microseconds on the uniform graph and where the k-th node's share of the edges falls as k^-0.8."""


def graphs() -> tuple[Lengths, Lengths]:
    rng = np.random.default_rng(1)
    share = np.arange(1, NODES + 1) ** -0.8
    even = np.bincount(rng.integers(0, NODES, EDGES), minlength=NODES)
    power = rng.permutation(rng.multinomial(EDGES, share / share.sum()))  # hubs are anywhere
    return Lengths.of(even.tolist()), Lengths.of(power.tolist())


def test_simulated_times_are_those_of_the_gpu() -> None:
    errors: list[dict[str, float]] = [{}, {}]
    for name, (pipeline, *took) in MEASURED.items():
        for found, lengths, us in zip(errors, graphs(), took, strict=True):
            if us is not None:
                made = simulate(pipeline, {"x.rows": NODES}, H200, spans=False, lengths={"edges": lengths})
                found[name] = made.time_us / us - 1
    uniform, power = ([abs(e) for e in found.values()] for found in errors)
    assert mean(uniform) < 0.12 and max(uniform) < 0.4, errors[0]
    assert mean(power) < 0.16 and max(power) < 0.3, errors[1]


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.every(3)
def test_unlike_lengths_cost_more(name: str) -> None:
    even, skewed = (
        simulate(MEASURED[name][0], {"x.rows": NODES}, H200, spans=False, lengths={"edges": x}).time_us
        for x in graphs()
    )
    _, uniform, power = MEASURED[name]
    assert skewed > min(1.1, power / uniform if power else 1.1) * even  # TransformerConv took 1.05 times as long
