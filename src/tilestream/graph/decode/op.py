"""The operator that a decode step becomes, and what it means on any device. ``run.decode`` has it as a kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tilestream.graph.own import activated, operator
from tilestream.kernels.step.form import Form
from tilestream.kernels.step.shape import Shape, shape_of


def layer_of(weights: Sequence[Tensor], layer: int, s: Shape) -> dict[str, Tensor]:
    """Its weights by name; those of products [outputs, inputs], each by itself."""
    names, form = s.form.weights, s.form
    found = dict(zip(names, weights[layer * len(names) :], strict=False))
    found = {name: w.mT if form.turned and w.dim() == 2 else w for name, w in found.items()}
    for kind in ("", "_bias") if form.qkv else ():
        if (rows := found.get("query" + kind)) is None:
            continue
        parts = [s.heads // s.key_heads, 1, 1] if form.qkv == "heads" else [s.heads, s.key_heads, s.key_heads]
        heads = rows.reshape(s.key_heads if form.qkv == "heads" else 1, -1, s.features, *rows.shape[1:])
        for name, part in zip(("query", "key", "value"), heads.split(parts, 1), strict=True):
            found[name + kind] = part.reshape(-1, *rows.shape[1:])
    if form.gate_up:
        found["gate"], found["up"] = found["gate"].chunk(2)
    return found


def steps(
    row: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Tensor | None, weights: list[Tensor],
    caches: list[Tensor], lengths: list[Tensor], form: str, scale: float, eps: float, head_eps: float, times: float,
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """The stages of a step one after the other, with what each hands over, in float32 or, of float64 operands, in that.

    Keys and values of the token are rounded as the cache has them, and written into it; lengths stay.
    """
    s = shape_of(row, mask, weights, caches, Form.of(form))
    kind = torch.float64 if row.dtype == torch.float64 else torch.float32
    x = row.reshape(s.batch, -1).to(kind)
    turn = [None if t is None else t.reshape(-1, 1, s.rotary).to(kind) for t in (cos, sin)]
    added = torch.zeros((), dtype=kind, device=row.device) if mask is None else mask.reshape(-1, 1, 1, s.positions)

    def norm(v: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
        if bias is not None:
            return torch.nn.functional.layer_norm(v, v.shape[-1:], weight.to(kind), bias.to(kind), eps)
        weight = weight.to(kind) + (s.form.norm == "rms_plus_one")
        return v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps) * weight

    def rotated(v: Tensor, layer: int) -> Tensor:
        if turn[0] is None or turn[1] is None or layer in s.form.no_rope:
            return v
        first, rest = v.split([s.rotary, s.features - s.rotary], -1)
        low, high = first.chunk(2, -1)
        return torch.cat([first * turn[0] + torch.cat([-high, low], -1) * turn[1], rest], -1)

    for n in range(s.layers):
        w = layer_of(weights, n, s)

        def product(name: str, v: Tensor, w: dict[str, Tensor] = w) -> Tensor:
            bias = w.get(f"{name}_bias")
            return torch.nn.functional.linear(v, w[name].to(kind), None if bias is None else bias.to(kind))

        keys, values = caches[2 * n], caches[2 * n + 1]
        normed = norm(x, w["norm"], eps, w.get("norm_bias"))
        projected = torch.cat([product(name, normed) for name in ("query", "key", "value")], -1)
        yield "projected", projected
        q, k, v = projected.view(s.batch, -1, s.features).split([s.heads, s.key_heads, s.key_heads], 1)
        if s.form.head_norms:
            q, k = norm(q, w["query_norm"], head_eps), norm(k, w["key_norm"], head_eps)
        at = lengths[n].reshape(1)
        keys.index_copy_(2, at, rotated(k, n).to(keys.dtype).unsqueeze(2))
        values.index_copy_(2, at, v.to(values.dtype).unsqueeze(2))
        queries = rotated(q, n).reshape(s.batch, s.key_heads, -1, s.features) * scale
        weighted = torch.softmax(queries @ keys.to(kind).mT + added.to(kind), -1)
        attended = (weighted @ values.to(kind)).reshape(s.batch, -1)
        yield "attended", attended
        given, x = x, x + times * product("output", attended)
        yield "middle", x
        normed = norm(given if s.form.parallel else x, w["middle_norm"], eps, w.get("middle_norm_bias"))
        gated = activated(s.form.activation, product("gate", normed))
        gated = gated * product("up", normed) if s.form.gated else gated
        yield "gated", gated
        x = x + times * product("down", gated)
        yield "row", x
    last = {name: w.to(kind) for name, w in zip(s.form.last, weights[-len(s.form.last) :], strict=True)}
    normed = norm(x, last["norm"], eps, last.get("norm_bias"))
    yield "logits", torch.nn.functional.linear(normed, last["head"], last.get("head_bias")).to(row.dtype)


def decode_step(
    row: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Tensor | None, weights: list[Tensor],
    caches: list[Tensor], lengths: list[Tensor], form: str, counted: bool, scale: float, eps: float, head_eps: float,
    times: float,
) -> Tensor:  # fmt: skip
    """[batch, vocabulary]: the logits of a token of each sequence behind those that a static cache holds.

    Args:
        row: [batch, 1, width], the tokens' embeddings.
        cos, sin: [batch or 1, ..., rotated features], of their positions; None: there is no rotary embedding.
        mask: [batch or 1, 1, 1, positions], added to scores.
        weights: of every layer those of ``Form.weights``, then those of ``Form.last``; sizes as ``sizes_of`` says.
        caches: of every layer keys and values [batch, key heads, positions, features]; the tokens' are written.
        lengths: of every layer one int64, the tokens' place in the cache. counted: they grow by one.
        form: the text of a ``Form``.
        scale: of products of queries and keys.
        eps, head_eps: of norms of rows, and of heads. times: of what blocks add to the residual.
    """
    *_, (_, logits) = steps(row, cos, sin, mask, weights, caches, lengths, form, scale, eps, head_eps, times)
    for length in lengths if counted else ():
        length += 1
    return logits


STEP = operator(
    decode_step,
    lambda row, cos, sin, mask, weights, *_: row.new_empty((row.shape[0], weights[-1].shape[0])),  # head or its bias
    "step:step",
    writes=("caches", "lengths"),
)
