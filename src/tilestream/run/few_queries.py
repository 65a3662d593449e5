"""Attention of a token a sequence as a kernel of ours, where it is faster than the library's: timed once a shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from tilestream.graph.nodes import value
from tilestream.graph.real import real
from tilestream.options import Options
from tilestream.run import prepare, timed_once
from tilestream.run.grouped_queries import MASKS, call, given_to, replace_attention, take_over
from tilestream.run.stopwatch import timed
from tilestream.run.target import Target
from tilestream.run.timed_once import Choice

aten = torch.ops.aten

MOST_POSITIONS = 4096
"""A head of keys has one CTA, which takes longer than the library's over more of them."""

_library = torch.library.Library("tilestream", "FRAGMENT")
_library.define(
    "few_queries(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale) -> Tensor",
    tags=(torch.Tag.needs_exact_strides,),
)
FEW_QUERIES = torch.ops.tilestream.few_queries.default


def _eager(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scale).contiguous()


def _cuda(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    from tilestream.cuda.few_queries import attention

    return attention(query, key, value, mask, scale)


_library.impl("few_queries", _eager, "CompositeExplicitAutograd")
_library.impl("few_queries", _cuda, "CUDA")
torch.library.register_fake("tilestream::few_queries", lambda query, *_: query.new_empty(query.shape), lib=_library)


@dataclass(frozen=True)
class Kind:
    """All that decides how long attention takes. ``operator``: the library's; ``mask``: its dimensions, 0 for none."""

    operator: str
    heads: int
    queries: int
    positions: int
    features: int
    dtype: str
    mask: int


def stream_attention(graph: fx.GraphModule, options: Options, target: Target) -> int:
    """Put our kernel in the place of every attention of few queries that it wins; how many were.

    An exception of ours costs the attention, and is announced.

    Args:
        graph: functional ATen behind ``grouped_queries.share_keys``, with fake tensors of every node in its meta.

    Raises:
        TilestreamError: with ``fallback=False``.
    """
    if not options.attention or not (prepare.measures(options, target) or target.kind == "reference"):
        return 0

    def wins(node: fx.Node, kind: Kind) -> bool:
        return target.kind == "reference" or choose(kind, node.target, options, target).wins

    return replace_attention(graph, kind_of, wins, _replace, options, "attention goes to the library")


def kind_of(node: fx.Node) -> Kind | None:
    """What an attention is, if it is one of few queries: one head, all that its kernel needs; else None."""
    from tilestream.cuda.few_queries import FEATURES, MOST_QUERIES

    given = given_to(node)
    query, key, values = (value(given[name]) for name in ("query", "key", "value"))
    if query is None or key is None or values is None or given.get("is_causal") or given.get("dropout_p"):
        return None
    sizes = (*query.shape, *key.shape, *values.shape)
    if len(sizes) != 12 or not all(isinstance(n, int) for n in sizes) or key.shape != values.shape:
        return None
    heads, one, queries, features = query.shape
    fits = one == 1 and queries <= MOST_QUERIES and features in FEATURES and key.shape[2] <= MOST_POSITIONS
    if not fits or query.dtype not in (torch.bfloat16, torch.float16) or list(key.shape[:2]) != [heads, 1]:
        return None
    mask = _mask(given)
    fake = None if mask is None else value(mask)
    if mask is not None and (fake is None or fake.dtype != query.dtype or not _is_alike(fake)):
        return None
    dims = 0 if fake is None else fake.dim()
    return Kind(str(node.target), heads, queries, key.shape[2], features, str(query.dtype), dims)


def _mask(given: Mapping[str, Any]) -> fx.Node | None:
    return next((given[n] for n in MASKS if given.get(n) is not None), None)


def _is_alike(mask: Tensor) -> bool:
    """Whether all queries of a head have the same row of a mask."""
    if mask.dim() == 2:
        return mask.shape[0] == 1
    return mask.dim() == 4 and (mask.shape[2] == 1 or mask.stride(2) == 0)


def choose(kind: Kind, library: Any, options: Options, target: Target) -> Choice:
    """What ours and the library's take: from this process, the disk, or timed now.

    Raises:
        PlanError: ours computes something else.
        CompileError, DeviceError: the kernel cannot be built.
    """

    def now() -> Choice:
        with prepare.kernels_kept(options, target):
            return measured(kind, library, target)

    return timed_once.choose("attention", kind, options, target, now)


def measured(kind: Kind, library: Any, target: Target) -> Choice:
    """Both timed on random tensors, ours held to float64; raises as ``choose``."""
    with timed("timing"), real(target.device):
        dtype = getattr(torch, kind.dtype.removeprefix("torch."))
        shapes = [(kind.heads, 1, n, kind.features) for n in (kind.queries, kind.positions, kind.positions)]
        query, key, values = (torch.randn(shape, device=target.device, dtype=dtype) for shape in shapes)
        mask = seen = None
        if kind.mask:
            seen = mask = torch.randn(1, 1, 1, kind.positions, device=target.device, dtype=dtype)
            seen = seen[0, 0] if kind.mask == 2 else seen.expand(kind.heads, 1, kind.queries, kind.positions)
        scale = kind.features**-0.5
        wide = None if mask is None else mask.double()
        return timed_once.timed(
            f"attention of {kind.queries} queries",
            lambda: FEW_QUERIES(query, key, values, mask, scale),
            _library_call(library, query, key, values, seen),
            _eager(query.double(), key.double(), values.double(), wide, scale),
        )


def _library_call(
    library: Any, query: Tensor, key: Tensor, values: Tensor, mask: Tensor | None
) -> Callable[[], Tensor]:
    names = [a.name for a in library._schema.arguments]
    given: dict[str, Any] = {"query": query, "key": key, "value": values}
    if "compute_log_sumexp" in names:
        given["compute_log_sumexp"] = False
    for name in MASKS:
        if name in names:
            given[name] = mask
    return lambda: library(**given)[0]


def _replace(graph: fx.Graph, node: fx.Node) -> bool:
    given = given_to(node)
    query = given["query"]
    mask = _mask(given)
    scale = given.get("scale") or query.meta["val"].shape[-1] ** -0.5
    with graph.inserting_before(node):
        if mask is not None and mask.meta["val"].dim() == 2:
            mask = call(graph, aten.reshape.default, mask, [1, 1, 1, -1])
        made = graph.call_function(FEW_QUERIES, (query, given["key"], given["value"], mask, scale))
    take_over(graph, node, made)
    return True
