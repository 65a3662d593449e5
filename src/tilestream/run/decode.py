"""A decode step of a whole model as one kernel: found in a graph of inference, and what runs it on a GPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from tilestream.announce import announce
from tilestream.graph.decode import STEP, place, site_of
from tilestream.graph.modules import copied
from tilestream.graph.nodes import Unsupported
from tilestream.graph.own import on_gpu
from tilestream.kernels.step.shape import Shape
from tilestream.run.target import Target


def stepped(graph: fx.GraphModule, target: Target) -> tuple[fx.GraphModule, Shape] | None:
    """A copy of an inference graph with its decode step as one operator; None where it is none, which is announced."""
    made = copied(graph)
    try:
        site = site_of(made.graph)
        place(made, site)
    except Unsupported as why:
        announce(f"no decode step is one kernel: {why.reason}")
        return None
    return made, site.shape


def _step(*operands: Any) -> Tensor:
    from tilestream.cuda.step import step

    return step(*operands)


on_gpu(STEP, _step)
