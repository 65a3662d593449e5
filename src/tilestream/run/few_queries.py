"""Attention of a token a sequence as a kernel of ours, where it is faster than the library's: timed once a shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from tilestream.graph.nodes import value
from tilestream.graph.own import on_gpu, operator
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.shared_keys import MASKS, given_to, take_over
from tilestream.kernels.operators.few_queries import FEATURES, MOST_QUERIES
from tilestream.plan.candidates import FALLBACK, Candidate
from tilestream.run.attention import Alternative
from tilestream.run.target import Target
from tilestream.run.timer import Trial

aten = torch.ops.aten

MOST_POSITIONS = 4096
"""A head of keys has one CTA, which takes longer than the library's over more of them."""


def _eager(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scale).contiguous()


def _cuda(*operands: Any) -> Tensor:
    from tilestream.cuda.few_queries import attention

    return attention(*operands)


FEW_QUERIES = operator(
    "few_queries(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale) -> Tensor",
    _eager,
    lambda query, *_: query.new_empty(query.shape),
)
on_gpu(FEW_QUERIES, _cuda)


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


def kind_of(node: fx.Node) -> Kind | None:
    """What an attention is, if it is one of few queries: one head, all that its kernel needs; else None."""
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


def trial(node: fx.Node, kind: Kind, target: Target) -> Trial:
    """Ours and the library's on random tensors."""
    scale = kind.features**-0.5

    def make() -> list[Tensor | None]:
        dtype = getattr(torch, kind.dtype.removeprefix("torch."))
        shapes = [(kind.heads, 1, n, kind.features) for n in (kind.queries, kind.positions, kind.positions)]
        shapes += [(1, 1, 1, kind.positions)] if kind.mask else []
        made: list[Tensor | None] = [torch.randn(shape, device=target.device, dtype=dtype) for shape in shapes]
        return made if kind.mask else [*made, None]

    def call(candidate: Candidate, values: Sequence[Any]) -> Callable[[], Sequence[Tensor]]:
        query, key, value, mask = values
        if candidate.strategy != FALLBACK:
            return lambda: [FEW_QUERIES(query, key, value, mask, scale)]
        if mask is not None:
            mask = mask[0, 0] if kind.mask == 2 else mask.expand(kind.heads, 1, kind.queries, kind.positions)
        return _library_call(node.target, query, key, value, mask)

    return Trial("attention", make, call, lambda *values: [_eager(*values, scale=scale)])


def _library_call(
    library: Any, query: Tensor, key: Tensor, values: Tensor, mask: Tensor | None
) -> Callable[[], Sequence[Tensor]]:
    names = [a.name for a in library._schema.arguments]
    given: dict[str, Any] = {"query": query, "key": key, "value": values}
    if "compute_log_sumexp" in names:
        given["compute_log_sumexp"] = False
    for name in MASKS:
        if name in names:
            given[name] = mask
    return lambda: library(**given)[:1]


def _replace(node: fx.Node) -> bool:
    given = given_to(node)
    query = given["query"]
    mask = _mask(given)
    scale = given.get("scale") or query.meta["val"].shape[-1] ** -0.5
    with node.graph.inserting_before(node):
        if mask is not None and mask.meta["val"].dim() == 2:
            mask = call(node, aten.reshape.default, mask, [1, 1, 1, -1])
        made = call(node, FEW_QUERIES, query, given["key"], given["value"], mask, scale)
    take_over(node, made)
    return True


STREAMED = Alternative(
    "attention of few queries", "attention goes to the library", kind_of, trial, _replace, on_reference=True
)
"""Our kernel, in graphs behind ``share_keys``."""
