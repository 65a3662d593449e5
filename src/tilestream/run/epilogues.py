"""ReLU as the epilogue of a library's product, for the layers beside regions that are too wide for a pipeline.

Inductor leaves ``relu(addmm(...))`` to a library's product and a kernel of its own that reads and writes the result
once more: 53 us of 130 on an H200 for 32,768 rows, 1024 features. cuBLASLt has ReLU as an epilogue, which ATen calls
``_addmm_activation``; rounding after it and before it gives the same bits. So has a 1 x 1 convolution, which is a
linear over pixels: 10 us of 15 for 6,272 pixels, 256 to 1024 channels.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tilestream.graph.epilogues import is_of_pixels, missing_columns, with_relu
from tilestream.graph.interaction import unpadded
from tilestream.graph.live import storage
from tilestream.graph.settled import settle
from tilestream.run.pads import PADDED

aten = torch.ops.aten


def fuse(graph: fx.GraphModule, patches: Mapping[str, Any]) -> int:
    """Replace every ``relu`` of a 16-bit ``addmm`` that has no other user; how many were.

    Rows of other than a multiple of 16 bytes are padded with zeros where the product is wide, and left alone where not.
    Nothing is replaced where Inductor is asked to tune products, whose templates have epilogues of their own.

    Args:
        graph: functional ATen with ``val`` in its nodes' meta, which new nodes may lack; changed in place.
        patches: changes of Inductor's configuration for the graph.
    """
    if _tunes(patches):
        return 0
    taken = with_relu(graph.graph.nodes).values()
    for product, relu in taken:
        (_fuse_pixels if is_of_pixels(product) else _fuse)(graph.graph, product, relu)
    if taken:
        settle(graph)
    return len(taken)


def _tunes(patches: Mapping[str, Any]) -> bool:
    from torch._inductor import config

    return any(patches.get(name, getattr(config, name)) for name in ("max_autotune", "max_autotune_gemm"))


def would_fuse(graph: fx.GraphModule, patches: Mapping[str, Any], linears: bool = True) -> bool:
    """Whether ``fuse`` would replace a ReLU: then a graph without regions gains as well.

    Args:
        linears: whether products of rows count, and not 1 x 1 convolutions alone.
    """
    taken = (product for product, _ in with_relu(graph.graph.nodes).values())
    return not _tunes(patches) and any(linears or is_of_pixels(product) for product in taken)


def _fuse_pixels(graph: fx.Graph, product: fx.Node, relu: fx.Node) -> None:
    """The library's epilogue adds a vector in any case: zeros, where the convolution has no bias."""
    x, weight, *bias = product.args
    result = product.meta["val"]
    with graph.inserting_before(relu):
        vector = next((b for b in bias if b is not None), None)
        if vector is None:
            words = {"dtype": result.dtype, "device": result.device}
            vector = graph.call_function(aten.full.default, ([result.shape[-1]], 0.0), words)
        rows = graph.call_function(aten.reshape.default, (x, [-1, weight.meta["val"].shape[-1]]))  # pyright: ignore
        transposed = graph.call_function(aten.t.default, (weight,))
        fused = graph.call_function(aten._addmm_activation.default, (vector, rows, transposed))
        shown = graph.call_function(aten.reshape.default, (fused, list(result.shape)))
    shown.meta = dict(relu.meta)
    relu.replace_all_uses_with(shown)


def _fuse(graph: fx.Graph, product: fx.Node, relu: fx.Node) -> None:
    bias, rows, transposed = product.all_input_nodes
    (weight,) = transposed.all_input_nodes
    depth, missing = weight.meta["val"].shape[1], missing_columns(product)
    with graph.inserting_before(product):
        if missing:
            wide = unpadded(rows)  # an interaction's rows end in zeros as they are
            if wide is not None and wide.meta["val"].shape[1] == depth + missing:
                rows, (weight,) = wide, _padded(graph, [weight], depth + missing)
            else:
                rows, weight = _padded(graph, [rows, weight], depth + missing)
            transposed = graph.call_function(aten.t.default, (weight,))
        fused = graph.call_function(aten._addmm_activation.default, (bias, rows, transposed))
    fused.meta = dict(product.meta)
    product.replace_all_uses_with(fused)
    relu.replace_all_uses_with(relu.all_input_nodes[0])


def _padded(graph: fx.Graph, matrices: Sequence[fx.Node], columns: int) -> list[fx.Node]:
    """Each with columns of zeros behind its own: those that are given by one kernel of ours. What the graph computes
    Inductor pads where it makes it."""
    given = [m for m in matrices if _is_given(m)]
    both = graph.call_function(PADDED, (given, columns)) if given else None
    return [
        graph.call_function(operator.getitem, (both, given.index(m)))
        if m in given
        else graph.call_function(aten.constant_pad_nd.default, (m, [0, columns - m.meta["val"].shape[1]]))
        for m in matrices
    ]


def _is_given(node: fx.Node) -> bool:
    """Whether a node is the user's tensor, or a view of it."""
    return storage(node).op in ("placeholder", "get_attr")
