"""A graph whose nodes were replaced, made whole again."""

from __future__ import annotations

from torch import fx


def settle(owner: fx.GraphModule, sort: bool = False) -> None:
    """Drop what nobody reads any more, check the graph, and compile it to code.

    Args:
        sort: nodes may stand in front of what they read.

    Raises:
        RuntimeError: nodes wait for each other, or read what is no longer in the graph: a mistake of ours.
    """
    if sort:
        from torch._inductor.pattern_matcher import stable_topological_sort

        try:
            stable_topological_sort(owner.graph)
        except AssertionError:
            raise RuntimeError(f"no order of the graph has its operands first: {', '.join(_early(owner))}") from None
    owner.graph.eliminate_dead_code()
    owner.graph.lint()
    owner.recompile()


def _early(owner: fx.GraphModule) -> list[str]:
    """Names of the nodes that stand in front of something they read."""
    seen: set[fx.Node] = set()
    found = []
    for node in owner.graph.nodes:
        if not seen.issuperset(node.all_input_nodes):
            found.append(node.name)
        seen.add(node)
    return found
