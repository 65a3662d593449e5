"""What a forward graph need not save, since the backward graph makes it again for nothing.

A result costs the same two trips through memory wherever it is made, if it never leaves a region of the forward graph
but to be saved: written there and read by ``dW = dY.T X``, or written by the backward region, which reads what it is
made of anyway, and read by the same product. So what is made of values that are saved too, and that derivatives read
row by row, is made again; its arithmetic must hide behind those two trips:

    instructions an element <= 2 trips x 2 bytes x (132 SMs x 128 lanes x 1.755 GHz) / 4.3 TB/s = 28

Activations and norms, up to the 23 instructions of GELU by tanh, pass; Mish, 30, does not. Rows that a region takes by
an index are taken again: saved, they would have a kernel of their own and a trip more (``selection.WIDE_GATHER``).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from math import prod

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from tilestream.graph.costs.elements import each
from tilestream.graph.gradients import aliases
from tilestream.graph.live import storage, tensor_bytes
from tilestream.graph.lowering import MAX_FEATURES
from tilestream.graph.modules import copied
from tilestream.graph.nodes import GATHERS, MATMULS, aten, is_view, packet, results_of, value
from tilestream.graph.operators import ELEMENTWISE
from tilestream.graph.rewrites.table import When, rewrite
from tilestream.graph.selection import partition
from tilestream.graph.sizes import hint, settled
from tilestream.ir.ways import reached

MOST_INSTRUCTIONS = 28
"""An element, that hide behind writing and reading 16 bits of it (module's docstring)."""
_MOST_OPERATORS = 8
_LEAST_PART = 4
"""A value of at least this part of a result's elements is rows like it, not a column or a vector."""

_NORMS = {aten.native_layer_norm, aten._fused_rms_norm}
_LOCAL = {*ELEMENTWISE, *_NORMS, aten._to_copy, aten._softmax, aten._log_softmax, aten.mean, aten.sum}
_KEPT = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


@dataclass(frozen=True)
class _Made:
    """A saved value: the operators that make it, and what they read."""

    operators: tuple[fx.Node, ...]
    leaves: tuple[fx.Node, ...]


def unsaved(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Saved values of a forward graph that are cheaper made again, and the operators that make each.

    Args:
        results: how many of the forward graph's outputs are the user's; the others are saved.
    """
    outputs = results_of(forward.graph)
    own, saved = set(outputs[:results]), [n for n in outputs[results:] if isinstance(n, fx.Node)]
    given = {n.name: n for n in backward.graph.find_nodes(op="placeholder")}
    # What is saved may be a view of what others read.
    readers = {whole: given[n.name] for n in saved for whole in _same(n) if n.name in given}
    found: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in saved:
        if node in own or node.op != "call_function" or node.meta.get("recompute") in _KEPT:
            continue
        made = _made(node, readers.keys() - set(_same(node)))
        if made is not None and (_is_gathered(made) or _hidden(node, made, readers)):
            found[node] = made.operators
    inside = _inside_regions(forward, found, results) if found else set()
    return {node: made for node, made in found.items() if node.name in inside}


def make_again(joint: fx.Graph, found: dict[fx.Node, tuple[fx.Node, ...]]) -> None:
    """Tell torch's partitioner: operators of these names are recomputed, as under activation checkpointing."""
    names = {n.name: n.target for made in found.values() for n in made}
    for node in joint.nodes:
        if names.get(node.name) == node.target:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def saved_bytes(forward: fx.GraphModule, results: int) -> int:
    """Bytes that live from the forward to the backward graph, besides inputs, parameters and the user's results."""
    outputs = results_of(forward.graph)
    wholes = {storage(n) for n in outputs[results:] if isinstance(n, fx.Node) and value(n) is not None}
    wholes -= {storage(n) for n in outputs[:results] if isinstance(n, fx.Node)}
    return sum(tensor_bytes(n) for n in wholes if n.op == "call_function")


def _same(node: fx.Node) -> list[fx.Node]:
    """A node, and what it is a view of that holds the same elements."""
    found = [node]
    while is_view(found[-1]) and isinstance(found[-1].args[0], fx.Node):
        before = found[-1].args[0]
        if value(before) is None or _elements(before) != _elements(node):
            break
        found.append(before)
    return found


def _elements(node: fx.Node) -> int:
    fake = value(node)
    return 1 if fake is None else prod(map(hint, fake.shape))


def _made(node: fx.Node, saved: set[fx.Node]) -> _Made | None:
    """How a value is made of placeholders and saved ones, by a few operators of rows."""

    def is_local(at: fx.Node) -> bool:
        first = at.target is operator.getitem and at.args[1] == 0
        local = packet(at) in _LOCAL or is_view(at) or first or (packet(at) in GATHERS and at is node)
        return at.op == "call_function" and at not in saved and bool(local)

    found = sorted(reached([node], lambda at: at.all_input_nodes if is_local(at) else ()))
    operators = tuple(n for n in found if is_local(n))
    leaves = tuple(n for n in found if n.op == "placeholder" or n in saved)
    whole = len(operators) <= _MOST_OPERATORS and len(operators) + len(leaves) == len(found)
    return _Made(operators, leaves) if whole else None


def _is_gathered(made: _Made) -> bool:
    """Whether it is rows by an index, of a table that is there."""
    return any(packet(n) in GATHERS for n in made.operators)


def _hidden(node: fx.Node, made: _Made, readers: dict[fx.Node, fx.Node]) -> bool:
    """Whether the backward graph reads what it takes row by row anyway, and its arithmetic costs no time."""
    rows = [n for n in made.leaves if _LEAST_PART * _elements(n) >= max(map(_elements, made.operators))]
    features = settled(node.meta["val"].shape[-1]) if value(node) is not None and node.meta["val"].dim() else None
    if not rows or not isinstance(features, int) or features > MAX_FEATURES:
        return False
    computing = (n for n in made.operators if not is_view(n) and n.target is not operator.getitem)
    if sum(cost.lanes + cost.special for cost in map(each, computing)) > MOST_INSTRUCTIONS:
        return False
    return all(n.op != "placeholder" and n in readers and _differentiates(readers[n]) for n in rows)


def _differentiates(saved: fx.Node) -> bool:
    """Whether something else than products reads a value."""
    return any(not is_view(u) and packet(u) not in MATMULS for alias in aliases(saved) for u in alias.users)


def _inside_regions(forward: fx.GraphModule, found: dict[fx.Node, tuple[fx.Node, ...]], results: int) -> set[str]:
    """Names of those that no region would leave in memory, were they not saved."""
    names = {n.name for n in found}
    trial = copied(forward)
    kept = (n for i, n in enumerate(results_of(trial.graph)) if i < results or n is None or n.name not in names)
    trial.graph.output_node().args = (tuple(kept),)
    rewrite(trial, When.NORMAL_FORM)
    cuts = partition(trial, training=True).cuts
    return {n.name for cut in cuts for n in set(cut.nodes) - set(cut.outputs) if n.name in names}
