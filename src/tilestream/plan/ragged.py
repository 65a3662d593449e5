"""Which way a ragged region runs: by one kernel of ours in sorted order, or by Inductor's kernels around the sums.

What is predicted are bytes: rows of nodes stream, rows that edges name come one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from tilestream.devices import Device
from tilestream.errors import IRError, VerifyError
from tilestream.graph.region import Region
from tilestream.graph.sizes import hint
from tilestream.ir.pipeline import ELEMENT_BYTES, Pipeline
from tilestream.ir.serialise import pipeline_to_json
from tilestream.ir.verify import verify
from tilestream.kernels.families import why_no_kernel
from tilestream.options import Options
from tilestream.plan.candidates import FALLBACK, Candidate, Plan
from tilestream.plan.chooser import Question, decide
from tilestream.plan.finalists import Shown
from tilestream.plan.passes.weigh_by_softmax import weigh_by_softmax

STRATEGY = "segments"
START_US, ROWS_BYTES_PER_US = 3.0, 3e6
"""Of such a kernel, a fixed part and a rate (``plan.scatter_cost`` has the same of plain sums)."""


def edges_of(region: Region) -> int:
    """Edges in the call that was captured; 0 where the program reads none."""
    given = [n.meta["val"] for n in region.graph.graph.nodes if n.op == "placeholder"]
    for operand in region.inputs:
        if region.program.tensor(operand.tensor).axes[0].name in region.program.ragged:
            return hint(given[operand.index].shape[0])
    return 0


def question(region: Region, device: Device, options: Options, fallback_us: Shown | None = None) -> Question:
    """Ours or Inductor's.

    Args:
        fallback_us: what is shown of Inductor's kernels.
    """
    edges = edges_of(region)
    forced = options.strategy == STRATEGY or options.target == "reference"

    def propose() -> Sequence[Candidate]:
        if options.strategy not in ("auto", STRATEGY):
            reason = f"a ragged region has no pipeline of strategy {options.strategy!r}"
            return Candidate(STRATEGY, None, None, rejected=reason), Candidate(FALLBACK, None, None)
        theirs = None if fallback_us is None else fallback_us()
        return _ours(region.program, region.rows, edges, options), Candidate(FALLBACK, None, theirs)

    def decides() -> dict[str, Any]:
        sizes = [region.rows.bit_length(), edges.bit_length()]
        return {"ragged": pipeline_to_json(region.program, sources=False), "sizes": sizes, "target": options.target}

    return Question(
        region.name, region.rows, device, decides, propose, forced=forced and options.strategy in ("auto", STRATEGY),
        refusal=f"region {region.name!r} has no kernel", remedy="allow another device",
    )  # fmt: skip


def plan(region: Region, device: Device, options: Options, fallback_us: Shown | None = None) -> Plan:
    """The choice by prediction, made now."""
    return decide(question(region, device, options, fallback_us))


def _ours(program: Pipeline, rows: int, edges: int, options: Options) -> Candidate:
    try:
        program = weigh_by_softmax(program)
        verify(program)
    except (VerifyError, IRError) as error:
        return Candidate(STRATEGY, None, None, rejected=error.cause)
    if options.target != "reference" and (why := why_no_kernel(program)):
        return Candidate(STRATEGY, None, None, rejected=why)
    return Candidate(STRATEGY, program, predicted_us(program, rows, edges))


def moved_bytes(program: Pipeline, rows: int, edges: int) -> int:
    """Bytes that are read and written: of each read through an index a row an edge, of all else what there is."""
    ragged = program.ragged
    outer = {a.of for a in ragged.values()}
    size = 0
    for op in (op for stage in program.stages for op in stage.ops):
        for view in op.views:
            tensor = next((t for t in program.tensors if t.name == view.of), None)
            if tensor is None or view.at is None or not view.at or not view.at[0].axes:
                continue
            axis = view.at[0].axes[0]
            many = edges if axis in ragged else rows if axis in outer else 1
            size += many * prod(tensor.shape) * ELEMENT_BYTES[tensor.dtype] + (4 * many if view.at[0].index else 0)
    return size + 4 * (rows + 1)


def predicted_us(program: Pipeline, rows: int, edges: int) -> float:
    """Microseconds of the kernel of a ragged pipeline."""
    return START_US + moved_bytes(program, rows, edges) / ROWS_BYTES_PER_US
