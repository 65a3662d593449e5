"""Kernels of regions that start while the kernel in front of them still runs (programmatic dependent launch).

Such a kernel (``Kernel.starts_early``) loads its weights before it waits for the kernel before. That is right where the
kernel before writes none of them: it has to be one of the same graph, and the graph must not write the weights. A
graph's first kernel follows whatever the user did before, an optimizer's step for instance, and starts as usual. Where
Inductor's own kernels start early as well, ours do not: those wait only for what they read themselves, so that the end
of one says nothing of the kernels before it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._inductor import config

from tilestream.graph.live import storage
from tilestream.graph.nodes import MATMULS, packet
from tilestream.graph.rewrites.kept import is_written
from tilestream.graph.rewrites.shared_keys import is_attention
from tilestream.graph.short_attention import SHORT
from tilestream.kernels.families import kernel_of
from tilestream.options import Options
from tilestream.run.few_queries import FEW_QUERIES
from tilestream.run.operator import REGION
from tilestream.run.place import SPEC
from tilestream.run.spec import RegionSpec, encode

aten = torch.ops.aten

OURS = (REGION, FEW_QUERIES, SHORT)


def start_early(graph: fx.GraphModule, options: Options) -> int:
    """Let every region's kernel of an inference graph that may do so start early; how many do.

    Args:
        graph: with regions as calls and fake tensors in its nodes' meta; changed in place.
    """
    if not options.early_launch or getattr(config.triton, "enable_pdl", False):
        return 0
    follows: set[fx.Node] = set()  # nodes that cannot run before a kernel of this graph
    made = 0
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        if follows.intersection(node.all_input_nodes) and node.target is REGION:
            made += _starts_early(node)
        if _is_kernel(node) or follows.intersection(node.all_input_nodes):
            follows.add(node)
    if made:
        graph.recompile()
    return made


def _starts_early(call: fx.Node) -> bool:
    tensors, sizes, _ = call.args
    spec: RegionSpec = call.meta[SPEC]
    given = spec.merged(tensors, sizes)  # pyright: ignore[reportArgumentType]
    if not (kernel_of(spec.pipeline).starts_early and all(_rests(given[o.index]) for o in spec.parameters)):
        return False
    call.args = (tensors, sizes, encode(replace(spec, early=True)))
    return True


def _is_kernel(node: fx.Node) -> bool:
    """Whether this is a kernel whatever Inductor makes of the graph. A copy, for instance, may be left out."""
    return node.target in OURS or packet(node) in MATMULS or packet(node) is aten.convolution or is_attention(node)


def _rests(weight: Any) -> bool:
    """Whether a weight is the user's, and this graph writes into nothing that it is a view of."""
    if not isinstance(weight, fx.Node):
        return False
    own = storage(weight)
    return own.op in ("placeholder", "get_attr") and not is_written(own)
