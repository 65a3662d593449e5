"""What lives in memory while a backward graph runs a group of nodes in steps, one after another.

Time is counted in steps. What stands around the group runs as soon as it can: right after the step that makes the last
of what it reads, or before the first one. So a weight's gradient frees what was saved for it before the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import fx

from tilestream.graph.nodes import behind, is_view, readers, value
from tilestream.graph.sizes import hint

BEFORE = -1


@dataclass(frozen=True)
class Live:
    """Bytes at each step of a group.

    Attributes:
        there: what was in memory before the step and is read in it, right after it or later: saved values, gradients.
        made: what the step leaves.
    """

    there: tuple[int, ...]
    made: tuple[int, ...]

    @classmethod
    def of(cls, steps: Sequence[Sequence[fx.Node]]) -> Live:
        """Of a group's steps, in graph order; what is around it is in the graph of its nodes."""
        inside = {node: time for time, step in enumerate(steps) for node in step}
        graph, after = steps[0][0].graph, len(steps)
        times = _times(graph, inside, after)
        last: dict[fx.Node, int] = {}
        for node, time in times.items():
            for whole in map(storage, node.all_input_nodes):
                if node.op != "output" or whole in inside:  # other gradients that stay are parameters' and small
                    last[whole] = max(last.get(whole, BEFORE), time)
        for given in graph.find_nodes(op="placeholder"):
            if given.name.startswith("primals"):
                last[given] = after  # AOTAutograd's name of what is the user's: nothing frees it
        there, made = [0] * after, [0] * after
        for node, read in last.items():
            size = tensor_bytes(node)
            if node in inside:
                if all(u in inside for u in readers(node)):
                    continue  # it stays on chip
                made[inside[node]] += size
            for time in range(times[node] + 1, min(read, after - 1) + 1):
                there[time] += size
        return cls(tuple(there), tuple(made))

    def during(self, start: int, end: int) -> int:
        """Bytes while the steps from ``start`` to before ``end`` run as one."""
        return self.there[start] + sum(self.made[start:end])

    def handed(self, start: int) -> int:
        """Bytes that a piece from ``start`` on reads again, since the step before it made them."""
        return self.made[start - 1] if start else 0


def storage(node: fx.Node) -> fx.Node:
    """What a node is a view of, through any number of views."""
    return behind(node, is_view)


def tensor_bytes(node: fx.Node) -> int:
    """Bytes of a node's tensor; 0 where it is none."""
    made = value(node)
    return 0 if made is None else prod(map(hint, made.shape)) * made.element_size()


def _times(graph: fx.Graph, inside: dict[fx.Node, int], after: int) -> dict[fx.Node, int]:
    """When every node runs. What needs nothing of the group runs before it or after it, as the graph has it."""
    found: dict[fx.Node, int] = {}
    passed, remaining = False, len(inside)
    for node in graph.nodes:
        if node in inside:
            remaining -= 1
            passed = not remaining
            found[node] = inside[node]
        elif node.op == "output":
            found[node] = after
        else:
            waits = max((found[n] for n in node.all_input_nodes), default=BEFORE)
            found[node] = after if passed and waits == BEFORE and node.op == "call_function" else waits
    return found
