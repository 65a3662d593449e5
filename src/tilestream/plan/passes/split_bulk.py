"""One stage a kernel: what eager execution with fused epilogues does. The baseline."""

from __future__ import annotations

from tilestream.devices import Device
from tilestream.ir.pipeline import Pipeline, Transport
from tilestream.ir.tileops import OPS
from tilestream.plan.passes.fit import isolated, narrowest
from tilestream.plan.passes.segments import Body, body, cut

EPILOGUE = ("unary", "binary")


def split_bulk(program: Pipeline, device: Device, epilogues: bool = True) -> Pipeline:
    """Cut before each linear, and behind the unary and binary ops that follow one; DRAM queues between.

    ``epilogues=False`` cuts directly behind each linear: what Inductor does by default, with one kernel for all that
    lies between two products.

    Norms, reductions and concatenations are kernels of their own, as a library GEMM cannot take them in. A
    concatenation that is too wide for registers joins the linear behind it.
    """
    parts = body(program, cheap=("load",))
    cuts = _kernel_starts(parts, epilogues)
    pipeline = cut(parts, cuts, Transport.DRAM, "bulk")
    alone = isolated(pipeline)
    wide = {
        stage.name
        for stage in pipeline.stages[:-1]
        if all(op.kind in ("load", "cat", "slice") for op in stage.ops) and narrowest(alone[stage.name], device)[1]
    }
    if not wide:
        return pipeline
    kept = [c for i, c in enumerate(cuts) if f"s{i}" not in wide]
    return cut(parts, kept, Transport.DRAM, "bulk")


def _kernel_starts(parts: Body, epilogues: bool) -> list[int]:
    cuts: list[int] = []
    in_linear = False
    for i, op in enumerate(parts.ops):
        family = OPS[op.kind].family
        fusable = (
            op.kind == "store"
            or (in_linear and epilogues and family in EPILOGUE)
            or (not in_linear and family != "linear")
        )
        if i and not fusable:
            cuts.append(i)
        if i == 0 or not fusable:
            in_linear = family == "linear"
    return cuts
