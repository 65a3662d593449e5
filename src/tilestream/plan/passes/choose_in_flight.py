"""How many products a stage has under way at once."""

from __future__ import annotations

from dataclasses import replace

from tilestream.errors import VerifyError
from tilestream.ir.pipeline import Pipeline, Residency, Stage
from tilestream.kernels.stream.build import build
from tilestream.kernels.stream.layout import lay_out


def choose_in_flight(p: Pipeline, in_flight: int = 2) -> Pipeline:
    """``in_flight`` for every stage that streams weights; 1 where its weight ring has two pages.

    Of two pages, two products in flight hold both until the second has arrived: no load would overlap another
    (GraphCast's block: 1335 against 1250 us). With more pages it depends (NeRF: 542 against 522; the 8 x 256 chain:
    381 against 399), so that the planner times both.
    """
    return p.with_stages(tuple(_chosen(stage, p, in_flight) for stage in p.stages))


def _chosen(stage: Stage, p: Pipeline, in_flight: int) -> Stage:
    if stage.residency is not Residency.STREAMED or not any(op.kind == "linear" for op in stage.ops):
        return stage
    try:
        shallow = lay_out(build(stage, p)).pages < 3
    except VerifyError:
        return stage  # the verifier tells why it is not legal, and better
    return replace(stage, in_flight=1 if shallow else in_flight)
