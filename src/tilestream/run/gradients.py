"""Weight and bias gradients of a backward graph as calls of ``tilestream::region``, whose pipelines are stationary sums.

What one region or one operator makes at a time, the gradients of its outputs, goes into one launch. Where times can be
taken, a launch must beat the library's products, timed beside it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import fx

from tilestream.announce import announce_failure
from tilestream.devices import Device
from tilestream.graph.gradients import GradientSite, aliases, find_gradients, together
from tilestream.graph.nodes import aten, name
from tilestream.graph.region import Operand
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, Role
from tilestream.ir.serialise import pipeline_to_json
from tilestream.options import Options
from tilestream.plan.cache import PlanCache, versions
from tilestream.plan.gradients import STRATEGY, Gradient, cost, library_s, weight_gradients
from tilestream.plan.parts import RegionAnalysis
from tilestream.plan.planner import FALLBACK, MARGIN, Candidate, Plan, summary
from tilestream.run import prepare
from tilestream.run.operator import REGION
from tilestream.run.spec import TENSOR, RegionSpec, ResultSpec, encode
from tilestream.run.target import Target
from tilestream.run.time_gradients import time_gradients

LEAST_ROWS = 4096
"""Rows from which on gradients may be streamed: fewer are a handful of microseconds for anybody."""
BULK_BYTES = 16

log = logging.getLogger(__name__)
_plans: dict[str, Plan] = {}


@dataclass(frozen=True)
class GradientLaunch:
    """Sites that share a launch; ``layers`` are theirs in order, of widths that bulk copies can address."""

    name: str
    sites: tuple[GradientSite, ...]
    layers: tuple[Gradient, ...]

    @property
    def rows(self) -> int:
        return self.sites[0].rows

    def pipeline(self, hardware: Device) -> Pipeline:
        """Raises ``PlanError`` where the device has too few SMs for all blocks."""
        return weight_gradients("gradients", self.layers, hardware)


def stream_gradients(owner: fx.GraphModule, options: Options, target: Target) -> list[Plan]:
    """Put calls in the place of the graph's weight gradients of many rows, each with its bias's.

    Returns:
        The plans of the launches that the graph now calls. An exception of ours costs the launch, and is announced.

    Raises:
        TilestreamError: with ``fallback=False``.
    """
    streamed = []
    for launch in launches(owner.graph, target.hardware, least_rows(target)):
        try:
            with prepare.kernels_kept(options, target):
                made = plan(launch, options, target)
            prepare.note(_analysis(launch, made))
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
        from torch._inductor.pattern_matcher import stable_topological_sort

        stable_topological_sort(owner.graph)  # a sum's users may stand before the product
        owner.graph.eliminate_dead_code()
        owner.graph.lint()
        owner.recompile()
    return streamed


def least_rows(target: Target) -> int:
    """Rows from which on gradients may be streamed; any where the reference machine was asked for."""
    return 1 if target.kind == "reference" else LEAST_ROWS


def gradient_nodes(graph: fx.Graph, target: Target) -> dict[str, str]:
    """Names of the operators that may be gradients' launches, and why they are in no region."""
    return {n.name: "sums over rows" for s in _sites(graph, target.hardware, least_rows(target)) for n in s.nodes}


def _sites(graph: fx.Graph, hardware: Device, least: int) -> list[GradientSite]:
    return [s for s in find_gradients(graph) if s.rows >= least and _blocks(s) <= hardware.sms]


def launches(graph: fx.Graph, hardware: Device, least: int) -> list[GradientLaunch]:
    """The launches that the graph's gradients of at least so many rows could be."""
    found = _sites(graph, hardware, least)
    made: list[GradientLaunch] = []
    for group in together(found, _made_by):
        part: list[GradientSite] = []
        for site in group:
            if sum(map(_blocks, [*part, site])) > hardware.sms:
                made.append(_launch(len(made), part))
                part = []
            part.append(site)
        made.append(_launch(len(made), part))
    return made


def plan(launch: GradientLaunch, options: Options, target: Target) -> Plan:
    """The stationary sum and the library, and which of them runs: from this process, the disk, or made now.

    Raises:
        TilestreamError: the kernel cannot be built, or computes something else.
    """
    pipeline = launch.pipeline(target.hardware)
    measures = prepare.measures(options, target) and options.strategy == "auto"
    key = _key(pipeline, launch.rows, target.hardware, measures)
    kept = PlanCache(options.cache_folder) if options.cache else None
    made = _plans.get(key) or (kept.load(key) if kept is not None else None)
    if made is None:
        ours = Candidate(STRATEGY, pipeline, cost(pipeline, launch.rows, target.hardware).total_s * 1e6)
        other = Candidate(FALLBACK, None, library_s(launch.layers, launch.rows, target.hardware) * 1e6)
        if measures:
            ours_us, other_us = time_gradients(spec(launch, pipeline, target.kind), launch.layers, launch.rows, target)
            ours, other = replace(ours, measured_us=ours_us), replace(other, measured_us=other_us)
            wins = ours_us <= MARGIN * other_us
        else:
            wins = target.kind == "reference" or (ours.predicted_us or 0.0) <= MARGIN * (other.predicted_us or 0.0)
        made = Plan("gradients", launch.rows, target.hardware.name, (ours, other), ours if wins else other)
        if kept is not None:
            kept.store(key, made)
        log.info("%s: %s", launch.name, summary(made))
    _plans[key] = made
    return made


def spec(launch: GradientLaunch, pipeline: Pipeline, kind: str) -> RegionSpec:
    """What the operator is told of a launch: arguments are the operands, each once, in order."""
    names, nodes = _operands(launch)
    dtype = TORCH_DTYPES[launch.layers[0].dtype]
    outputs = pipeline.by_role(Role.OUTPUT)
    widths = {t.name: t.features for t in pipeline.by_role(Role.INPUT)}
    rows = [node.meta["val"].shape[0] for node in nodes]
    static = all(isinstance(n, int) for n in rows)
    return RegionSpec(
        target=kind,
        pipeline=pipeline,
        arguments=(TENSOR,) * len(names),
        inputs=tuple(Operand(tensor, index, (), dtype) for index, tensor in enumerate(names)),
        parameters=(),
        results=tuple(ResultSpec(t.name, t.shape) for t in outputs),
        sizes=(),
        layouts=tuple(((n, widths[t]), (widths[t], 1)) for n, t in zip(rows, names, strict=True)) if static else (),
    )


def _made_by(node: fx.Node) -> Hashable:
    """The region whose result a node is, or which reads it and so keeps it until then; or the node itself."""
    base, *views = aliases(node)
    whole = base.args[0] if base.target is operator.getitem else None
    if isinstance(whole, fx.Node) and whole.target is REGION:
        return whole
    return next((user for n in (base, *views) for user in n.users if user.target is REGION), base)


def _blocks(site: GradientSite) -> int:
    return prod(Gradient("", "", "", site.out, site.k).parts)


def _launch(number: int, sites: Sequence[GradientSite]) -> GradientLaunch:
    layers = []
    for n, s in enumerate(sites):
        bias = f"db{n}" if s.total is not None else ""
        out, k = (padded(size, s.dtype) for size in (s.out, s.k))
        dy, x = f"dy.{s.gradient.name}", f"x.{s.input.name}"
        layers.append(Gradient(dy, x, f"dw{n}", out, k, bias, s.dtype, s.dtype, s.dtype, s.source))
    return GradientLaunch(f"gradients{number}", tuple(sites), tuple(layers))


def padded(columns: int, dtype: str) -> int:
    """The columns of rows that bulk copies can address."""
    step = BULK_BYTES // DTYPE_BYTES[dtype]
    return -(-columns // step) * step


def _operands(launch: GradientLaunch) -> tuple[list[str], list[fx.Node]]:
    """Tensors of the pipeline and the nodes that they are, each once."""
    found: dict[str, fx.Node] = {}
    for site, layer in zip(launch.sites, launch.layers, strict=True):
        found |= {layer.gradient: site.gradient, layer.input: site.input}
    return list(found), list(found.values())


def _key(pipeline: Pipeline, rows: int, hardware: Device, measured: bool) -> str:
    described = [pipeline_to_json(pipeline, sources=False), rows, hardware.name, measured, versions()]
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _analysis(launch: GradientLaunch, made: Plan) -> RegionAnalysis:
    nodes = [node for site in launch.sites for node in site.nodes]
    pipeline = made.candidates[0].pipeline
    assert pipeline is not None
    sources = tuple(dict.fromkeys(s.source for s in launch.sites if s.source))
    return RegionAnalysis(launch.name, 0, launch.rows, tuple(map(name, nodes)), sources, pipeline, made)


def _place(graph: fx.Graph, launch: GradientLaunch, pipeline: Pipeline, kind: str) -> None:
    """The call stands where the last product stood; users that stand before it are sorted behind it later."""
    text = encode(spec(launch, pipeline, kind))
    _, nodes = _operands(launch)
    last = launch.sites[-1].product
    with graph.inserting_before(last):
        arguments = [_wide(graph, node, launch.layers[0].dtype) for node in nodes]
        call = graph.call_function(REGION, (arguments, [], text))
        like = launch.sites[0].product.meta["val"]
        shapes = [t.shape for t in pipeline.by_role(Role.OUTPUT)]
        call.meta = {"val": [like.new_empty(shape) for shape in shapes], "stack_trace": last.meta.get("stack_trace")}
    index = 0
    for site in launch.sites:
        for node in site.nodes:
            _use(graph, call, index, node)
            index += 1


def _wide(graph: fx.Graph, node: fx.Node, dtype: str) -> fx.Node:
    """``node`` with columns of zeros up to a width that bulk copies can address."""
    fake = node.meta["val"]
    columns = int(fake.shape[1])
    more = padded(columns, dtype) - columns
    if not more:
        return node
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
        part.meta = dict(node.meta)
    node.replace_all_uses_with(part)
    graph.erase_node(node)


def _step(graph: fx.Graph, target: torch._ops.OpOverload, args: tuple, **keywords: object) -> fx.Node:
    step = graph.call_function(target, args, dict(keywords))
    step.meta = {"val": target(args[0].meta["val"], *args[1:], **keywords)}
    return step
