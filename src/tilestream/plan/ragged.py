"""Which way a ragged region runs: by one kernel of ours in sorted order, or by Inductor's kernels around the sums.

What is predicted is the simulator's time, of edges that are at any node each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilestream.devices import Device
from tilestream.errors import IRError, VerifyError
from tilestream.graph.region import Region
from tilestream.graph.sizes import hint
from tilestream.ir.pipeline import Pipeline
from tilestream.ir.serialise import pipeline_to_json
from tilestream.ir.verify import verify
from tilestream.kernels.families import why_no_kernel
from tilestream.options import Options
from tilestream.plan.candidates import FALLBACK, Candidate, Plan
from tilestream.plan.chooser import Question, decide
from tilestream.plan.finalists import Shown
from tilestream.plan.passes.weigh_by_softmax import weigh_by_softmax
from tilestream.plan.shown import pipeline_us

STRATEGY = "segments"


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
        return _ours(region.program, region.rows, edges, device, options), Candidate(FALLBACK, None, theirs)

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


def _ours(program: Pipeline, rows: int, edges: int, device: Device, options: Options) -> Candidate:
    try:
        program = weigh_by_softmax(program)
        verify(program)
    except (VerifyError, IRError) as error:
        return Candidate(STRATEGY, None, None, rejected=error.cause)
    if options.target != "reference" and (why := why_no_kernel(program)):
        return Candidate(STRATEGY, None, None, rejected=why)
    return Candidate(STRATEGY, program, pipeline_us(program, rows, device, edges))
