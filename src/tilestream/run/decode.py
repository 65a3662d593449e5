"""A decode step of a whole model as one kernel: found in a graph of inference."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from tilestream.announce import announce
from tilestream.graph.nodes import Unsupported
from tilestream.kernels.step.kernel import StepKernel
from tilestream.kernels.step.shape import Shape
from tilestream.options import Options
from tilestream.plan import decode
from tilestream.run.prepare import begin_building
from tilestream.run.target import Target


def settle_sizes(graph: fx.GraphModule) -> None:
    """Fix the symbolic sizes of a Dynamo graph that may be a decode step: of a token a sequence, and a static cache.

    Dynamo makes a size symbolic when it has seen two, as of caches of two calls of ``generate``. A step's kernel is one
    size's, so each size has a graph.
    """
    if not decode.is_of_one_token(graph) or not decode.writes_cache(graph):
        return
    for node in graph.graph.find_nodes(op="placeholder"):
        held = node.meta.get("example_value")
        for size in held.shape if isinstance(held, Tensor) else [held]:
            if isinstance(size, torch.SymInt):
                int(size)


def stepped(graph: fx.GraphModule, options: Options, target: Target) -> tuple[fx.GraphModule, Shape] | None:
    """A copy of an inference graph with its decode step as one operator; None where it is none, which is announced of
    graphs that write a cache.

    Its kernel begins to be compiled, beside all that is compiled until it is timed.
    """
    if not decode.writes_cache(graph):
        return None
    try:
        made, planned = decode.stepped(graph, target.hardware)
    except Unsupported as why:
        announce(f"no decode step is one kernel: {why.reason}")
        return None
    begin_building([StepKernel(planned.shape).source], options, target)
    return made, planned.shape
