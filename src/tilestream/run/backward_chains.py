"""A region of a backward graph and the stationary sums of what it makes, joined to one kernel where that is faster."""

from __future__ import annotations

import logging
import operator
from dataclasses import replace

from torch import fx

from tilestream.announce import announce_failure
from tilestream.errors import VerifyError
from tilestream.graph.nodes import value
from tilestream.graph.settled import settle
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.options import Options
from tilestream.plan.backward_chains import STRATEGY
from tilestream.plan.cache import PlanCache
from tilestream.plan.chain_choice import decided, is_unchecked, proposal
from tilestream.plan.chain_choice import key as key_of
from tilestream.plan.planner import Plan, summary
from tilestream.run import prepare as planning
from tilestream.run.chain_pairs import Pair, arguments, find_pair, specs
from tilestream.run.operator import REGION
from tilestream.run.spec import decode, encode
from tilestream.run.target import Target
from tilestream.run.time_chains import time_pair

log = logging.getLogger(__name__)

_plans: dict[str, Plan] = {}


def join_chains(owner: fx.GraphModule, options: Options, target: Target) -> list[Plan]:
    """Join the calls of a backward graph that are a backward chain, each pair where one kernel is faster.

    Returns:
        A plan for each joined pair, whose fallback is the pair apart. An exception of ours costs the join.

    Raises:
        TilestreamError: with ``fallback=False``.
    """
    made: list[Plan] = []
    for sums in [n for n in owner.graph.nodes if n.target is REGION]:
        try:
            pair = find_pair(sums, target)
            if pair is None or (target.kind == "cuda" and is_unchecked(pair.joined)):
                continue
            with planning.kernels_kept(options, target):
                found = plan(pair, options, target)
            if found.chosen.strategy != STRATEGY:
                continue
            _place(owner.graph, pair, target.kind)
        except VerifyError as reason:
            log.debug("no backward chain: %s", reason)
            continue
        except Exception as failure:
            if not options.fallback:
                raise
            announce_failure("a region and its weights' gradients stay apart", failure)
            continue
        made.append(found)
    if made:
        settle(owner, sort=True)
    return made


def plan(pair: Pair, options: Options, target: Target) -> Plan:
    """Joined or apart: from this process, the disk, or timed now; the joined one where the reference machine runs it.

    Raises:
        TilestreamError: the kernel cannot be built, or computes something else.
    """
    candidate, apart = proposal(pair.joined, pair.rows, target.hardware)
    measures = planning.measures(options, target) and options.strategy == "auto"
    key = key_of(pair.joined, pair.rows, target.hardware, target.kind, measures)
    kept = PlanCache(options.cache_folder) if options.cache else None
    made = _plans.get(key) or (kept.load(key) if kept is not None else None)
    if made is None:
        if measures:
            ours_us, apart_us = time_pair(pair, target)
            candidate, apart = replace(candidate, measured_us=ours_us), replace(apart, measured_us=apart_us)
        made = decided(pair.rows, target.hardware, candidate, apart, forced=target.kind == "reference")
        if kept is not None:
            kept.store(key, made)
        log.info("backward chain: %s", summary(made))
    _plans[key] = made
    return made


def _place(graph: fx.Graph, pair: Pair, kind: str) -> None:
    """The launches stand where the sums stood; users that stand before them are sorted behind them later."""
    have: dict[str, fx.Node] = {}
    like = value(pair.given[0])
    assert like is not None
    with graph.inserting_before(pair.sums):
        for told, nodes in zip(specs(pair, kind), arguments(pair), strict=True):
            given = [pair.given[n] if isinstance(n, int) else have[n] for n in nodes]
            call = graph.call_function(REGION, (given, [], encode(told)))
            dtypes = [TORCH_DTYPES[told.pipeline.tensor(r.tensor).dtype] for r in told.results]
            made = [
                like.new_empty([int(n) for n in r.shape], dtype=d) for r, d in zip(told.results, dtypes, strict=True)
            ]
            call.meta = {"val": made, "stack_trace": pair.sums.meta.get("stack_trace")}
            for index, (result, fake) in enumerate(zip(told.results, made, strict=True)):
                have[result.tensor] = graph.call_function(operator.getitem, (call, index))
                have[result.tensor].meta = {"val": fake}
    for call in (pair.sums, pair.region):
        results = decode(str(call.args[2])).results
        for user in list(call.users):
            assert isinstance(user.args[1], int)
            name = results[user.args[1]].tensor
            if call is pair.region and name not in pair.wanted:
                continue
            have[name].meta = {**user.meta, "val": have[name].meta["val"]}
            user.replace_all_uses_with(have[name])
