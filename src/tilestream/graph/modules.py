"""Graphs as modules whose Python code is written when somebody runs them or reads it.

Most of ours are looked at, rewritten and traced node by node. fx writes and compiles their code at every ``recompile``,
a fifth of the time in which regions are found.
"""

from __future__ import annotations

import copy

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule


def lazy(owner: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """``graph`` with the attributes of ``owner`` that it reads."""
    return _LazyGraphModule(owner, graph)


def copied(owner: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph and of what is told of it; nodes' ``meta`` and constants are those of ``owner``."""
    made = lazy(owner, copy.deepcopy(owner.graph))
    made.meta = dict(owner.meta)
    return made
