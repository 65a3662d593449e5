"""Whether a graph is one of several that Dynamo has cut a model into: no CUDA graph holds such a model, as a rule since
it asks the GPU for a size, so that each graph begins on an idle GPU and waits for what the host takes to enqueue it."""

from __future__ import annotations

import sys

from torch import fx

RESUMED = "__resume_at"
"""How Dynamo's code names what runs behind a cut."""


def is_part(graph: fx.GraphModule) -> bool:
    """Whether a graph that Dynamo is compiling ends at a cut, or is called by code that has been cut."""
    reason = getattr(graph, "compile_subgraph_reason", None)
    if reason is not None and reason.graph_break:
        return True
    frame = sys._getframe()  # Dynamo compiles a frame when it is called, so its callers are compiled already
    while frame is not None:
        if any(name.startswith(RESUMED) for name in frame.f_code.co_names):
            return True
        frame = frame.f_back
    return False
