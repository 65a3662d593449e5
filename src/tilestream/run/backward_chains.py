"""A region of a backward graph and the stationary sums of what it makes, joined to one kernel where that is faster."""

from __future__ import annotations

import hashlib
import json
import logging
import operator
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tilestream.announce import announce_failure
from tilestream.errors import PlanError, VerifyError
from tilestream.graph.lowering import Steps
from tilestream.graph.nodes import aten, packet, value
from tilestream.graph.real import real
from tilestream.graph.region import Operand
from tilestream.graph.sizes import hint
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.pipeline import Pipeline, Role
from tilestream.ir.serialise import pipeline_to_json
from tilestream.options import Options
from tilestream.plan.backward_chains import STRATEGY, Joined, cost, join
from tilestream.plan.cache import PlanCache, versions
from tilestream.plan.planner import FALLBACK, MARGIN, Candidate, Plan, summary
from tilestream.run import oracle
from tilestream.run import prepare as planning
from tilestream.run.call import RegionCall
from tilestream.run.operator import REGION
from tilestream.run.spec import TENSOR, RegionSpec, ResultSpec, decode, encode
from tilestream.run.stopwatch import timed
from tilestream.run.target import Target
from tilestream.run.timing import ROUNDS, capture, interleaved

log = logging.getLogger(__name__)

TURN: Steps = (("t",),)
_plans: dict[str, Plan] = {}


@dataclass(frozen=True)
class Pair:
    """Two calls of a graph: a region, and the stationary sums of its results.

    Attributes:
        given: nodes that the joined call takes: the region's arguments, then the sums' that are no results of it.
        joined: what both are together.
    """

    region: fx.Node
    sums: fx.Node
    given: tuple[fx.Node, ...]
    operands: tuple[Operand, ...]
    wanted: tuple[str, ...]
    joined: Joined
    rows: int


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
            pair = _pair(owner.graph, sums, target)
            if pair is None:
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
        from torch._inductor.pattern_matcher import stable_topological_sort

        stable_topological_sort(owner.graph)
        owner.graph.eliminate_dead_code()
        owner.graph.lint()
        owner.recompile()
    return made


def _pair(graph: fx.Graph, sums: fx.Node, target: Target) -> Pair | None:
    """The pair whose second call is ``sums``; None where it is no such call, or its gradients are not one region's.

    Raises:
        VerifyError: the two are no backward chain.
    """
    told, arguments = decode(str(sums.args[2])), _tensors(sums)
    if told.pipeline.strategy != "stationary":
        return None
    makers = {whole for node in arguments if (whole := _maker(node)) is not None}
    if len(makers) != 1:
        return None
    (region,) = makers
    rows_told, order = decode(str(region.args[2])), {n: k for k, n in enumerate(graph.nodes)}
    if rows_told.pipeline.strategy == "stationary" or rows_told.sizes or len(rows_told.arguments) != len(_tensors(region)):
        return None
    inputs = {(_origin(_tensors(region)[o.index]), _bare(o.steps)): o.tensor for o in rows_told.inputs}
    same: dict[str, str] = {}
    given, operands = list(_tensors(region)), [*rows_told.inputs]
    for operand in told.inputs:
        node = arguments[operand.index]
        if _maker(node) is region:
            assert isinstance(node.args[1], int)
            same[operand.tensor] = rows_told.results[node.args[1]].tensor
            continue
        known = inputs.get((_origin(node), _bare(operand.steps)))
        if known is not None:
            same[operand.tensor] = known
            continue
        if order[node] > order[region]:
            return None  # it may be made of what the region makes
        operands.append(replace(operand, index=len(given)))
        given.append(node)
    used = [u for u in region.users if any(reader is not sums for reader in u.users)]
    if any(u.target is not operator.getitem for u in region.users):
        return None
    wanted = tuple(rows_told.results[int(u.args[1])].tensor for u in used)  # pyright: ignore[reportArgumentType]
    rows = hint(value(_tensors(sums)[0]).shape[0])  # pyright: ignore[reportOptionalMemberAccess]
    joined = join(rows_told.pipeline, told.pipeline, same, wanted, rows, target.hardware)
    operands += [
        replace(o, steps=o.steps[:-1] if o.steps[-1:] == TURN else (*o.steps, *TURN)) for o in rows_told.parameters
    ]
    return Pair(region, sums, tuple(given), tuple(operands), wanted, joined, rows)


def _tensors(call: fx.Node) -> list[fx.Node]:
    assert isinstance(call.args[0], list | tuple)
    return [n for n in call.args[0] if isinstance(n, fx.Node)]


def _maker(node: fx.Node) -> fx.Node | None:
    """The call whose result a node is."""
    whole = node.args[0] if node.target is operator.getitem else None
    return whole if isinstance(whole, fx.Node) and whole.target is REGION else None


_SAME = (aten.detach, aten.alias, aten.view, aten.reshape, aten._unsafe_view)


def _origin(node: fx.Node) -> fx.Node:
    """What a node is, under other leading dimensions."""
    while packet(node) in _SAME and isinstance(node.args[0], fx.Node):
        before, after = value(node.args[0]), value(node)
        if before is None or after is None or before.shape[-1:] != after.shape[-1:]:
            break
        node = node.args[0]
    return node


def _bare(steps: Steps) -> Steps:
    """Steps that change more than leading dimensions."""
    return tuple(step for step in steps if step[0] != "flatten")


# -- which is faster


def plan(pair: Pair, options: Options, target: Target) -> Plan:
    """Joined or apart: from this process, the disk, or timed now; the joined one where the reference machine runs it.

    Raises:
        TilestreamError: the kernel cannot be built, or computes something else.
    """
    ours = sum(cost(p, pair.rows, target.hardware).total_s for p in pair.joined.pipelines) * 1e6
    candidate, apart = Candidate(STRATEGY, pair.joined.pipelines[0], ours), Candidate(FALLBACK, None, None)
    measures = planning.measures(options, target) and options.strategy == "auto"
    described = [pipeline_to_json(p, sources=False) for p in pair.joined.pipelines]
    text = [described, pair.rows, target.hardware.name, target.kind, measures, versions()]
    key = hashlib.sha256(json.dumps([*text, STRATEGY], sort_keys=True).encode()).hexdigest()
    kept = PlanCache(options.cache_folder) if options.cache else None
    made = _plans.get(key) or (kept.load(key) if kept is not None else None)
    if made is None:
        if measures:
            ours_us, apart_us = _timed(pair, target)
            candidate, apart = replace(candidate, measured_us=ours_us), replace(apart, measured_us=apart_us)
            joins = ours_us <= MARGIN * apart_us
        else:
            joins = target.kind == "reference"
        made = Plan("chain", pair.rows, target.hardware.name, (candidate, apart), candidate if joins else apart)
        if kept is not None:
            kept.store(key, made)
        log.info("backward chain: %s", summary(made))
    _plans[key] = made
    return made


def _timed(pair: Pair, target: Target) -> tuple[float, float]:
    """Microseconds joined and apart, on random operands.

    Raises:
        PlanError: the joined kernels' results are further from float64 than twice those of eager.
    """
    device = target.device
    with timed("timing"), real(device):
        values = [_random(node, device, seed) for seed, node in enumerate(pair.given)]
        first, second = (RegionCall(decode(str(n.args[2])), device, rescue=False) for n in (pair.region, pair.sums))
        region, sums = _tensors(pair.region), _tensors(pair.sums)
        at = {_origin(node): k for k, node in enumerate(pair.given)}

        def apart() -> list[torch.Tensor]:
            made = first(values[: len(region)])
            taken = [
                made[node.args[1]] if _maker(node) is pair.region else values[at[_origin(node)]]  # pyright: ignore
                for node in sums
            ]
            return [*second(taken), *(made[k] for k in _left(pair))]

        calls = [RegionCall(told, device, rescue=False) for told in specs(pair, target.kind)]
        ours, theirs = capture(lambda: _run(calls, pair, values)), capture(apart)
        _check(ours.outputs, ours.graph, pair, values)
        us = [statistics.median(s) for s in interleaved([ours, theirs], ROUNDS)]
    return us[0], us[1]


def _left(pair: Pair) -> list[int]:
    """Results of the region that are left, in order."""
    names = [r.tensor for r in decode(str(pair.region.args[2])).results]
    return [names.index(name) for name in pair.wanted]


def _random(node: fx.Node, device: torch.device, seed: int) -> torch.Tensor:
    fake = value(node)
    assert fake is not None
    generator = torch.Generator(device).manual_seed(seed)
    size, stride = [hint(n) for n in fake.shape], [hint(n) for n in fake.stride()]
    made = torch.empty_strided(size, stride, dtype=fake.dtype, device=device)
    scale = (2 / size[-1]) ** 0.5 if len(size) == 2 and size[0] <= 64 else 1.0
    return made.copy_(torch.randn(size, device=device, generator=generator) * scale)


def _run(calls: Sequence[RegionCall], pair: Pair, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results in the order of ``names``: those of the sums, then what is left of the region's."""
    have: dict[str, torch.Tensor] = {}
    for call, nodes in zip(calls, arguments(pair), strict=True):
        given = [values[n] if isinstance(n, int) else have[n] for n in nodes]
        made = call(given)
        have |= {r.tensor: t for r, t in zip(call.spec.results, made, strict=True)}
    return [have[name] for name in names(pair)]


def _check(outputs: object, graph: torch.cuda.CUDAGraph, pair: Pair, values: Sequence[torch.Tensor]) -> None:
    """Replay over poisoned results: all are written, and as near to float64 as eager's."""
    from tilestream.reference.whole import run_whole

    assert isinstance(outputs, list)
    for output in outputs:
        output.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    exact, own = ({} for _ in range(2))
    for made, wide in ((exact, True), (own, False)):
        for told, nodes in zip(specs(pair, "reference"), arguments(pair), strict=True):
            given = [values[n] if isinstance(n, int) else made[n] for n in nodes]
            tensors = _operands(told, given)
            made |= run_whole(told.pipeline, {k: t.double() for k, t in tensors.items()} if wide else tensors)
    for name, got in zip(names(pair), outputs, strict=True):
        error, eager, good = oracle.judge([got], [own[name]], [exact[name]])
        if not good:
            raise PlanError(
                f"{name} of a backward chain: error against float64 is {error:.2e}, eager's {eager:.2e}",
                "report this with the model; region and sums stay apart",
            )


def _operands(told: RegionSpec, given: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    from tilestream.run.call import apply

    return {o.tensor: apply(given[o.index], o.steps) for o in (*told.inputs, *told.parameters)}


# -- the calls


def names(pair: Pair) -> list[str]:
    """Results of the joined call, as the graph takes them: those of the sums, then what is left of the region's."""
    return [*(r.tensor for r in decode(str(pair.sums.args[2])).results), *pair.wanted]


def arguments(pair: Pair) -> list[list[int | str]]:
    """Of each launch: numbers of ``pair.given``, and names of what a launch before it has left."""
    found: list[list[int | str]] = []
    by_name = {o.tensor: o.index for o in pair.operands}
    for pipeline in pair.joined.pipelines:
        wanted = [t.name for t in pipeline.tensors if t.role is not Role.OUTPUT]
        found.append(list(dict.fromkeys(by_name.get(name, name) for name in wanted)))
    return found


def specs(pair: Pair, kind: str) -> list[RegionSpec]:
    """What the operator is told of each launch."""
    made = []
    by_name = {o.tensor: o for o in pair.operands}
    for pipeline, nodes in zip(pair.joined.pipelines, arguments(pair), strict=True):

        def operand(name: str, nodes: list[int | str] = nodes, pipeline: Pipeline = pipeline) -> Operand:
            own = by_name.get(name)
            if own is None:
                return Operand(name, nodes.index(name), (), TORCH_DTYPES[pipeline.tensor(name).dtype])
            return replace(own, index=nodes.index(own.index))

        outputs = pipeline.by_role(Role.OUTPUT)
        fakes = [_fake(pair, n, pipeline) for n in nodes]
        static = all(isinstance(size, int) for f in fakes for size in (*f[0], *f[1]))
        made.append(
            RegionSpec(
                target=kind,
                pipeline=pipeline,
                arguments=(TENSOR,) * len(nodes),
                inputs=tuple(operand(t.name) for t in pipeline.by_role(Role.INPUT)),
                parameters=tuple(operand(t.name) for t in pipeline.by_role(Role.PARAMETER)),
                results=tuple(_result(pair, t.name, pipeline) for t in outputs),
                sizes=(),
                layouts=tuple(fakes) if static else (),
            )
        )
    return made


def _fake(pair: Pair, n: int | str, pipeline: Pipeline) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    if isinstance(n, str):
        columns = pipeline.tensor(n).features
        return (pair.rows, columns), (columns, 1)
    fake = value(pair.given[n])
    assert fake is not None
    return tuple(fake.shape), tuple(fake.stride())


def _result(pair: Pair, name: str, pipeline: Pipeline) -> ResultSpec:
    for call in (pair.sums, pair.region):
        told = next((r for r in decode(str(call.args[2])).results if r.tensor == name), None)
        if told is not None and (call is pair.sums or name in pair.wanted):
            return told
    return ResultSpec(name, (pair.rows, pipeline.tensor(name).features))


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
            made = [like.new_empty(r.shape, dtype=d) for r, d in zip(told.results, dtypes, strict=True)]
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


