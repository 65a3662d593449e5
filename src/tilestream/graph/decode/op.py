"""The operator that a decode step becomes, and what it means on any device. ``run.decode`` has it as a kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tilestream.graph.own import operator
from tilestream.kernels.step.shape import names_of, shape_of


def layer_of(weights: Sequence[Tensor], layer: int, head_norms: bool) -> dict[str, Tensor]:
    """Its weights by name."""
    names = names_of(head_norms)
    return dict(zip(names, weights[layer * len(names) :], strict=False))


def steps(
    row: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, weights: list[Tensor], caches: list[Tensor],
    lengths: list[Tensor], scale: float, eps: float, head_eps: float,
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """The stages of a step one after the other, with what each hands over, in float32 or, of float64 operands, in that.

    Keys and values of the token are rounded as the cache has them, and written into it; lengths stay.
    """
    s = shape_of(row, cos, mask, weights, caches)
    kind = torch.float64 if row.dtype == torch.float64 else torch.float32
    x = row.reshape(-1).to(kind)
    turn = [t.reshape(-1).to(kind) for t in (cos, sin)]
    scores_added = torch.zeros((), dtype=kind, device=row.device) if mask is None else mask.reshape(-1).to(kind)

    def norm(v: Tensor, weight: Tensor, eps: float) -> Tensor:
        return v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps) * weight.to(kind)

    def rotated(v: Tensor) -> Tensor:
        low, high = v.chunk(2, -1)
        return v * turn[0] + torch.cat([-high, low], -1) * turn[1]

    for n in range(s.layers):
        w = layer_of(weights, n, s.head_norms)
        keys, values = caches[2 * n], caches[2 * n + 1]
        normed = norm(x, w["norm"], eps)
        q, k, v = ((w[name].to(kind) @ normed).view(-1, s.features) for name in ("query", "key", "value"))
        yield "projected", torch.cat([q, k, v])
        if s.head_norms:
            q, k = norm(q, w["query_norm"], head_eps), norm(k, w["key_norm"], head_eps)
        at = lengths[n].reshape(1)
        keys.index_copy_(2, at, rotated(k).to(keys.dtype).view(1, s.key_heads, 1, s.features))
        values.index_copy_(2, at, v.to(values.dtype).view(1, s.key_heads, 1, s.features))
        queries = rotated(q).view(s.key_heads, -1, s.features) * scale
        weighted = torch.softmax(queries @ keys[0].to(kind).mT + scores_added, -1)
        attended = (weighted @ values[0].to(kind)).reshape(-1)
        yield "attended", attended
        x = x + w["output"].to(kind) @ attended
        yield "middle", x
        normed = norm(x, w["middle_norm"], eps)
        gated = torch.nn.functional.silu(w["gate"].to(kind) @ normed) * (w["up"].to(kind) @ normed)
        yield "gated", gated
        x = x + w["down"].to(kind) @ gated
        yield "row", x
    yield "logits", (weights[-1].to(kind) @ norm(x, weights[-2], eps)).to(row.dtype)


def step(
    row: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, weights: list[Tensor], caches: list[Tensor],
    lengths: list[Tensor], counted: bool, scale: float, eps: float, head_eps: float,
) -> Tensor:  # fmt: skip
    """[1, vocabulary]: the logits of a token behind those that a static cache holds.

    Args:
        row: [1, 1, width], the token's embedding.
        cos, sin: [..., features], of its position.
        mask: [1, 1, 1, positions], added to scores.
        weights: of every layer those of ``WEIGHTS``, [outputs, inputs] and [features]; the last norm; the head.
        caches: of every layer keys and values [1, key heads, positions, features]; the token's are written.
        lengths: of every layer one int64, the token's place in the cache. counted: they grow by one.
        scale: of products of queries and keys.
        eps, head_eps: of norms of rows, and of heads.
    """
    *_, (_, logits) = steps(row, cos, sin, mask, weights, caches, lengths, scale, eps, head_eps)
    for length in lengths if counted else ():
        length += 1
    return logits.view(1, -1)


STEP = operator(
    "decode_step(Tensor row, Tensor cos, Tensor sin, Tensor? mask, Tensor[] weights, Tensor(a!)[] caches, "
    "Tensor(b!)[] lengths, bool counted, float scale, float eps, float head_eps) -> Tensor",
    step,
    lambda row, cos, sin, mask, weights, *_: row.new_empty((1, weights[-1].shape[0])),
)
