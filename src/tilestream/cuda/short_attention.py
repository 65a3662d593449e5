"""Attention over few keys and its gradients, launched (``kernels/operators/short_attention``, ``head_attention``,
``few_keys_gradients``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilestream.cuda import driver
from tilestream.cuda.beside import Address, LaneCall, LaneKernel, launch, readable
from tilestream.cuda.heads import LOG2_E, by_copies, heads_map
from tilestream.ir.dtypes import DTYPES
from tilestream.kernels.operators import few_keys_gradients, head_attention
from tilestream.kernels.operators.few_keys import MOST_TERMS, Attention
from tilestream.kernels.operators.short_attention import by_groups, grid_of, kernel
from tilestream.kernels.parts.tensor_maps import Encode

OPERANDS = ("query", "key", "value")


def attention(query: Tensor, key: Tensor, value: Tensor, added: Sequence[Tensor], scale: float, safe: bool) -> Tensor:
    """``graph.short_attention.SHORT`` by its kernel."""
    sms = torch.cuda.get_device_properties(query.device).multi_processor_count
    return launch(call(query, key, value, added, scale, safe, sms), query.device)[0].transpose(1, 2)


def call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: Sequence[Tensor],
    scale: float,
    safe: bool,
    sms: int,
    address: Address = Tensor.data_ptr,
    encode: Encode = driver.encoded,
) -> LaneCall:
    """The launch that makes ``attention`` [batches, queries, heads, features] on a device of so many SMs."""
    a, terms, values = _read(query, key, added, safe, address)
    out = query.new_empty(a.batches, a.queries, a.heads, a.features)
    values["scale"] = scale
    given = (query, key, value)
    if by_groups(a, sms):
        chosen, ctas, more, held = _by_groups(a, given, out, scale, sms, address, encode)
    else:
        chosen, ctas, more, held = _by_lanes(a, given, out, sms, address)
    return LaneCall(chosen, ctas if out.numel() else 0, values | more, [out], [*held, *terms])


def _read(
    query: Tensor, key: Tensor, added: Sequence[Tensor], safe: bool, address: Address
) -> tuple[Attention, list[Tensor], dict[str, Any]]:
    """The attention, what is added to its scores, and what of the argument says where that is."""
    batches, heads, queries, features = query.shape
    keys, size = key.shape[2], query.element_size()
    whole = [_rows(t, keys) for t in added]
    period = max([1, *(len(t) for t in whole)])
    terms = [t.expand(period, heads, queries, keys) for t in whole]
    paired = keys % 2 == 0 and not any(n % 2 for t in terms for n in (*t.stride()[:3], t.data_ptr() // size))
    shape = (batches, heads, queries, keys, features)
    a = Attention(*shape, DTYPES[query.dtype], period, len(terms), paired, safe)
    missing = MOST_TERMS - len(terms)
    strides = [size * n for t in terms for n in t.stride()[:3]]
    values = {"added": [*map(address, terms), *[0] * missing], "added_bytes": [*strides, *[0] * (3 * missing)]}
    return a, terms, values | {"heads": heads, "period": period}


def gradients(gradient: Tensor, *given: Any) -> Sequence[Tensor]:
    """``graph.short_attention.GRADIENTS`` by its kernel."""
    return tuple(launch(gradients_call(gradient, *given), gradient.device))


def gradients_call(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: Sequence[Tensor],
    scale: float,
    safe: bool,
    summed: bool,
    each: int,
    address: Address = Tensor.data_ptr,
) -> LaneCall:
    """The launch that makes ``gradients``."""
    a, terms, values = _read(query, key, added, safe, address)
    rows, size = [readable(t) for t in (query, key, value, gradient)], query.element_size()
    firsts, lasts, sums = few_keys_gradients.shapes(a, each, summed)
    out = [query.new_empty(firsts), query.new_empty(lasts), query.new_empty(sums, dtype=torch.float32)]
    to = [*out[0].unbind(2), *(out[1].unbind(2) if lasts[0] else ())]
    missing = [0] * (len(OPERANDS) - len(to))
    values |= {"from": [*map(address, rows)], "to": [*map(address, to), *missing]}
    values["to_row_bytes"] = [*(t.stride(1) * size for t in to), *missing]
    for k, name in enumerate(("batch_bytes", "head_bytes", "row_bytes")):
        values[name] = [t.stride(k) * size for t in rows]
    values |= {"sums": address(out[2]), "turns": a.turns, "each": each, "scale": scale}
    ctas = a.heads * few_keys_gradients.parts(a, each) * (a.batches if few_keys_gradients.is_long(a) else 1)
    return LaneCall(few_keys_gradients.kernel(a, each, summed), ctas, values, out, [*rows, *terms])


Made = tuple[LaneKernel, int, dict[str, Any], list[Tensor]]
"""The kernel, how many CTAs have work, what of its argument is its own, and what it reads."""


def _by_lanes(a: Attention, given: Sequence[Tensor], out: Tensor, sms: int, address: Address) -> Made:
    grid, rows, size = grid_of(a, sms), [readable(t) for t in given], out.element_size()
    values: dict[str, Any] = {name: address(t) for name, t in zip(OPERANDS, rows, strict=True)}
    for k, name in enumerate(("batch_bytes", "head_bytes", "row_bytes")):
        values[name] = [t.stride(k) * size for t in rows]
    values |= {"out": address(out), "turns": a.turns, "each": grid.each}
    return kernel(a, grid), grid.ctas(a), values, rows


def _by_groups(
    a: Attention, given: Sequence[Tensor], out: Tensor, scale: float, sms: int, address: Address, encode: Encode
) -> Made:
    held = [*map(by_copies, given), out.transpose(1, 2)]
    boxes = (head_attention.ROWS, *2 * (head_attention.box_rows(a),), head_attention.ROWS)
    maps = [encode(heads_map(t, rows, address)) for t, rows in zip(held, boxes, strict=True)]
    values: dict[str, Any] = {"batches": a.batches, **dict(zip((*OPERANDS, "out"), maps, strict=True))}
    values["scale"] = scale if a.terms else scale * LOG2_E
    return head_attention.kernel(a), min(head_attention.tiles(a), sms), values, held


def _rows(t: Tensor, keys: int) -> Tensor:
    """What is added, once if it is the same for all sequences, with keys next to each other: copied where they are
    not."""
    once = t if t.stride(0) else t[:1]
    is_so = t.shape[3] == keys and (t.stride(3) == 1 or keys == 1)
    return once if is_so else once.expand(*once.shape[:3], keys).contiguous()
