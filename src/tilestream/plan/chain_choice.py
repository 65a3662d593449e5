"""Whether a region and the sums of its gradients run as one backward chain or apart: predicted, or as it was timed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from tilestream.devices import Device
from tilestream.ir.serialise import pipeline_to_json
from tilestream.kernels.gradients.backward import BackwardChain, build
from tilestream.kernels.gradients.backward.cost import cost
from tilestream.options import Options
from tilestream.plan.backward_chains import STRATEGY, Joined
from tilestream.plan.cache import PlanCache, versions
from tilestream.plan.planner import FALLBACK, Candidate, Plan, is_faster


def proposal(joined: Joined, rows: int, device: Device) -> tuple[Candidate, Candidate]:
    """The chain with its prediction, and the region and its sums apart."""
    us = sum(cost(p, rows, device).total_s for p in joined.pipelines) * 1e6
    return Candidate(STRATEGY, joined.pipelines[0], us), Candidate(FALLBACK, None, None)


def key(joined: Joined, rows: int, device: Device, kind: str, measured: bool) -> str:
    """What the choice is kept under, for target ``kind``."""
    described = [pipeline_to_json(p, sources=False) for p in joined.pipelines]
    text = [described, rows, device.name, kind, measured, versions(), STRATEGY]
    return hashlib.sha256(json.dumps(text, sort_keys=True).encode()).hexdigest()


def decided(rows: int, device: Device, ours: Candidate, apart: Candidate, forced: bool = False) -> Plan:
    """The plan: by what was measured, else predicted; ``forced``: the chain, whatever it takes."""
    chosen = ours if forced or is_faster(ours, apart) else apart
    return Plan("chain", rows, device.name, (ours, apart), chosen)


def expected(joined: Joined, rows: int, device: Device, options: Options, apart_us: float) -> Plan:
    """What a compilation would choose: the measured choice that is kept, else the faster one by prediction. Without
    timing it joins for the reference machine alone.

    Args:
        apart_us: predicted of the region and its sums, copies of weights included.
    """
    ours, apart = proposal(joined, rows, device)
    apart = replace(apart, predicted_us=apart_us)
    if options.target == "reference":
        return decided(rows, device, ours, apart, forced=True)
    if not options.measure or options.strategy != "auto" or is_unchecked(joined):
        return Plan("chain", rows, device.name, (ours, apart), apart)
    kept = PlanCache(options.cache_folder).load(key(joined, rows, device, "cuda", True)) if options.cache else None
    if kept is None:
        return decided(rows, device, ours, apart)
    timed = {c.strategy: c.measured_us for c in kept.candidates}
    ours, apart = (replace(c, measured_us=timed.get(c.strategy)) for c in (ours, apart))
    return decided(rows, device, ours, apart)


def is_unchecked(joined: Joined) -> bool:
    """Whether a chain reads rows that bulk copies cannot address: no GPU has run such a kernel yet."""
    made = [build(pipeline) for pipeline in joined.pipelines]
    return any(isinstance(chain, BackwardChain) and chain.odd for chain in made)
