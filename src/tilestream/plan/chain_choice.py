"""Whether a region and the sums of its gradients run as one backward chain or apart: predicted, or as it was timed."""

from __future__ import annotations

from tilestream.devices import Device
from tilestream.errors import PlanError
from tilestream.ir.serialise import pipeline_to_json
from tilestream.kernels.gradients.cost import cost
from tilestream.options import Options
from tilestream.plan.backward_chains import STRATEGY, Joined
from tilestream.plan.candidates import FALLBACK, Candidate, Plan
from tilestream.plan.chooser import Question, decide, kept


def question(
    joined: Joined, rows: int, device: Device, timed: bool, forced: bool, apart_us: float | None = None
) -> Question:
    """Whether the chain runs, or the region and its sums apart, which take ``apart_us`` by prediction.

    Args:
        timed: whether both ways are, before a GPU runs any: nothing is joined there by prediction.
        forced: apart is no alternative, as for the reference machine.
    """

    def propose() -> tuple[Candidate, ...]:
        us = sum(cost(p, rows, device).seconds for p in joined.pipelines) * 1e6
        why = "" if forced or timed else "it is joined only where both ways are timed"
        return Candidate(STRATEGY, joined.pipelines[0], us, rejected=why), Candidate(FALLBACK, None, apart_us)

    def decides() -> list[object]:
        return [STRATEGY, [pipeline_to_json(p, sources=False) for p in joined.pipelines], rows]

    return Question("backward chain", rows, device, decides, propose, forced)


def expected(joined: Joined, rows: int, device: Device, options: Options, apart_us: float) -> Plan:
    """What a compilation would choose: by the times that are kept, else the faster one by prediction.

    Args:
        apart_us: predicted of the region and its sums, copies of weights included.
    """
    measures = options.measure and options.strategy == "auto"
    asked = question(joined, rows, device, measures, options.target == "reference", apart_us)
    timed = kept(asked, options, measured=True)
    if timed is None:
        return decide(asked)
    found = {c.name: PlanError(c.rejected) if c.measured_us is None else c.measured_us for c in timed.candidates}
    return decide(asked, lambda wanted: [found[c.name] for c in wanted])
