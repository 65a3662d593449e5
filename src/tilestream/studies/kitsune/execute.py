"""Plans of whole models, executed: pipelines on the reference machine, other operators by torch, launch by launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from tilestream import reference
from tilestream.errors import InputError
from tilestream.studies.kitsune.compiler.staged import Staged
from tilestream.studies.kitsune.designs import Design, Library
from tilestream.studies.kitsune.record import Recorded


@dataclass(frozen=True)
class Results:
    """What a model returns, and in training the gradients of its inputs and parameters, by place."""

    outputs: tuple[Tensor, ...]
    gradients: Mapping[str | int, Tensor]


def run(design: Design, module: nn.Module, inputs: Sequence[Any], tangents: Sequence[Tensor] = ()) -> Results:
    """Execute the plan of a model on the CPU.

    Args:
        module: with the values of its parameters and buffers.
        inputs: of the model; tensors on the CPU.
        tangents: gradients of its outputs, in training.

    Raises:
        InputError: there are not as many tangents as outputs that take gradients.
        PipelineDeadlock: a pipeline cannot go on.
    """
    graph, recorded = design.graph, design.graph.recorded
    memory = _Memory(recorded, module, inputs, tangents)
    for launch in design.launches:
        if isinstance(launch, Library):
            for node in (n for name in launch.operators for n in graph[name].nodes):
                memory.call(node)
        else:
            memory.stream(launch)
    forward, backward = recorded.forward, recorded.backward
    results = _results(forward)
    outputs = tuple(memory[x] for x in results[: len(results) - recorded.saved] if x is not None)
    gradients: dict[str | int, Tensor] = {}
    if backward is not None:
        places = [n for n in forward.nodes if n.op == "placeholder"]
        for place, made in zip(places, _results(backward), strict=True):
            if made is not None:
                gradients[recorded.places[place.name]] = memory[made]
    return Results(outputs, gradients)


def _results(graph: fx.Graph) -> list[fx.Node | None]:
    """What a graph returns, in order."""
    output = next(n for n in graph.nodes if n.op == "output")
    return tree_leaves(output.args, is_leaf=lambda x: x is None)


class _Memory:
    """Values by name, over both graphs; views are made when they are asked for."""

    def __init__(
        self, recorded: Recorded, module: nn.Module, inputs: Sequence[Any], tangents: Sequence[Tensor]
    ) -> None:
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

    def stream(self, launch: Staged) -> None:
        """Run one pipeline; its outputs are values of their nodes."""
        inputs = {g.tensor.name: g.of(self[g.node]) for g in launch.given}
        outputs = reference.run(launch.pipeline, inputs)
        for stored in launch.stored:
            node, index = stored.result
            value = outputs[stored.tensor.name].reshape(stored.shape).to(stored.dtype)
            several = isinstance(node.meta["val"], list | tuple)
            self.values[f"{node.name}.{index}" if several else node.name] = value
