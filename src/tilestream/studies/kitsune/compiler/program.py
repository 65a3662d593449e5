"""The nodes of a subgraph as a program over axes: with the views among them, and what leaves."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import fx

from tilestream.graph.nodes import Unsupported
from tilestream.studies.kitsune.compiler.free import base, is_free, users
from tilestream.studies.kitsune.lowering.program import Program, program
from tilestream.studies.kitsune.lowering.views import is_view
from tilestream.studies.kitsune.lowering.writer import Result


def written(parts: Mapping[str, Sequence[fx.Node]], stored: Collection[str]) -> Program:
    """Nodes by the part of the program that is to have their ops.

    Args:
        stored: names of the nodes that are parameters.

    Raises:
        Unsupported: with the node that has no lowering to axes.
    """
    members = {node for part in parts.values() for node in part}
    groups = {name: _with_views(part, members) for name, part in parts.items()}
    inside = {node for part in groups.values() for node in part}
    leaving = [result for node in inside if node in members for result in _leaving(node, inside)]
    order = {node: i for i, node in enumerate(next(iter(members)).graph.nodes)}
    leaving.sort(key=lambda result: (order[result[0]], result[1]))
    whole = [n for node in inside for n in node.all_input_nodes if base(n).name in stored]
    whole += [base(n) for n in whole]
    try:
        return program(_with_outer_views(groups), leaving, whole)
    except Unsupported:  # a view of an input that divides it otherwise: torch makes it, and it is an input itself
        return program(groups, leaving, whole)


def _with_outer_views(groups: Mapping[str, Sequence[fx.Node]]) -> dict[str, list[fx.Node]]:
    """``groups``, and the views by which they read what is made outside: two views of one input are one input."""
    found = {name: list(part) for name, part in groups.items()}
    inside = {node for part in groups.values() for node in part}
    for part in found.values():
        todo = list(part)
        while todo:
            for n in todo.pop().all_input_nodes:
                if n not in inside and n.op == "call_function" and is_view(n):
                    inside.add(n)
                    part.append(n)
                    todo.append(n)
    return found


def _with_views(nodes: Sequence[fx.Node], members: Collection[fx.Node]) -> list[fx.Node]:
    """``nodes``, and what is free behind them and read by other members."""
    found = dict.fromkeys(nodes)
    todo = list(nodes)
    while todo:
        for user in todo.pop().users:
            if is_free(user) and user not in found and base(user) in found and any(u in members for u in users(user)):
                found[user] = None
                todo.append(user)
    return list(found)


def _leaving(node: fx.Node, inside: Collection[fx.Node]) -> Iterator[Result]:
    """The results of ``node`` that anything outside reads, directly or by a view."""

    def outside(at: fx.Node) -> bool:
        return any((outside(user) if is_free(user) else True) for user in at.users if user not in inside) or any(
            outside(user) for user in at.users if user in inside and is_free(user)
        )

    if not isinstance(node.meta.get("val"), list | tuple):
        if outside(node) or not node.users:
            yield node, 0
        return
    for part in node.users:
        if outside(part):
            yield node, int(part.args[1])  # pyright: ignore[reportArgumentType]
