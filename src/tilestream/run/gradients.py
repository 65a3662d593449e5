"""Weight and bias gradients of a backward graph as calls of ``tilestream::region``: pipelines of stationary sums.

What one region makes at a time, the gradients of its outputs, goes into one launch. Where times can be taken, a launch
must beat the library's products, timed beside it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tilestream.announce import announce_failure
from tilestream.graph.gradients import GradientSite
from tilestream.graph.interaction import longer
from tilestream.graph.nodes import aten
from tilestream.graph.region import Operand
from tilestream.graph.selection import Partition
from tilestream.graph.settled import settle
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.pipeline import Pipeline, Role
from tilestream.ir.serialise import pipeline_to_json
from tilestream.options import Options
from tilestream.plan.cache import PlanCache, versions
from tilestream.plan.gradient_launches import (
    GradientLaunch,
    analysis,
    decided,
    gradient_launches,
    gradient_sites,
    least_rows,
    padded,
    proposal,
)
from tilestream.plan.planner import Plan, summary
from tilestream.run import prepare as planning
from tilestream.run.executable import build_ahead
from tilestream.run.operator import REGION
from tilestream.run.spec import TENSOR, RegionSpec, ResultSpec, encode
from tilestream.run.target import Target
from tilestream.run.time_gradients import time_gradients

log = logging.getLogger(__name__)
_plans: dict[str, Plan] = {}


def sites(graph: fx.Graph, options: Options, target: Target) -> list[GradientSite]:
    """The gradients of a backward graph that may be launches of ours."""
    return gradient_sites(graph, target.hardware, least_rows(options))


def prepare(found: Sequence[GradientSite], part: Partition, options: Options, target: Target) -> list[GradientLaunch]:
    """Begin to compile the kernels of a graph's gradients, beside those of the regions that it was cut into."""
    regions = {node: number for number, cut in enumerate(part.cuts) for node in cut.nodes}
    launches = gradient_launches(found, target.hardware, regions.get)
    pipelines = [launch.pipeline(target.hardware) for launch in launches]
    with planning.kernels_kept(options, target):
        build_ahead(list(dict.fromkeys(pipelines)), target.kind)
    return launches


def stream_gradients(owner: fx.GraphModule, options: Options, target: Target) -> list[Plan]:
    """Put calls in the place of a backward graph's weight gradients, each with its bias's.

    Returns:
        The plans of the launches that the graph now calls. An exception of ours costs the launch, and is announced.

    Raises:
        TilestreamError: with ``fallback=False``.
    """
    streamed = []
    for found in gradient_launches(sites(owner.graph, options, target), target.hardware, _region):
        launch = replace(found, sites=tuple(site.current for site in found.sites))
        try:
            with planning.kernels_kept(options, target):
                made = plan(launch, options, target)
            planning.note(analysis(launch, made))
            if made.chosen.pipeline is None:
                continue
            _place(owner.graph, launch, made.chosen.pipeline, target.kind)
        except Exception as failure:
            if not options.fallback:
                raise
            announce_failure(f"weight gradients ({launch.sites[0].source or 'no source line'}) go to Inductor", failure)
            continue
        streamed.append(made)
    if streamed:
        settle(owner, sort=True)  # a sum's users may stand before the product
    return streamed


def plan(launch: GradientLaunch, options: Options, target: Target) -> Plan:
    """The stationary sums and the library, and which of them runs: from this process, the disk, or made now.

    Raises:
        TilestreamError: the kernel cannot be built, or computes something else.
    """
    ours, other = proposal(launch, target.hardware)
    assert ours.pipeline is not None
    measures = planning.measures(options, target) and options.strategy == "auto"
    key = _key(ours.pipeline, launch.rows, target, measures)
    kept = PlanCache(options.cache_folder) if options.cache else None
    made = _plans.get(key) or (kept.load(key) if kept is not None else None)
    if made is None:
        if measures:
            told = spec(launch, ours.pipeline, target.kind)
            ours_us, other_us = time_gradients(told, launch.layers, launch.rows, target)
            ours, other = replace(ours, measured_us=ours_us), replace(other, measured_us=other_us)
        made = decided(launch, target.hardware, ours, other, forced=target.kind == "reference")
        if kept is not None:
            kept.store(key, made)
        log.info("%s: %s", launch.name, summary(made))
    _plans[key] = made
    return made


def spec(launch: GradientLaunch, pipeline: Pipeline, kind: str) -> RegionSpec:
    """What the operator is told of a launch: arguments are the operands, each once, in order."""
    names, nodes = list(launch.operands), list(launch.operands.values())
    dtype = TORCH_DTYPES[launch.layers[0].dtype]
    widths = {t.name: t.features for t in pipeline.by_role(Role.INPUT)}
    rows = [node.meta["val"].shape[0] for node in nodes]
    static = all(isinstance(n, int) for n in rows)
    return RegionSpec(
        target=kind,
        pipeline=pipeline,
        arguments=(TENSOR,) * len(names),
        inputs=tuple(Operand(tensor, index, (), dtype) for index, tensor in enumerate(names)),
        parameters=(),
        results=tuple(ResultSpec(t.name, t.shape) for t in pipeline.by_role(Role.OUTPUT)),
        sizes=(),
        layouts=tuple(((n, widths[t]), (widths[t], 1)) for n, t in zip(rows, names, strict=True)) if static else (),
    )


def _region(node: fx.Node) -> fx.Node | None:
    """The call of a region that a node is, or whose result it is."""
    whole = node.args[0] if node.target is operator.getitem else node
    return whole if isinstance(whole, fx.Node) and whole.target is REGION else None


def _key(pipeline: Pipeline, rows: int, target: Target, measured: bool) -> str:
    described = [pipeline_to_json(pipeline, sources=False), rows, target.hardware.name, target.kind, measured]
    return hashlib.sha256(json.dumps([described, versions()], sort_keys=True).encode()).hexdigest()


def _place(graph: fx.Graph, launch: GradientLaunch, pipeline: Pipeline, kind: str) -> None:
    """The call stands where the last product stood; users that stand before it are sorted behind it later."""
    text = encode(spec(launch, pipeline, kind))
    last = launch.sites[-1].product
    with graph.inserting_before(last):
        arguments = [_wide(graph, node, launch.layers[0].dtype) for node in launch.operands.values()]
        call = graph.call_function(REGION, (arguments, [], text))
        like = launch.sites[0].product.meta["val"]
        made = [like.new_empty(t.shape, dtype=TORCH_DTYPES[t.dtype]) for t in pipeline.by_role(Role.OUTPUT)]
        call.meta = {"val": made, "stack_trace": last.meta.get("stack_trace")}
    replaced = [node for site in launch.sites for node in site.nodes]
    for index, node in enumerate(replaced):
        _use(graph, call, index, node)


def _wide(graph: fx.Graph, node: fx.Node, dtype: str) -> fx.Node:
    """``node`` with further columns up to a width that bulk copies can address: those it is cut from, or zeros."""
    fake = node.meta["val"]
    columns = int(fake.shape[1])
    more = padded(columns, dtype) - columns
    if not more:
        return node
    whole = longer(node)  # of gradients of its other columns nobody takes any
    if whole is not None and whole.meta["val"].shape[1] == columns + more:
        return whole
    wide = graph.call_function(aten.constant_pad_nd.default, (node, [0, more], 0.0))
    wide.meta = {"val": fake.new_empty((fake.shape[0], columns + more)), "stack_trace": node.meta.get("stack_trace")}
    return wide


def _use(graph: fx.Graph, call: fx.Node, index: int, node: fx.Node) -> None:
    """``node``'s users get the call's result, cut to its size and in its shape."""
    made, shape = call.meta["val"][index], [int(n) for n in node.meta["val"].shape]
    have, want = list(made.shape), shape[len(shape) - made.dim() :]  # without dimensions that a sum keeps
    with graph.inserting_before(node):
        part = graph.call_function(operator.getitem, (call, index))
        part.meta = {"val": made}
        for dim, (size, wanted) in enumerate(zip(have, want, strict=True)):
            if size != wanted:
                part = _step(graph, aten.slice.Tensor, (part, dim, 0, wanted))
        if have != want:
            part = _step(graph, aten.clone.default, (part,), memory_format=torch.contiguous_format)
        if want != shape:
            part = _step(graph, aten.reshape.default, (part, shape))
        part.meta = {**node.meta, "val": part.meta["val"]}
    node.replace_all_uses_with(part)
    graph.erase_node(node)


def _step(graph: fx.Graph, target: torch._ops.OpOverload, args: tuple[Any, ...], **keywords: Any) -> fx.Node:
    step = graph.call_function(target, args, keywords)
    step.meta = {"val": target(args[0].meta["val"], *args[1:], **keywords)}
    return step
