"""What kernels of segments can do: for each feature a small ragged pipeline with it, and what stands in the way."""

from __future__ import annotations

from dataclasses import replace

from tilestream.errors import TilestreamError
from tilestream.ir.axes import Axis, Level, Loop, Spread
from tilestream.ir.pipeline import Pipeline, Role, Stage, Tensor
from tilestream.ir.read import axes, program, tensors
from tilestream.kernels.families import kernel_of
from tilestream.kernels.kernel import Kernel

AXES = "nodes edges=starts[nodes] starts.rows x.rows c=64 k=64"
GIVEN = "src[edges]:i32 starts[starts.rows]:i32"
SUM = """
x[edges,c] = copy X[src[edges],c]
s[nodes,c]:f32 = product x
"""
ROWS = "x[nodes,c] = copy X[nodes,c]\n"
NORM = """
m[{0}]:f32 = product {1}
mean[{0}]:f32 = mul m scalar=0.015625
d[{0},c]:f32 = sub {1} mean
v[{0}]:f32 = product d d
r[{0}]:f32 = rsqrt v
z[{0},c]:f32 = mul d r
"""

PIPELINES: dict[str, tuple[str, str, str]] = {
    "gathered rows": (AXES, "X[x.rows,c] >Y[nodes,c]", SUM + "s -> Y[nodes,c]"),
    "parts of a cat": (
        AXES.replace("k=64", "k=128"),
        "X[x.rows,c] E[edges,c] >Y[nodes,k]",
        "a[edges,c] = copy X[src[edges],c]\nb[edges,c] = copy E[edges,c]\nj[edges,k] = cat a[edges,k] b[edges,k-64]\n"
        "s[nodes,k]:f32 = product j\ns -> Y[nodes,k]",
    ),
    "taps": (
        AXES,
        "X[x.rows,c] >Y[nodes,c]",
        "x[edges,c] = copy X[2*edges+1,c]\ns[nodes,c]:f32 = product x\ns -> Y[nodes,c]",
    ),
    "odd widths": (AXES.replace("c=64", "c=61"), "X[x.rows,c] >Y[nodes,c]", SUM + "s -> Y[nodes,c]"),
    "weights `[in, out]`": (
        AXES,
        "X[x.rows,c] W[c,k] >Y[nodes,k]",
        SUM + "y[nodes,k] = product s W[c,k]\ny -> Y[nodes,k]",
    ),
    "transposed input": (
        AXES,
        "X[c,x.rows] >Y[nodes,c]",
        "x[edges,c] = copy X[c,src[edges]]\ns[nodes,c]:f32 = product x\ns -> Y[nodes,c]",
    ),
    "norm in front": (
        AXES,
        "X[x.rows,c] >Y[nodes,c]",
        "x[edges,c] = copy X[src[edges],c]\n"
        + NORM.format("edges", "x")
        + "s[nodes,c]:f32 = product z\ns -> Y[nodes,c]",
    ),
    "norm behind": (AXES, "X[x.rows,c] >Y[nodes,c]", SUM + NORM.format("nodes", "s") + "z -> Y[nodes,c]"),
    "residual": (
        AXES,
        "X[x.rows,c] >Y[nodes,c]",
        SUM + "h[nodes,c] = copy X[nodes,c]\ny[nodes,c] = add s h\ny -> Y[nodes,c]",
    ),
    "several results": (
        AXES,
        "X[x.rows,c] >Y[nodes,c] >Z[nodes,c]",
        SUM + "m[nodes,c]:f32 = product x combine=max empty=0\ns -> Y[nodes,c]\nm -> Z[nodes,c]",
    ),
    "tf32": (
        AXES,
        "X[x.rows,c]:f32 W[k,c]:f32 >Y[nodes,k]:f32",
        "x[edges,c]:f32 = copy X[src[edges],c]\ns[nodes,c]:f32 = product x\ny[nodes,k]:f32 = product s W[k,c]\n"
        "y -> Y[nodes,k]",
    ),
    "float32 residual stream": (
        AXES,
        "X[x.rows,c] H[nodes,c]:f32 >Y[nodes,c]:f32",
        SUM + "h[nodes,c]:f32 = copy H[nodes,c]\ny[nodes,c]:f32 = add s h\ny -> Y[nodes,c]",
    ),
}  # fmt: skip


def pipeline(feature: str) -> Pipeline:
    """The ragged pipeline with a feature; that of gathered rows for what belongs to the frame."""
    named, given, text = PIPELINES.get(feature, PIPELINES["gathered rows"])
    known = axes(named)
    ops = tuple(replace(op, source=f"ragged_features.py: {op.source}") for op in program(text, known))
    stage = Stage("all", ops, (Loop("nodes", 8), Loop("edges", 8)), (Spread(Level.GRID, 264, ("nodes",)),))
    busy = Tensor("starts.busy", Role.PARAMETER, (Axis("starts.busy.rows"),), "i32")
    return Pipeline("ragged", (*tensors(f"{GIVEN} {given}", known), busy), (stage,))


def kernels(feature: str) -> tuple[list[Kernel], str]:
    """Its kernel; and why there is none."""
    try:
        kernel = kernel_of(pipeline(feature))
        return ([] if kernel.refusal else [kernel]), kernel.refusal
    except TilestreamError as error:
        return [], error.cause
