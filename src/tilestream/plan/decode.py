"""A decode step as one kernel: found in a graph, with the user's lines, and what it is predicted to take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from tilestream.devices import Device
from tilestream.graph.decode import STEP, Site, place, site_of
from tilestream.graph.modules import copied
from tilestream.graph.nodes import Unsupported
from tilestream.graph.provenance import source
from tilestream.graph.sizes import same_size
from tilestream.kernels.step.shape import Shape
from tilestream.plan.parts import Share, share_of
from tilestream.simulator.steps import ATTEND, DOWN, GATE, HEAD, OUTPUT, PROJECT, StepRun, simulate_step

PLANNED = "tilestream_step"
"""In the ``meta`` of a step's node: its ``PlannedStep``."""
READ_BY = {"query": PROJECT, "output": OUTPUT, "gate": GATE, "down": DOWN}


@dataclass(frozen=True)
class PlannedStep:
    """A step that was found. ``lines``: by stage the user's line of the first layer, where it is known. ``share``: its
    operators as the model has them."""

    shape: Shape
    lines: dict[str, str]
    share: Share

    def on(self, device: Device) -> StepRun:
        return replace(simulate_step(self.shape, device), lines=self.lines)


def predicted_us(shape: Shape, device: Device) -> float:
    """Microseconds of a step."""
    return simulate_step(shape, device).time_us


def stepped(graph: fx.GraphModule, device: Device) -> tuple[fx.GraphModule, PlannedStep]:
    """A copy of an inference graph with its decode step as one operator.

    Raises:
        Unsupported: it is none, and why.
    """
    made = copied(graph)
    try:
        site = site_of(made.graph)
        lines = _lines(site)
        place(made, site)
    except Unsupported as why:
        raise Unsupported(_reason(graph) or why.reason) from why
    planned = PlannedStep(site.shape, lines, share_of(graph.graph) - share_of(made.graph))
    made.graph.find_nodes(op="call_function", target=STEP)[0].meta[PLANNED] = planned
    return made, planned


def steps_of(graph: fx.Graph) -> list[PlannedStep]:
    """The steps that are operators of a graph."""
    return [n.meta[PLANNED] for n in graph.find_nodes(op="call_function", target=STEP)]


def expected(graph: fx.GraphModule, device: Device, told: Callable[[str], Any]) -> fx.GraphModule:
    """An inference graph as a compilation would try it, with its step; where it has none, ``told`` says why."""
    try:
        return stepped(graph, device)[0]
    except Unsupported as why:
        told(f"no decode step is one kernel: {why.reason}")
        return graph


def writes_cache(graph: fx.GraphModule) -> bool:
    """Whether a graph of Dynamo or ATen writes places of a cache: others are no decode steps, and are not told so."""
    return any("index_copy" in str(n.target) for n in graph.graph.nodes)


def is_of_one_token(graph: fx.GraphModule) -> bool:
    """Whether a token of each sequence is embedded, in a graph of Dynamo or ATen."""
    made = [n for n in graph.graph.nodes if "embedding" in str(n.target) and n.op == "call_function"]
    fakes = [n.meta.get("val", n.meta.get("example_value")) for n in made]
    return all(same_size(fake.shape[-2], 1) for fake in fakes if isinstance(fake, Tensor) and fake.dim() > 1)


def _reason(graph: fx.GraphModule) -> str:
    """A reason that says more than where the pattern ends; empty if there is none."""
    if not is_of_one_token(graph):
        return "the graph is of several tokens of a sequence, as of a prompt"
    held = [n.meta.get("val") for n in graph.graph.find_nodes(op="placeholder")]
    if any(isinstance(v, Tensor) and v.dtype == torch.float64 and not v.dim() for v in held):
        return "numbers of the model are arguments of the graph: compile without dynamic=True"
    return ""


def _lines(site: Site) -> dict[str, str]:
    layer = dict(zip(site.shape.form.weights, site.weights, strict=False))
    found = {stage: _product(layer[name]) for name, stage in READ_BY.items()}
    found |= {ATTEND: site.updates[0], HEAD: site.logits}
    return {stage: source(found[stage]) for stage in (PROJECT, ATTEND, OUTPUT, GATE, DOWN, HEAD)}


def _product(weight: fx.Node) -> fx.Node:
    """What a weight is multiplied by first, perhaps transposed."""
    node = next(iter(weight.users))
    return node if len(node.all_input_nodes) > 1 else next(iter(node.users))
