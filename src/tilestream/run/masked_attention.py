"""Attention over the pairs of a mask by our kernel, in graphs that are timed with it and without."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor, fx

from tilestream.announce import announced
from tilestream.graph.masked.op import MASKED, empty_result
from tilestream.graph.masked.sites import is_masked, place, site_of
from tilestream.graph.nodes import Unsupported
from tilestream.graph.own import on_gpu
from tilestream.graph.settled import settle
from tilestream.kernels.parts.pairs import PairMask
from tilestream.options import Options

log = logging.getLogger(__name__)


def _cuda(
    query: Tensor, key: Tensor, value: Tensor, blocks: list[Tensor], read: list[Tensor], keeps: str,
    block: list[int], differs: list[int], scale: float, by_token: bool,
) -> Tensor:  # fmt: skip
    from tilestream.cuda.masked_attention import Blocks, attention

    lists: list[Any] = list(zip(blocks[::2], blocks[1::2], strict=True))
    listed = Blocks(lists[0], lists[1] if len(lists) > 1 else None, block[0], block[1]) if lists else None
    masks = (differs[0], differs[1])
    return attention(query, key, value, PairMask.of(keeps), read, listed, masks, scale, empty_result(query, by_token))


on_gpu(MASKED, _cuda)


def stream_masked(graph: fx.GraphModule, options: Options) -> int:
    """Put ``MASKED`` in the place of every attention with a mask that our kernel can do; how many were.

    What our kernel takes is not timed by itself: how fast it is depends on what the mask keeps, and only the user's own
    tensors say that. The graph as a whole is timed with it and without (``run.whole``).

    Args:
        graph: functional ATen of an inference graph, with fake tensors of every node in its meta; changed in place.

    Raises:
        TilestreamError: with ``fallback=False``.
    """
    made = 0
    for node in [n for n in graph.graph.nodes if is_masked(n)] if options.attention else ():
        with announced("attention goes to Inductor", options.fallback):
            try:
                made += place(site_of(node))
            except Unsupported as why:
                log.info("%s goes to Inductor: %s", node.name, why.reason)
    if made:
        settle(graph)
    return made
