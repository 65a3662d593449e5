"""Plans of whole models, executed: pipelines on the reference machine, other operators by torch, launch by launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from tilestream import reference
from tilestream.errors import InputError
from tilestream.ir.verify import verify
from tilestream.studies.kitsune.designs import Design
from tilestream.studies.kitsune.lowered import Streamed, streamed
from tilestream.studies.kitsune.record import Recorded


@dataclass(frozen=True)
class Library:
    """One launch that is no pipeline of ours: operators as torch runs them."""

    operators: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """A whole model: launches in order, forward and then backward, over the graphs that were recorded."""

    recorded: Recorded
    launches: tuple[Streamed | Library, ...]
    nodes: Mapping[str, tuple[fx.Node, ...]] = field(repr=False)

    @property
    def pipelines(self) -> tuple[Streamed, ...]:
        return tuple(x for x in self.launches if isinstance(x, Streamed))


@dataclass(frozen=True)
class Results:
    """What a model returns, and in training the gradients of its inputs and parameters, by place."""

    outputs: tuple[Tensor, ...]
    gradients: Mapping[str | int, Tensor]


def plan(design: Design, recorded: Recorded) -> Plan:
    """The launches of ``design``, made of the graphs that its own was assembled from. Every pipeline is verified.

    Raises:
        Unsupported: an operator of a subgraph has no sentence over axes.
        VerifyError: a pipeline is not legal.
    """
    graphs = [g for g in (recorded.forward, recorded.backward) if g is not None]
    by_name = {"forward": graphs[0], "backward": graphs[-1]}
    found = {phase: {n.name: n for n in graph.nodes} for phase, graph in by_name.items()}
    nodes = {op.name: tuple(found[op.phase][name] for name in op.nodes) for op in design.graph}
    pipelines = {p.node.ops: p for p in design.pipelines}
    launches: list[Streamed | Library] = []
    for ops in design.units:
        if ops in pipelines:
            made = streamed(pipelines[ops], nodes, recorded.stored)
            verify(made.pipeline)
            launches.append(made)
        else:
            launches.append(Library(ops))
    return Plan(recorded, tuple(launches), nodes)


def run(plan: Plan, module: nn.Module, inputs: Sequence[Any], tangents: Sequence[Tensor] = ()) -> Results:
    """Execute ``plan`` on the CPU.

    Args:
        module: with the values of its parameters and buffers.
        inputs: of the model; tensors on the CPU.
        tangents: gradients of its outputs, in training.

    Raises:
        InputError: there are not as many tangents as outputs that take gradients.
        PipelineDeadlock: a pipeline cannot go on.
    """
    memory = _Memory(plan, module, inputs, tangents)
    for launch in plan.launches:
        if isinstance(launch, Library):
            for name in launch.operators:
                for node in plan.nodes[name]:
                    memory.call(node)
        else:
            memory.stream(launch)
    forward, backward = plan.recorded.forward, plan.recorded.backward
    results = _results(forward)
    outputs = tuple(memory[x] for x in results[: len(results) - plan.recorded.saved] if x is not None)
    gradients: dict[str | int, Tensor] = {}
    if backward is not None:
        places = [n for n in forward.nodes if n.op == "placeholder"]
        for place, made in zip(places, _results(backward), strict=True):
            if made is not None:
                gradients[plan.recorded.places[place.name]] = memory[made]
    return Results(outputs, gradients)


def _results(graph: fx.Graph) -> list[fx.Node | None]:
    """What a graph returns, in order."""
    output = next(n for n in graph.nodes if n.op == "output")
    return tree_leaves(output.args, is_leaf=lambda x: x is None)


class _Memory:
    """Values by name, over both graphs; views are made when they are asked for."""

    def __init__(self, plan: Plan, module: nn.Module, inputs: Sequence[Any], tangents: Sequence[Tensor]) -> None:
        recorded = plan.recorded
        given = dict(module.named_buffers()) | dict(module.named_parameters())
        self.values: dict[str, Any] = {}
        for name, place in recorded.places.items():
            self.values[name] = (given[place] if isinstance(place, str) else inputs[place]).detach()
        self.forward = {n.name: n for n in recorded.forward.nodes}
        late = recorded.backward.nodes if recorded.backward is not None else ()
        wanted = [n.name for n in late if n.op == "placeholder" and n.name not in self.forward]
        if len(wanted) != len(tangents):
            raise InputError(f"the model was given {len(tangents)} tangents", f"give {len(wanted)}, one an output")
        self.values |= dict(zip(wanted, tangents, strict=True))

    def __getitem__(self, node: fx.Node) -> Any:
        if node.name not in self.values:
            if node.op == "placeholder":  # what the forward graph saved
                self.values[node.name] = self[self.forward[node.name]]
            else:
                self.call(node)
        return self.values[node.name]

    def call(self, node: fx.Node) -> None:
        """Run one node, as torch does."""
        first = node.args[0] if node.args else None
        if isinstance(first, fx.Node) and f"{first.name}.{node.args[-1]}" in self.values:  # one of several results
            self.values[node.name] = self.values[f"{first.name}.{node.args[-1]}"]
            return
        args, kwargs = tree_map_only(fx.Node, self.__getitem__, (node.args, node.kwargs))
        assert callable(node.target)
        self.values[node.name] = node.target(*args, **kwargs)

    def stream(self, launch: Streamed) -> None:
        """Run one pipeline; its outputs are values of their nodes."""
        inputs = {g.tensor.name: self[g.node].reshape(g.shape).contiguous() for g in launch.given}
        outputs = reference.run(launch.pipeline, inputs)
        for stored in launch.stored:
            node, index = stored.result
            value = outputs[stored.tensor.name].reshape(stored.shape).to(stored.dtype)
            several = isinstance(node.meta["val"], list | tuple)
            self.values[f"{node.name}.{index}" if several else node.name] = value
