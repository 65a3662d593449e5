"""Groups of nodes that stay convex: contracting every group to one node leaves the graph acyclic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx


class Groups:
    """Disjoint sets of fx nodes, merged only where the contracted graph stays acyclic.

    Args:
        nodes: all nodes, in graph order.
        parameters: the nodes that may be grouped, each with the nodes that it uses as whole
            operands; those must come from outside its group, since a group sees its values row
            by row.
    """

    def __init__(self, nodes: Sequence[fx.Node], parameters: Mapping[fx.Node, frozenset[fx.Node]]) -> None:
        self._position = {n: i for i, n in enumerate(nodes)}
        self._group: dict[fx.Node, frozenset[fx.Node]] = {n: frozenset((n,)) for n in parameters}
        self._parameters = parameters
        self._after = successors(nodes)

    def position(self, node: fx.Node) -> int:
        """Place in the graph's order; nodes of other kinds (placeholders) come first."""
        return self._position.get(node, -1)

    def merge(self, a: object, b: object, force: bool = False) -> bool:
        """Merge the groups of two nodes if the result is legal; ``force`` for parts of one tuple."""
        if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
            return False
        left, right = self._group.get(a), self._group.get(b)
        if left is None or right is None:
            return False
        if left is right:
            return True
        both = left | right
        if not force:
            if any(self._parameters[n] & both for n in both) or self._cyclic(both):
                return False
        for node in both:
            self._group[node] = both
        return True

    def all(self) -> list[list[fx.Node]]:
        """Every group, its nodes in graph order; groups in the order of their first nodes."""
        unique = dict.fromkeys(self._group.values())
        return sorted((sorted(g, key=self._position.__getitem__) for g in unique), key=lambda g: self._position[g[0]])

    def _cyclic(self, both: frozenset[fx.Node]) -> bool:
        seen: set[fx.Node] = set()
        queue = [s for n in both for s in self._after[n] if s not in both]
        while queue:
            node = queue.pop()
            if node in both:
                return True
            if node in seen:
                continue
            whole = self._group.get(node, frozenset((node,)))
            seen |= whole
            queue.extend(s for n in whole for s in self._after.get(n, ()) if s not in seen)
        return False


def successors(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Users of every node; a node that mutates comes after everything before it in the graph."""
    after = {n: list(n.users) for n in nodes}
    for index, node in enumerate(nodes):
        if _mutates(node):
            for earlier in nodes[:index]:
                after[earlier].append(node)
            after[node] = list(nodes[index + 1 :])
    return after


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)
