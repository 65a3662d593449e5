"""A PyTorch model as a graph of the operators that Kitsune's evaluation counts, for inference or for training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from tilestream.apps.models import Model, find
from tilestream.aten.nodes import name as target_name
from tilestream.aten.nodes import packet
from tilestream.capture import source
from tilestream.capture import value as tensor
from tilestream.dtypes import DTYPES
from tilestream.errors import CaptureError
from tilestream.kitsune import grouping
from tilestream.kitsune.aten_table import VIEWS, row
from tilestream.kitsune.grouping import Group
from tilestream.kitsune.operators import Kind, Mode, Operand, Operator, OperatorGraph, Phase, Value
from tilestream.kitsune.record import Recorded, record
from tilestream.kitsune.sources import Sources, is_operation, users
from tilestream.kitsune.work import outputs, work
from tilestream.simulator.workload import Engine

aten = torch.ops.aten

_TENSOR = (Kind.LINEAR, Kind.BMM, Kind.ATTENTION)


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


@dataclass
class _Made:
    """What is known of a value while operators are made; ``itemsize`` is of one element as it lies in memory."""

    value: Value
    itemsize: float


def assemble(name: str, mode: Mode, recorded: Recorded) -> OperatorGraph:
    """Operators and values of recorded graphs."""
    sources = Sources()
    made: dict[str, _Made] = {}
    operators: list[Operator] = []
    phases: list[tuple[Phase, fx.Graph]] = [("forward", recorded.forward)]
    if recorded.backward is not None:
        phases.append(("backward", recorded.backward))
    for phase, graph in phases:
        grouping.fold(graph)
        sources.read(graph)
        for node in graph.nodes:
            if node.op == "placeholder" and node.name not in made and _own(sources, node):
                made[node.name] = _input(node, node.name in recorded.stored)
        for group in grouping.groups(graph):
            operators.append(_operator(group, phase, sources, made))
    if not operators:
        raise CaptureError(f"{name} computes nothing", "give a model that computes on its inputs")
    values = {n: m.value for n, m in made.items()}
    outs = set(_results(recorded.forward, sources, recorded.saved))
    if recorded.backward is not None:
        outs |= set(_results(recorded.backward, sources, 0))
    late = {o.value for op in operators if op.phase == "backward" for o in op.inputs}
    early = {v for op in operators if op.phase == "forward" for v in op.outputs}
    for key, value in values.items():
        given = value.is_input or value.is_parameter  # an updated cache is written where its new part is made
        values[key] = replace(value, is_output=key in outs and not given, saved=key in late & early)
    return OperatorGraph(name, mode, tuple(operators), _needed(values, operators))


def _needed(values: dict[str, Value], operators: Iterable[Operator]) -> dict[str, Value]:
    """The values that an operator reads, and results that are read or returned."""
    read = {o.value for op in operators for o in op.inputs} | {v for op in operators for v in op.outputs}
    return {n: v for n, v in values.items() if n in read}


def _own(sources: Sources, node: fx.Node) -> bool:
    """Whether a placeholder is a tensor of its own, not a result that the forward graph saved."""
    return any(s.node == node.name for s in sources[node])


def _input(node: fx.Node, stored: bool) -> _Made:
    value = tensor(node)
    assert value is not None
    made = _value(node.name, value, value.dtype, is_parameter=stored, is_input=not stored)
    return _Made(made, value.dtype.itemsize)


def _value(name: str, like: torch.Tensor, dtype: torch.dtype, **flags: bool) -> Value:
    shape = _real_shape(like)
    real = dtype.to_real() if dtype.is_complex else dtype
    dtype_name = DTYPES.get(real, str(real).removeprefix("torch."))
    return Value(name, shape, dtype_name, prod(shape) * real.itemsize, **flags)


def _real_shape(like: torch.Tensor) -> tuple[int, ...]:
    """The shape in real numbers: the last dimension of complex ones counts twice."""
    shape = tuple(int(d) for d in like.shape)
    return (*shape[:-1], 2 * shape[-1]) if like.dtype.is_complex and shape else shape


def _results(graph: fx.Graph, sources: Sources, saved: int) -> list[str]:
    """Names of the values that a graph returns, without those that it only saves."""
    node = next(n for n in graph.nodes if n.op == "output")
    flat = tree_leaves(node.args)
    kept = flat[: len(flat) - saved] if saved else flat
    return [s.node for x in kept if isinstance(x, fx.Node) for s in sources[x]]


def _operator(group: Group, phase: Phase, sources: Sources, made: dict[str, _Made]) -> Operator:
    main = group.main
    entry, amount = row(packet(main)), work(group)
    inside = set(group.nodes)
    written: list[str] = []
    written_bytes: list[float] = []
    for node in group.nodes:
        if node is not main and all(user in inside for user in users(node)):
            continue  # a gather inside a concatenation
        for key, like in outputs(node).items():
            if not _used(node, key):
                continue
            dtype = _stored_dtype(node) if key == node.name else like.dtype
            value = _value(key, like, dtype)
            size = _written(node, value.bytes, sources, made)
            if packet(node) is aten.embedding_dense_backward:
                value = replace(value, bytes=int(size))  # rows of the gradient, not the whole table
            made[key] = _Made(value, value.bytes / max(1, prod(like.shape)))
            written.append(key)
            written_bytes.append(size)
    inner = {key for node in group.nodes for key in outputs(node)}
    operands = [o for node in group.nodes for o in _operands(node, sources, made, inner)]
    first = made[written[0]].value if written else None
    kind, label = _family(group, phase, sources, made, entry.kind, entry.label)
    engine = Engine.TENSOR if kind in _TENSOR else Engine.SIMT
    operand_dtype = made[operands[0].value].value.dtype if operands else "f32"
    return Operator(
        name=main.name,
        target=target_name(main),
        label=label,
        kind=kind,
        engine=engine,
        phase=phase,
        inputs=tuple(operands),
        outputs=tuple(written),
        output_bytes=tuple(written_bytes),
        flops=amount.flops,
        dtype=operand_dtype if engine is Engine.TENSOR or first is None else first.dtype,
        simt_ops=amount.simt_ops,
        sfu_ops=amount.sfu_ops,
        gemm=amount.gemm,
        rows=prod(first.shape[:-1]) if first is not None else 1,
        reduced=amount.reduced,
        over_rows=amount.over_rows or label == "linear dW",
        tiles=amount.tiles,
        nodes=tuple(n.name for n in group.nodes),
        source=source(main),
    )


def _used(node: fx.Node, key: str) -> bool:
    """Whether one of several results is read at all."""
    if key == node.name:
        return True
    index = int(key.rpartition(".")[2])
    return any(user.args[1] == index and len(user.users) > 0 for user in node.users)


def _stored_dtype(node: fx.Node) -> torch.dtype:
    """The dtype in which a result lies in memory: a narrower one where everyone who reads it converts it to that."""
    value = tensor(node)
    assert value is not None
    own = value.dtype.to_real() if value.dtype.is_complex else value.dtype
    wanted: set[torch.dtype] = set()

    def look(user: fx.Node) -> None:
        if packet(user) in VIEWS:
            for next_user in user.users:
                look(next_user)
        elif packet(user) is aten._to_copy and isinstance(user.kwargs.get("dtype"), torch.dtype):
            dtype = user.kwargs["dtype"]
            assert isinstance(dtype, torch.dtype)
            wanted.add(dtype)
        else:
            wanted.add(own)

    for user in node.users:
        look(user)
    narrow = next(iter(wanted)) if len(wanted) == 1 else own
    return narrow if narrow.itemsize < own.itemsize else value.dtype


def _written(node: fx.Node, whole: float, sources: Sources, made: dict[str, _Made]) -> float:
    """Bytes that a node writes: a scatter into what exists, or into rows of a gradient, writes what it is given."""
    if packet(node) is aten.index_put:
        given = node.args[2]
    elif packet(node) is aten.embedding_dense_backward:
        given = node.args[0]
    else:
        return float(whole)
    assert isinstance(given, fx.Node)
    return min(float(whole), sum(s.elements * made[s.node].itemsize for s in sources[given]))


def _operands(node: fx.Node, sources: Sources, made: dict[str, _Made], inner: set[str]) -> list[Operand]:
    kind = row(packet(node)).kind
    if kind is Kind.FILL:  # it takes a tensor's dtype, not its data
        return []
    found = []
    for index, used in enumerate(node.all_input_nodes):
        like = tensor(used)
        if like is None:
            continue
        for s in sources[used]:
            if s.node in inner:
                continue
            itemsize = made[s.node].itemsize
            distinct = s.elements * itemsize
            touched = prod(like.shape) * itemsize if len(sources[used]) == 1 else distinct
            if kind is Kind.GATHER and used is node.args[0]:
                touched = max(prod(v.shape) * itemsize for v in outputs(node).values())
                distinct = min(distinct, touched)
            elif packet(node) is aten.index_put and index == 0:
                distinct = touched = min(distinct, _written(node, distinct, sources, made))
            found.append(Operand(s.node, _real_shape(like), distinct, max(distinct, touched)))
    return found


def _family(
    group: Group, phase: Phase, sources: Sources, made: dict[str, _Made], kind: Kind, label: str
) -> tuple[Kind, str]:
    """Names that need a look around: gather-cat, and the three gradients of a linear layer."""
    main = group.main
    if len(group.nodes) > 1 and kind is Kind.CAT:
        return Kind.GATHER, "gather-" + label
    if phase == "backward" and kind is Kind.LINEAR:
        stored = any(made[s.node].value.is_parameter for n in main.all_input_nodes for s in sources[n])
        return kind, "linear dX" if stored else "linear dW"
    if phase == "backward" and kind is Kind.REDUCTION:
        feeds = {s.node for s in sources[main.all_input_nodes[0]]}
        for node in main.graph.nodes:
            if is_operation(node) and row(packet(node)).kind is Kind.LINEAR:
                if any(s.node in feeds for n in node.all_input_nodes for s in sources[n]):
                    return kind, "linear db"
    return kind, label
