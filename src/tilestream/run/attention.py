"""A library's attention: whether it runs, and kernels that take its place where they win."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from tilestream.announce import announced
from tilestream.graph.real import real
from tilestream.graph.rewrites.shared_keys import is_attention
from tilestream.graph.settled import settle
from tilestream.options import Options
from tilestream.plan.candidates import Plan
from tilestream.run.made_up import random_tensor

log = logging.getLogger(__name__)
K = TypeVar("K")
_ran: dict[str, bool] = {}


def runs_here(called: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a library's attention takes arguments like these fake ones: it is called with random values, once a
    shape. PyTorch chose it for other shapes, and its own limits are not told."""
    fakes = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    if any(x.device.type != "cuda" for x in fakes) or torch.cuda.is_current_stream_capturing():
        return True
    shapes = [(tuple(x.shape), tuple(x.stride()), x.dtype, x.device) for x in fakes]
    key = str((called, shapes, [x for x in (*args, *kwargs.values()) if not isinstance(x, torch.Tensor)]))
    if key not in _ran:
        try:
            with real(fakes[0].device):
                made = tree_map_only(torch.Tensor, random_tensor, (list(args), dict(kwargs)))
                called(*made[0], **made[1])
                torch.cuda.synchronize()
            _ran[key] = True
        except RuntimeError as failure:
            log.info("keys stay repeated: %s", failure)
            _ran[key] = False
    return _ran[key]


def replace_attention(
    graph: fx.GraphModule,
    kind_of: Callable[[fx.Node], K | None],
    choice: Callable[[fx.Node, K], Plan],
    replace: Callable[[fx.Node], bool],
    options: Options,
    else_: str,
) -> int:
    """Replace every attention of a kind that has another kernel, where that wins; how many were.

    Args:
        kind_of: what an attention is; None where the other kernel cannot do it.
        replace: whether it could.
        else_: what becomes of an attention instead, for the announcement of an exception of ours.

    Raises:
        TilestreamError: with ``fallback=False``.
    """
    made = 0
    for node in [n for n in graph.graph.nodes if is_attention(n)]:
        kind = kind_of(node)
        if kind is None:
            continue
        with announced(else_, options.fallback):
            made += choice(node, kind).wins and replace(node)
    if made:
        settle(graph)
    return made
