"""Which nodes of an ATen graph make one operator: what a model's author, or a graph library, would call one.

- A product's scaling by a number is its alpha: scores divided by the root of the features.
- Adding a number before a reciprocal root is its eps.
- The zeros that a scatter adds to are its own: graph libraries write sums of messages in one kernel.
- Gathers of rows that only feed one concatenation are one operator with it, as message passing libraries have it.
- Lookups in several tables that feed one stack are one table-batched lookup, and so is their backward pass.

Everything else that computes or moves something is an operator of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tilestream.graph.costs.table import FILLS, GEMMS
from tilestream.graph.nodes import packet
from tilestream.studies.kitsune.compiler.free import FOLDED, base, is_operation, users

aten = torch.ops.aten

_JOINS = (aten.cat, aten.stack)
_ADDS = (aten.index_add, aten.scatter_add)


@dataclass(frozen=True)
class Group:
    """Nodes of one operator, in order; ``main`` gives it its name and family."""

    main: fx.Node
    nodes: tuple[fx.Node, ...]


def fold(graph: fx.Graph) -> None:
    """Mark nodes that belong to their neighbour, in ``meta``: scalings of products, eps, zeros of scatters."""
    for node in graph.nodes:
        if not is_operation(node):
            continue
        kind, readers = packet(node), set(users(node))
        if kind in (aten.mul, aten.div) and _with_number(node):
            made = base(node.all_input_nodes[0])
            if (packet(made) in GEMMS and set(users(made)) == {node}) or _all(readers, GEMMS):
                node.meta[FOLDED] = True
        elif kind is aten.add and _with_number(node) and _all(readers, (aten.rsqrt,)):
            node.meta[FOLDED] = True
        elif kind in FILLS and len(readers) == 1 and _all(readers, _ADDS):
            node.meta[FOLDED] = False


def groups(graph: fx.Graph) -> list[Group]:
    """The operators of a graph that ``fold`` has marked, each at the place of its last node."""
    nodes = [n for n in graph.nodes if is_operation(n)]
    place = {n: i for i, n in enumerate(nodes)}
    team: dict[fx.Node, fx.Node] = {}

    def together(members: list[fx.Node], main: fx.Node) -> None:
        team.update(dict.fromkeys(members, main))

    for node in nodes:
        if packet(node) in _JOINS:
            feeds = [n for n in _operands(node) if set(users(n)) == {node}]
            together([n for n in feeds if _gathers_rows(n)], node)
            tables = [n for n in feeds if packet(n) is aten.embedding]
            if tables:
                together(tables, max(tables, key=place.__getitem__))
    gradients = [n for n in nodes if packet(n) is aten.embedding_dense_backward and _ends_here(n)]
    for tables in _by(gradients, lambda n: base(n.all_input_nodes[0])):
        together(tables, max(tables, key=place.__getitem__))
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        main = team[node] if node in team else node
        found.setdefault(main, []).append(node)
    return [Group(main, tuple(found[main])) for main in sorted(found, key=place.__getitem__)]


def _gathers_rows(node: fx.Node) -> bool:
    """``x.index_select(0, i)`` or ``x[i]``."""
    if packet(node) is aten.index:
        return isinstance(node.args[1], list | tuple) and len(node.args[1]) == 1
    return packet(node) is aten.index_select and bool(node.args[1] == 0)


def _with_number(node: fx.Node) -> bool:
    return bool(len(node.args) == 2 and isinstance(node.args[1], int | float) and len(node.all_input_nodes) == 1)


def _all(readers: set[fx.Node], kinds: Container[Any]) -> bool:
    return bool(readers) and all(packet(n) in kinds for n in readers)


def _operands(node: fx.Node) -> list[fx.Node]:
    bases = [base(n) for n in node.all_input_nodes]
    return [n for n in dict.fromkeys(bases) if n.op == "call_function" and is_operation(n)]


def _by(nodes: list[fx.Node], key: Callable[[fx.Node], fx.Node]) -> list[list[fx.Node]]:
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        found.setdefault(key(node), []).append(node)
    return list(found.values())


def _ends_here(node: fx.Node) -> bool:
    """Whether only the graph's output reads it; the gradient of a table that is used twice is added to another."""
    return all(user.op == "output" for user in users(node))
