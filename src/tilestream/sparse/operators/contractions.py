"""Products: matrix products of every kind, einsum, attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tilestream.errors import SparseError
from tilestream.sparse.operators.masks import masked
from tilestream.sparse.operators.normal import softmax
from tilestream.sparse.operators.registry import NoLowering, operator
from tilestream.sparse.operators.shapes import swap
from tilestream.sparse.recorder import Condition, Recorder, View
from tilestream.sparse.storage import compressed, from_torch


@operator("matmul", "mm", "bmm", "mv", "dot")
def _matmul(rec: Recorder, x: View, y: View, suffix: str = "") -> View:
    batch = "abcdefgh"[: max(len(x.shape), len(y.shape)) - 2] if max(len(x.shape), len(y.shape)) > 2 else ""
    left = [*batch[len(batch) - max(len(x.shape) - 2, 0) :], *(["i"] if len(x.shape) > 1 else []), "k"]
    right = [*batch[len(batch) - max(len(y.shape) - 2, 0) :], "k", *(["j"] if len(y.shape) > 1 else [])]
    result = [*batch, *(["i"] if len(x.shape) > 1 else []), *(["j"] if len(y.shape) > 1 else [])]
    return rec.contract([left, right], [x, y], result, suffix)


@operator("linear")
def _linear(rec: Recorder, x: View, weight: View, bias: View | None = None) -> View:
    batch = list("abcdefgh"[: len(x.shape) - 1]) if len(x.shape) > 2 else ["i"] * (len(x.shape) - 1)
    made = rec.contract([[*batch, "k"], ["j", "k"]], [x, weight], [*batch, "j"])
    return made if bias is None else _grouped(rec, "_bias", lambda: rec.binary("add", made, bias))


def _grouped(rec: Recorder, suffix: str, make: Callable[[], View]) -> View:
    """A part of an operator that is a region of its own when nothing is fused."""
    before = rec.at
    rec.at = before + suffix
    made = make()
    rec.at = before
    return made


@operator("addmm", "baddbmm", "addmv")
def _addmm(rec: Recorder, bias: View, x: View, y: View, beta: float = 1, alpha: float = 1) -> View:
    return _weighted(rec, bias, _matmul(rec, x, y), beta, alpha)


def _weighted(rec: Recorder, bias: View, made: View, beta: float, alpha: float) -> View:
    """``alpha made + beta bias``."""
    made = rec.unary("mul", made, "_alpha", float(alpha)) if alpha != 1 else made
    bias = rec.unary("mul", bias, "_beta", float(beta)) if beta != 1 else bias
    return _grouped(rec, "_bias", lambda: rec.binary("add", made, bias))


@operator("addbmm")
def _addbmm(rec: Recorder, bias: View, x: View, y: View, beta: float = 1, alpha: float = 1) -> View:
    made = rec.contract([["b", "i", "k"], ["b", "k", "j"]], [x, y], ["i", "j"])
    return _weighted(rec, bias, made, beta, alpha)


@operator("einsum")
def _einsum(rec: Recorder, equation: str, operands: Sequence[View], **_: Any) -> View:
    text = equation.replace(" ", "")
    left, arrow, result = text.partition("->")
    terms = left.split(",")
    if "." in text:
        text, operands = _spelled_out(rec, terms, arrow, result, operands)
        return _einsum(rec, text, operands)
    if any(len(set(t)) != len(t) for t in terms):
        raise NoLowering(f"einsum {equation!r} takes a diagonal", "take it before")
    if not arrow:
        joined = "".join(terms)
        result = "".join(sorted(c for c in set(joined) if joined.count(c) == 1))
    return rec.contract([list(t) for t in terms], operands, list(result))


def _spelled_out(
    rec: Recorder, terms: Sequence[str], arrow: str, result: str, operands: Sequence[View]
) -> tuple[str, list[View]]:
    """An einsum whose ellipsis has letters instead; dimensions of size 1 in it are broadcast."""
    free = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if not any(c in t for t in (*terms, result))]
    ranks = [len(x.shape) - len(t) + 3 if "." in t else 0 for t, x in zip(terms, operands, strict=True)]
    names = "".join(free[: max(ranks)])
    left = [t.replace("...", names[len(names) - n :]) for t, n in zip(terms, ranks, strict=True)]
    if not arrow:
        joined = "".join(t.replace("...", "") for t in terms)
        result = "..." + "".join(sorted(c for c in set(joined) if joined.count(c) == 1))
    return f"{','.join(left)}->{result.replace('...', names)}", list(operands)


def _in_groups(rec: Recorder, mask: View | Condition | None, groups: int, size: int) -> View | Condition | None:
    """A mask [..., heads or 1, queries, keys] with its heads in groups."""
    if isinstance(mask, Condition):
        made = _in_groups(rec, mask.view, groups, size)
        assert isinstance(made, View)
        return replace(mask, view=made)
    if mask is None or len(mask.shape) < 3:
        return mask
    heads = (1, 1) if mask.shape[-3] == 1 else (groups, size)
    return rec.reshape(mask, (*mask.shape[:-3], *heads, *mask.shape[-2:]))


@operator("scaled_dot_product_attention")
def _attention(
    rec: Recorder,
    q: View,
    k: View,
    v: View,
    mask: View | Condition | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> View:
    if enable_gqa and q.shape[-3] != k.shape[-3]:
        groups, size = k.shape[-3], q.shape[-3] // k.shape[-3]
        q = rec.reshape(q, (*q.shape[:-3], groups, size, *q.shape[-2:]))
        k, v = (rec.reshape(one, (*one.shape[:-2], 1, *one.shape[-2:])) for one in (k, v))
        made = _attention(rec, q, k, v, _in_groups(rec, mask, groups, size), dropout, causal, scale)
        return rec.reshape(made, (*made.shape[:-4], groups * size, *made.shape[-2:]))
    if dropout > 0:
        raise SparseError(f"attention with a dropout of {dropout:g}", "call .eval() on the module first")
    if causal:
        kept = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.float64).tril()
        name = rec.fresh(f"{rec.at}_causal")
        mask = Condition(rec.constant(name, from_torch(name, kept, compressed(2))), True)
    scores = _grouped(rec, "_scores", lambda: _matmul(rec, q, swap(k)))
    factor = scale if scale is not None else 1 / math.sqrt(q.shape[-1])
    scores = _grouped(rec, "_scale", lambda: rec.unary("mul", scores, "", factor))
    if isinstance(mask, Condition):
        scores = _grouped(rec, "_mask", lambda: masked(rec, scores, mask, -math.inf))
    elif mask is not None:
        scores = _grouped(rec, "_mask", lambda: rec.binary("add", scores, mask))
    weights = _grouped(rec, "_softmax", lambda: softmax(rec, scores, -1, safe=True))
    return _matmul(rec, weights, v)
