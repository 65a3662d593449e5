"""A graph whose nodes were replaced, made whole again."""

from __future__ import annotations

from torch import fx


def settle(owner: fx.GraphModule, sort: bool = False) -> None:
    """Drop what nobody reads any more, check the graph, and compile it to code.

    Args:
        sort: nodes may stand in front of what they read.
    """
    if sort:
        from torch._inductor.pattern_matcher import stable_topological_sort

        stable_topological_sort(owner.graph)
    owner.graph.eliminate_dead_code()
    owner.graph.lint()
    owner.recompile()
