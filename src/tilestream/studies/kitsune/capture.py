"""A PyTorch model as a graph of the operators that Kitsune's evaluation counts, for inference or for training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from torch import fx, nn
from torch.utils._pytree import tree_leaves

from tilestream.apps.models import Model, find
from tilestream.errors import CaptureError
from tilestream.graph.costs.table import Kind, row
from tilestream.graph.nodes import name as target_name
from tilestream.graph.nodes import packet
from tilestream.graph.provenance import source
from tilestream.simulator.workload import Engine
from tilestream.studies.kitsune import grouping
from tilestream.studies.kitsune.compiler.free import base, users
from tilestream.studies.kitsune.compiler.operators import PRODUCTS, Mode, Operator, OperatorGraph, Phase, Value
from tilestream.studies.kitsune.grouping import Group
from tilestream.studies.kitsune.memory import Memory
from tilestream.studies.kitsune.record import Recorded, record
from tilestream.studies.kitsune.work import outputs, work


def capture(
    model: str | Model | nn.Module,
    inputs: Sequence[Any] | None = None,
    mode: Mode = "inference",
    *,
    name: str | None = None,
    cut: bool = True,
    **sizes: Any,
) -> OperatorGraph:
    """The operators of ``model(*inputs)``, and in training those of its backward pass too.

    Args:
        model: the name of a whole model (``apps.models.MODELS``), one of those, or any module. A module and its
            inputs may be on the meta device: nothing is run.
        inputs: of a module; a named model makes its own.
        mode: ``training`` adds the backward graph for gradients of everything that requires them.
        name: of the result; the model's by default.
        cut: for a named model, the part and the batch of the paper's Table 2 instead of the whole.
        sizes: changes of a named model's sizes.

    Raises:
        CaptureError: the model cannot be captured, or ``inputs`` are missing or too many.
        OptionError: there is no such model or size.
    """
    if mode not in ("inference", "training"):
        raise CaptureError(f"mode is {mode!r}", "use 'inference' or 'training'")
    if isinstance(model, nn.Module):
        if inputs is None or sizes:
            raise CaptureError(
                f"{type(model).__name__} was given {'sizes' if sizes else 'no inputs'}",
                "give a module its inputs; only named models have sizes",
            )
        module = model
    else:
        if inputs is not None:
            raise CaptureError("a named model was given inputs", "it makes its own; change its sizes instead")
        found = find(model) if isinstance(model, str) else model
        module, inputs = found.make(training=mode == "training", cut=cut, **sizes)
        name = name or found.name
    return assemble(name or type(module).__name__, mode, record(module, inputs, mode))


def assemble(name: str, mode: Mode, recorded: Recorded) -> OperatorGraph:
    """Operators and values of recorded graphs."""
    memory = Memory()
    operators: list[Operator] = []
    outs: set[str] = set()
    phases: list[tuple[Phase, fx.Graph, int]] = [("forward", recorded.forward, recorded.saved)]
    if recorded.backward is not None:
        phases.append(("backward", recorded.backward, 0))
    for phase, graph, saved in phases:
        grouping.fold(graph)
        memory.read(graph, recorded.stored)
        operators += [_operator(group, phase, memory) for group in grouping.groups(graph)]
        outs |= set(_results(graph, memory, saved))
    if not operators:
        raise CaptureError(f"{name} computes nothing", "give a model that computes on its inputs")
    return OperatorGraph(name, mode, tuple(operators), _values(memory, operators, outs), recorded)


def _values(memory: Memory, operators: Sequence[Operator], outs: set[str]) -> dict[str, Value]:
    """The values that operators read or make, with what becomes of them."""
    read = {o.value for op in operators for o in op.inputs}
    late = {o.value for op in operators if op.phase == "backward" for o in op.inputs}
    early = {v for op in operators if op.phase == "forward" for v in op.outputs}
    values = {}
    for name, value in memory.values.items():
        given = value.is_input or value.is_parameter  # an updated cache is written where its new part is made
        if name in read or not given:
            values[name] = replace(value, is_output=name in outs and not given, saved=name in late & early)
    return values


def _results(graph: fx.Graph, memory: Memory, saved: int) -> list[str]:
    """Names of the values that a graph returns, without those that it only saves."""
    node = next(n for n in graph.nodes if n.op == "output")
    flat = tree_leaves(node.args)
    kept = flat[: len(flat) - saved] if saved else flat
    return [s.node for x in kept if isinstance(x, fx.Node) for s in memory.sources[x]]


def _operator(group: Group, phase: Phase, memory: Memory) -> Operator:
    main, amount, inside = group.main, work(group), set(group.nodes)
    made = [n for n in group.nodes if n is main or not all(user in inside for user in users(n))]
    written = [result for node in made for result in memory.write(node)]
    inner = {name for node in group.nodes for name in outputs(node)}
    operands = [o for node in group.nodes for o in memory.operands(node, inner)]
    first = memory.values[written[0][0]] if written else None
    kind, label = _family(group, phase, memory)
    engine = Engine.TENSOR if kind in PRODUCTS else Engine.SIMT
    first_read = memory.values[operands[0].value].dtype if operands else "f32"
    return Operator(
        name=main.name,
        target=target_name(main),
        label=label,
        kind=kind,
        engine=engine,
        phase=phase,
        inputs=tuple(operands),
        outputs=tuple(name for name, _ in written),
        output_bytes=tuple(size for _, size in written),
        flops=amount.flops,
        dtype=first_read if engine is Engine.TENSOR or first is None else first.dtype,
        simt_ops=amount.simt_ops,
        sfu_ops=amount.sfu_ops,
        gemm=amount.gemm,
        rows=prod(first.shape[:-1]) if first is not None else 1,
        reduced=amount.reduced,
        over_rows=amount.over_rows or label == "linear dW",
        tiles=amount.tiles,
        nodes=group.nodes,
        source=source(main),
    )


def _family(group: Group, phase: Phase, memory: Memory) -> tuple[Kind, str]:
    """The family, and names that need a look around: gather-cat, and the three gradients of a linear layer."""
    main = group.main
    entry = row(packet(main))
    if len(group.nodes) > 1 and entry.kind is Kind.CAT:
        return Kind.GATHER, "gather-" + entry.label
    if phase == "backward" and entry.kind is Kind.LINEAR:
        return entry.kind, "linear dX" if any(map(memory.is_parameter, main.all_input_nodes)) else "linear dW"
    if phase == "backward" and entry.kind is Kind.REDUCTION:
        readers = users(base(main.all_input_nodes[0]))
        if any(row(packet(reader)).kind is Kind.LINEAR for reader in readers):
            return entry.kind, "linear db"
    return entry.kind, entry.label
