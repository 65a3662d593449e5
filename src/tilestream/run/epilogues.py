"""Whether a library's products take in their activations, in graphs for Inductor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from tilestream.graph.rewrites.epilogues import fuse_activations, is_of_pixels, with_epilogues
from tilestream.graph.rewrites.padded_products import pads
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.rewrites.table import rewrite


def fuse(graph: fx.GraphModule, patches: Mapping[str, Any]) -> int:
    """Let a library's products take in their activations; how many did. None where Inductor is asked to tune products,
    whose templates have epilogues of their own."""
    return rewrite(graph, fuse_activations, Settings(library_epilogues=not tunes(patches)))


def would_fuse(graph: fx.GraphModule, patches: Mapping[str, Any], linears: bool = True) -> bool:
    """Whether ``fuse`` would replace an activation, or a product be padded: then a graph without regions gains as well.

    Args:
        linears: whether products of rows count, and not 1 x 1 convolutions alone.
    """
    taken = (product for product, _ in with_epilogues(graph.graph.nodes).values())
    gains = any(linears or is_of_pixels(product) for product in taken) or (
        linears and any(map(pads, graph.graph.nodes))
    )
    return gains and not tunes(patches)


def tunes(patches: Mapping[str, Any]) -> bool:
    """Whether Inductor tunes products."""
    from torch._inductor import config

    return any(patches.get(name, getattr(config, name)) for name in ("max_autotune", "max_autotune_gemm"))
