"""The analysis of captured graphs: regions selected and planned, and what stays out of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from tilestream.devices import Device
from tilestream.errors import TilestreamError
from tilestream.graph import selection
from tilestream.graph.capture import Captured
from tilestream.graph.costs import flops
from tilestream.graph.gradients import GradientSite
from tilestream.graph.joint import narrow_products
from tilestream.graph.nodes import computes, is_ours
from tilestream.graph.provenance import module_path
from tilestream.graph.region import Region
from tilestream.graph.row_sums import own_operands
from tilestream.options import Options
from tilestream.plan import planner
from tilestream.plan.analysis import Analysis
from tilestream.plan.chain_analysis import with_chains
from tilestream.plan.gradient_launches import GradientLaunch, analysis, decided, gradient_launches, proposal
from tilestream.plan.parts import Excluded, GraphAnalysis, RegionAnalysis, Share
from tilestream.plan.regions import LONE, find_regions, is_lone
from tilestream.plan.tails import start_later
from tilestream.plan.turned import turned
from tilestream.plan.whole import inductor_kernels


def of_graphs(
    model: Callable[..., Any], found: Captured, options: Options, device: Device, training: bool = False
) -> Analysis:
    """The analysis of captured graphs."""

    if training:
        options = options.with_(constant_weights=False)  # steps of training change them
    graphs: list[GraphAnalysis] = []
    made: list[RegionAnalysis] = []
    exclusions: list[Excluded] = []
    for index, (graph, kind) in enumerate(zip(found.graphs, found.kinds, strict=True)):
        backward = kind == "backward"
        if backward and narrow_products(graph.graph):
            graph.recompile()
        kept_out = own_operands(graph.graph) if backward else {}
        part, summed = find_regions(graph, options, device, kept_out, training=kind != "inference", backward=backward)
        if kind == "inference" and options.strategy == "auto" and options.target != "reference":
            part = start_later(graph.graph, part, options, device)
        inside = {node for cut in part.cuts for node in cut.nodes}
        nodes = [n for n in graph.graph.nodes if n.op == "call_function"]
        compute = [n for n in nodes if computes(n) and not is_ours(n)]
        outside = [n for n in compute if n not in inside]
        whole = Share(len(compute), sum(map(flops.of_node, compute)))
        graphs.append(GraphAnalysis(kind, whole, graph.graph))
        prefix = f"graph{index}." if len(found.graphs) > 1 else ""
        launches = _launches(summed, part, device)
        sums = _gradients(launches, index, prefix, device, options)
        own = _regions(part.cuts, sums, index, prefix, device, options)
        made += with_chains(own, part.cuts, sums, launches, device, options)
        streamed = {node for site in summed for node in site.nodes}
        for node, e in zip(outside, part.exclusions, strict=True):
            if node in streamed:
                continue
            exclusions.append(Excluded(e.op, e.source, e.reason, module_path(node), flops.of_node(node), index))
    return Analysis(
        model=str(getattr(model, "__name__", type(model).__name__)),
        device=device.name,
        options=options,
        graphs=tuple(graphs),
        regions=tuple(made),
        exclusions=tuple(exclusions),
        eager=found.eager,
        breaks=found.breaks,
        mode=("train" if model.training else "eval") if isinstance(model, torch.nn.Module) else "",
        training=training,
        hints=_hints(model, found, training),
        tf32=_tf32(),
        hardware=device,
    )


def _regions(
    cuts: Sequence[selection.Cut],
    sums: Sequence[RegionAnalysis],
    index: int,
    prefix: str,
    device: Device,
    options: Options,
) -> list[RegionAnalysis]:
    """The regions of a graph, each chosen against what Inductor makes of it where others stream; if none of them does,
    against what Inductor makes of the graph as it is."""
    made: list[RegionAnalysis] = []
    for alone in (False, True) if len(cuts) + len(sums) > 1 else (True,):
        made = [_region(cut.region, cut.nodes, index, prefix, device, options, alone) for cut in cuts]
        if any(r.plan is not None and r.plan.chosen.pipeline is not None for r in (*made, *sums)):
            break
    return made


def _launches(sites: Sequence[GradientSite], part: selection.Partition, device: Device) -> list[GradientLaunch]:
    """The launches of weight gradients of a backward graph, beside the regions that make their operands."""
    regions = {node: number for number, cut in enumerate(part.cuts) for node in cut.nodes}
    return gradient_launches(sites, device, regions.get)


def _gradients(
    launches: Sequence[GradientLaunch], index: int, prefix: str, device: Device, options: Options
) -> list[RegionAnalysis]:
    forced = options.target == "reference"
    return [
        analysis(launch, decided(launch, device, *proposal(launch, device), forced), index, prefix)
        for launch in launches
    ]


def _region(
    region: Region,
    members: Sequence[fx.Node],
    index: int,
    prefix: str,
    device: Device,
    options: Options,
    alone: bool,
) -> RegionAnalysis:

    plan, problem, copied = None, "", turned(region, options)
    try:
        if not region.rows:
            problem = "no rows: nothing is launched"
        elif options.target != "reference" and is_lone(region, options):
            problem = LONE
        else:
            shown = partial(_inductor_us, members, device, not alone)
            plan = planner.plan(region.program, region.rows, device, options, turned=copied, fallback_us=shown)
    except TilestreamError as failure:
        problem = str(failure)
    return RegionAnalysis(
        name=prefix + region.name,
        graph=index,
        rows=region.rows,
        operators=region.operators,
        sources=region.sources,
        program=region.program,
        plan=plan,
        problem=problem,
        flops=sum(flops.of_node(n) for n in members if computes(n)),
        nodes=tuple(members),
        modules=tuple(dict.fromkeys(path for n in members if (path := module_path(n)))),
        turned_us=copied.us,
        alone=alone,
    )


def _inductor_us(nodes: Sequence[fx.Node], device: Device, epilogues: bool) -> float:
    """What is shown of Inductor's kernels of operators, as torch is set."""
    return inductor_kernels(nodes, device, _tf32(), epilogues=epilogues).predicted_us


def _tf32() -> bool:
    return torch.get_float32_matmul_precision() != "highest"


def _hints(model: Callable[..., Any], found: Captured, training: bool) -> tuple[str, ...]:
    """What is special about this capture, with what to do about it."""
    hints = []
    changing = dict.fromkeys(changing_in_training(model))
    if changing and not training:
        hints.append(f"{', '.join(changing)} in train mode: call model.eval() for inference")
    if not training and _wants_gradients(model):
        hints.append(
            "inference graphs, as under torch.no_grad(): called with gradients, the model makes forward and backward "
            "graphs, which training=True shows"
        )
    if found.ran:
        hints.append(f"the model was run to capture it: {found.ran}")
    if not found.graphs:
        hints.append("torch.compile captures nothing of this model: all of it runs eagerly")
    if any("_transformer_encoder_layer_fwd" in str(n.target) for g in found.graphs for n in g.graph.nodes):
        hints.append(
            "nn.TransformerEncoder took its fast path, one operator a layer: "
            "torch.backends.mha.set_fastpath_enabled(False) shows its layers, which can stream"
        )
    return tuple(hints)


def _wants_gradients(model: Callable[..., Any]) -> bool:
    """Whether a call of the model, here and now, would make a training graph."""

    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    return torch.is_grad_enabled() and any(p.requires_grad for p in parameters)


def changing_in_training(model: Callable[..., Any]) -> list[str]:
    """Types of the modules in train mode that compute something else there: dropout, and batch statistics."""

    return [
        f"nn.{type(m).__name__}"
        for m in (model.modules() if isinstance(model, nn.Module) else ())
        if m.training and (isinstance(m, _NormBase) or (isinstance(m, _DropoutNd) and m.p > 0))
    ]
