"""A decode step of a whole model as one kernel: found in a graph of inference, and what runs it on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from tilestream.announce import announce
from tilestream.graph.decode import STEP, place, site_of
from tilestream.graph.modules import copied
from tilestream.graph.nodes import Unsupported
from tilestream.graph.own import on_gpu
from tilestream.graph.sizes import same_size
from tilestream.kernels.step.shape import Shape
from tilestream.run.target import Target


def settle_sizes(graph: fx.GraphModule) -> None:
    """Fix the symbolic sizes of a Dynamo graph that may be a decode step: of a token a sequence, and a static cache.

    Dynamo makes a size symbolic when it has seen two, as of caches of two calls of ``generate``. A step's kernel is one
    size's, so each size has a graph.
    """
    if not _is_of_one_token(graph) or not any("index_copy" in str(n.target) for n in graph.graph.nodes):
        return
    for node in graph.graph.find_nodes(op="placeholder"):
        held = node.meta.get("example_value")
        for size in held.shape if isinstance(held, Tensor) else [held]:
            if isinstance(size, torch.SymInt):
                int(size)


def _is_of_one_token(graph: fx.GraphModule) -> bool:
    """Whether a token of each sequence is embedded, in a graph of Dynamo or ATen."""
    made = [n for n in graph.graph.nodes if "embedding" in str(n.target) and n.op == "call_function"]
    fakes = [n.meta.get("val", n.meta.get("example_value")) for n in made]
    return all(same_size(fake.shape[-2], 1) for fake in fakes if isinstance(fake, Tensor) and fake.dim() > 1)


def stepped(graph: fx.GraphModule, target: Target) -> tuple[fx.GraphModule, Shape] | None:
    """A copy of an inference graph with its decode step as one operator; None where it is none, which is announced."""
    made = copied(graph)
    try:
        site = site_of(made.graph)
        if site.shape.least_ctas > target.hardware.sms:
            raise Unsupported(f"attention needs {site.shape.least_ctas} SMs at once")
        place(made, site)
    except Unsupported as why:
        announce(f"no decode step is one kernel: {_known(graph) or why.reason}")
        return None
    return made, site.shape


def _known(graph: fx.GraphModule) -> str:
    """A reason that says more than where the pattern ends; empty if there is none."""
    if not _is_of_one_token(graph):
        return "the graph is of several tokens of a sequence, as of a prompt"
    held = [n.meta.get("val") for n in graph.graph.find_nodes(op="placeholder")]
    if any(isinstance(v, Tensor) and v.dtype == torch.float64 and not v.dim() for v in held):
        return "numbers of the model are arguments of the graph: compile without dynamic=True"
    return ""


def _step(*operands: Any) -> Tensor:
    from tilestream.cuda.step import step

    return step(*operands)


on_gpu(STEP, _step)
