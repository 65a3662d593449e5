"""A region and the stationary sums of what it makes: joined to one kernel, or apart where that is faster."""

from __future__ import annotations

import logging
from dataclasses import replace

from tilestream.options import Options
from tilestream.plan.cache import PlanCache
from tilestream.plan.chain_choice import decided, proposal
from tilestream.plan.chain_choice import key as key_of
from tilestream.plan.pairs import Pair
from tilestream.plan.planner import Plan, summary
from tilestream.run import prepare as planning
from tilestream.run.target import Target
from tilestream.run.time_chains import time_pair

log = logging.getLogger(__name__)

_plans: dict[str, Plan] = {}


def plan(pair: Pair, options: Options, target: Target) -> Plan:
    """Joined or apart: from this process, the disk, or timed now; the joined one where the reference machine runs it.

    Raises:
        TilestreamError: the kernel cannot be built, or computes something else.
    """
    candidate, apart = proposal(pair.joined, pair.launch.rows, target.hardware)
    measures = planning.measures(options, target) and options.strategy == "auto"
    key = key_of(pair.joined, pair.launch.rows, target.hardware, target.kind, measures)
    kept = PlanCache(options.cache_folder) if options.cache else None
    made = _plans.get(key) or (kept.load(key) if kept is not None else None)
    if made is None:
        if measures:
            ours_us, apart_us = time_pair(pair, target)
            candidate, apart = replace(candidate, measured_us=ours_us), replace(apart, measured_us=apart_us)
        made = decided(pair.launch.rows, target.hardware, candidate, apart, forced=target.kind == "reference")
        if kept is not None:
            kept.store(key, made)
        log.info("backward chain: %s", summary(made))
    _plans[key] = made
    return made
