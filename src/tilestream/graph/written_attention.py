"""Attention that a model writes out: a product, a bias, softmax, another product; found, and said as a fused kernel.

timm's Swin and many models of transformers write theirs so, and PyTorch does where no fused kernel takes a mask, with
products of float32. Their copies of queries, keys and values, which batched products want, and their weights, which are
as large as heads times queries times keys, are then never in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from tilestream.graph.attention_masks import FARTHEST
from tilestream.graph.nodes import aten, behind, packet, value
from tilestream.graph.rewrites.insert import call
from tilestream.graph.short_attention import SHORT

IN_ORDER = {aten.clone, aten.view, aten._unsafe_view, aten.reshape, aten.alias, aten.detach, aten.expand}
"""What leaves elements in their order, if it leaves as many."""
TURNS = {aten.transpose, aten.permute}
MEANT = -1e4
"""A score is not kept where it is replaced by less. Assumed: scores are thousands of times smaller."""


@dataclass(frozen=True)
class Step:
    """Between the first product and softmax: ``view`` as a shape, ``scale`` by a number, ``add`` or ``fill`` with
    ``other``, which is a bias, or says where scores are dropped."""

    kind: str
    node: fx.Node
    other: Any = None


@dataclass(frozen=True)
class Written:
    """An attention that is written out: bf16 queries ``[B, H, Q, F]``, ``keys`` ``[B, H, F, K]`` and values.

    Attributes:
        last: the second product, whose results are looked at as ``results`` ``[B, H, Q, F]``.
        key_rows: ``keys`` are ``[B, H, K, F]``.
        scale: of queries and keys; ``steps``: the rest, in their order.
        is_safe: softmax makes zeros of a row of minus infinity, as PyTorch's attention does.
    """

    last: fx.Node
    results: tuple[fx.Node, ...]
    query: fx.Node
    keys: fx.Node
    key_rows: bool
    values: fx.Node
    scale: float
    steps: tuple[Step, ...]
    is_safe: bool

    @property
    def sizes(self) -> list[int]:
        """Batches, heads, queries and keys."""
        return [*shape_of(self.query)[:3], shape_of(self.keys)[2 if self.key_rows else 3]]

    @property
    def leaves(self) -> list[fx.Node]:
        """What it reads: queries, keys, values, biases and masks."""
        return list(dict.fromkeys([self.query, self.keys, self.values, *(s.other for s in self.steps if _is_node(s))]))

    @property
    def is_plain(self) -> bool:
        """Whether nothing is added to scores."""
        return not any(_is_node(s) for s in self.steps)


def _is_node(step: Step) -> bool:
    return isinstance(step.other, fx.Node)


def written_at(last: fx.Node) -> Written | None:
    """The attention whose second product is ``last``, if it is one."""
    if last.target is not aten.bmm.default:
        return None
    weights, softmax = last.args[0], _behind(last.args[0], aten._softmax, aten._safe_softmax)
    if softmax is None or not isinstance(weights, fx.Node) or not is_known(softmax) or not is_known(last):
        return None
    shape = shape_of(softmax)
    if len(shape) != 4 or softmax.args[1] not in (-1, 3):
        return None
    steps: list[Step] = []
    first = _first_product(softmax.args[0], math.prod(shape), steps)
    if first is None or not is_known(first):
        return None
    batch, heads, queries, keys = shape
    features = shape_of(last)[-1]
    found = (
        source(first.args[0], [batch, heads, queries, features]),
        source(first.args[1], [batch, heads, features, keys]),
        source(last.args[1], [batch, heads, keys, features]),
    )
    results = tuple(last.users)
    if any(n is None for n in found) or not results:
        return None
    if any(packet(u) not in IN_ORDER or shape_of(u) != [*shape[:3], features] for u in results):
        return None
    (query, by_query), (turned, by_key), (values, by_value) = (_unscaled(n) for n in found)  # pyright: ignore
    key_rows = turned.target is aten.transpose.int and set(turned.args[1:]) in ({-2, -1}, {2, 3})
    key = narrow(turned.args[0] if key_rows else turned)  # pyright: ignore
    if value(last).dtype is torch.float32:  # pyright: ignore
        results = tuple(u for r in results for u in r.users)
        if not all(packet(u) is aten._to_copy for u in results):
            return None
    leaves = (query, key, values)
    if by_value != 1 or any(value(n).dtype is not torch.bfloat16 for n in (*leaves, *results)):  # pyright: ignore
        return None
    is_safe = packet(softmax) is aten._safe_softmax
    return Written(last, results, query, key, key_rows, values, by_query * by_key, tuple(reversed(steps)), is_safe)


def _first_product(node: Any, size: int, steps: list[Step]) -> fx.Node | None:
    """The product that scores come from; ``steps`` gets what is done to them, the last first."""
    while isinstance(node, fx.Node) and len(node.users) == 1:
        op, number = packet(node), factor_of(node)
        if node.target is aten.bmm.default:
            return node
        if op in IN_ORDER and _keeps_size(node):
            steps.append(Step("view", node))
        elif op is aten._to_copy and value(node).dtype is torch.float32:  # pyright: ignore
            pass
        elif number is not None:
            steps.append(Step("scale", node, number))
        elif node.target is aten.masked_fill.Scalar and float(node.args[2]) <= MEANT:  # pyright: ignore
            steps.append(Step("fill", node, node.args[1]))
        elif node.target is aten.add.Tensor and not node.kwargs:
            sides: list[Any] = list(node.args)
            whole = [s for s in sides if size_of(s) == size and _behind(s, aten.bmm, through=True) is not None]
            if len(whole) != 1:
                return None
            (bias,) = [s for s in sides if s is not whole[0]] or [None]
            if value(bias) is None or value(bias).dtype is not torch.bfloat16:  # pyright: ignore
                return None
            steps.append(Step("add", node, bias))
            node = whole[0]
            continue
        else:
            return None
        node = node.args[0]
    return None


def _behind(node: Any, *ops: Any, through: bool = False) -> fx.Node | None:
    """The nearest of ``ops`` behind views, copies and conversions, each with one reader; ``through`` sums and factors
    as well."""
    while isinstance(node, fx.Node) and len(node.users) == 1:
        if packet(node) in ops:
            return node
        passes = (packet(node) in IN_ORDER and _keeps_size(node)) or packet(node) is aten._to_copy
        if not passes and not (
            through and (factor_of(node) is not None or packet(node) in (aten.add, aten.masked_fill))
        ):
            return None
        node = node.args[0]
    return None


def source(node: Any, shape: list[int]) -> fx.Node | None:
    """The earliest node with the elements of ``node`` in this shape."""
    best = None
    while isinstance(node, fx.Node) and value(node) is not None:
        best = node if shape_of(node) == shape else best
        if packet(node) not in IN_ORDER or not _keeps_size(node):
            break
        node = node.args[0]
    return best


def _unscaled(node: fx.Node) -> tuple[fx.Node, float]:
    """A node without the factor that it has, and before it was made float32; and that factor."""
    number = factor_of(node)
    return (narrow(node), 1.0) if number is None else (narrow(node.args[0]), number)  # pyright: ignore


def narrow(node: fx.Node) -> fx.Node:
    """What was made float32 of bf16."""
    before = node.args[0] if packet(node) is aten._to_copy else None
    return before if isinstance(before, fx.Node) and value(before).dtype is torch.bfloat16 else node  # pyright: ignore


def factor_of(node: fx.Node) -> float | None:
    """The number that a node multiplies by, if it does."""
    if packet(node) not in (aten.mul, aten.div) or node.kwargs or len(node.args) != 2:
        return None
    number = node.args[1]
    if not isinstance(node.args[0], fx.Node) or not isinstance(number, int | float) or not number > 0:
        return None
    return float(number) if packet(node) is aten.mul else 1.0 / float(number)


def shape_of(node: fx.Node) -> list[int]:
    fake = value(node)
    return [] if fake is None else list(fake.shape)


def size_of(node: Any) -> int:
    fake = value(node)
    return 0 if fake is None or not all(isinstance(n, int) for n in fake.shape) else fake.numel()


def is_known(node: fx.Node) -> bool:
    fake = value(node)
    return fake is not None and all(isinstance(n, int) for n in (*fake.shape, *fake.stride()))


def _keeps_size(node: fx.Node) -> bool:
    return size_of(node) == size_of(node.args[0]) > 0


def described(gm: fx.GraphModule) -> list[Any]:
    """What a graph computes, whatever its nodes are called, as JSON has it."""
    places = {node: f"%{k}" for k, node in enumerate(gm.graph.nodes)}
    return [[str(n.target), str(map_arg((n.args, n.kwargs), places.__getitem__))] for n in gm.graph.nodes
            if n.op == "call_function"]  # fmt: skip


def short(site: Written, *operands: fx.Node) -> fx.Node:
    """Our operator of queries, keys and values, for an attention whose ``terms`` are found."""
    found = terms(site)
    assert found is not None, "only offered where it is found"
    each = [term(site, *one) for one in found[0]]
    return call(site.last, SHORT, *operands, each, found[1], site.is_safe)


def fuse(site: Written, attend: Callable[[fx.Node, fx.Node, fx.Node], fx.Node]) -> fx.Node:
    """Put a kernel in the place of an attention that is written out; its result.

    Args:
        attend: adds its nodes, and returns the result; of queries, keys and values.
    """
    last = site.last
    with last.graph.inserting_before(last):
        key = site.keys if site.key_rows else call(last, aten.transpose.int, site.keys, -2, -1)
        result = attend(site.query, key, site.values)
    for before in site.results:
        _take_over(before, result)
    return result


def _take_over(before: fx.Node, result: fx.Node) -> None:
    """``result`` in the place of ``before``; copied where someone looks at it as it lay."""
    turns = list(before.users)
    if result.meta["val"].stride() != before.meta["val"].stride():
        if not all(packet(t) in TURNS and all(map(_copies, t.users)) for t in turns):
            with before.graph.inserting_before(before):
                result = call(before, aten.clone.default, result, memory_format=torch.contiguous_format)
            turns = []
        for turn in turns:
            with turn.graph.inserting_before(turn):
                turn.replace_all_uses_with(call(turn, turn.target, result, *turn.args[1:]))
            turn.graph.erase_node(turn)
    before.replace_all_uses_with(result)
    before.graph.erase_node(before)


def _copies(node: fx.Node) -> bool:
    """Whether its result is contiguous, wherever its operand lies."""
    if packet(node) is aten.clone:
        return node.kwargs.get("memory_format") is torch.contiguous_format
    return packet(node) is aten.reshape


def added(site: Written) -> tuple[fx.Node | None, float]:
    """What is added to scores, as ``[B or 1, H or 1, Q or 1, K]``, and the scale of those; of steps in their order."""
    last, scale, total = site.last, site.scale, None

    def do(op: Any, *args: Any) -> fx.Node:
        return call(last, op, *args)

    shape: list[int] = []
    for step in site.steps:
        if step.kind == "view":
            wanted = shape_of(step.node)
            total = None if total is None else _viewed(total, shape, wanted, site.is_safe, do)
            shape = wanted
        elif step.kind == "scale":
            scale *= step.other
            total = None if total is None else do(aten.mul.Tensor, total, step.other)
        else:
            other = step.other if step.kind == "add" else _far(step, do)
            total = other if total is None else do(aten.add.Tensor, total, other)
            shape = shape_of(step.node)
    if total is None:
        return None, scale
    missing = 4 - len(shape_of(total))
    return do(aten.reshape.default, _finite(total, site.is_safe, do), [*[1] * missing, *shape_of(total)]), scale


def terms(site: Written) -> tuple[list[tuple[Step, float, list[int]]], float] | None:
    """Each that is added to scores, its factor, and its shape ``[period or 1, H or 1, Q or 1, K or 1]``: sequence ``b``
    has that of ``b % period``; and the scale of scores. None where one has no such shape."""
    made: list[tuple[Step, float, list[int]]] = []
    scale, shape = site.scale, list[int]()
    for step in site.steps:
        if step.kind == "view":
            wanted = shape_of(step.node)
            shapes = [_as_period(own, shape, wanted) for *_, own in made]
            if any(own is None for own in shapes):
                return None
            made = [(s, f, own) for (s, f, _), own in zip(made, shapes, strict=True) if own is not None]
            shape = wanted
        elif step.kind == "scale":
            scale *= step.other
            made = [(s, f * step.other, own) for s, f, own in made]
        else:
            step = replace(step, other=unexpanded(step.other))
            shape, own = shape_of(step.node), shape_of(step.other)
            made.append((step, 1.0, [1] * (len(shape) - len(own)) + own))
    periods = {own[0] for *_, own in made} - {1}
    return (made, scale) if len(periods) < 2 and all(len(own) == 4 for *_, own in made) else None


def unexpanded(node: fx.Node) -> fx.Node:
    """What has the same for fewer sequences, heads or queries."""
    return behind(node, lambda n: packet(n) in (aten.expand, aten.clone))


def _as_period(own: list[int], shape: list[int], wanted: list[int]) -> list[int] | None:
    """The shape of what is added to scores of ``shape``, for those looked at as ``wanted``: leading dimensions divide
    sequences or are put together, and of those together it is the same for each of the first."""
    alike = min(len(shape), len(wanted), 3)
    if len(own) != len(shape) or shape[-alike:] != wanted[-alike:]:
        return None
    first, rest = own[:-alike], own[-alike:]
    if all(n == 1 for n in first):
        return [1] * (len(wanted) - alike) + rest
    is_joined = len(wanted) == alike + 1 and len(first) == 2 and first[0] == 1
    return [first[1], *rest] if is_joined else None


def term(site: Written, step: Step, factor: float, shape: list[int]) -> fx.Node:
    """What ``terms`` found, as a node."""
    last = site.last
    made = step.other if step.kind == "add" else _far(step, lambda op, *args: call(last, op, *args))
    made = made if factor == 1.0 else call(last, aten.mul.Tensor, made, factor)
    return made if shape_of(made) == shape else call(last, aten.reshape.default, made, shape)


def _far(step: Step, do: Callable[..., fx.Node]) -> fx.Node:
    """Zero, and where a mask is true minus infinity or what stands for it."""
    mask, filled = step.other, float(step.node.args[2])  # pyright: ignore
    given = {"dtype": torch.bfloat16, "device": value(mask).device}  # pyright: ignore
    far = filled if math.isinf(filled) else FARTHEST
    return do(aten.where.self, mask, *(call(mask, aten.scalar_tensor.default, x, **given) for x in (far, 0.0)))


def _finite(total: fx.Node, is_safe: bool, do: Callable[..., fx.Node]) -> fx.Node:
    """Without infinities, of which libraries make zeros; but a row that is nothing else becomes no number, as softmax
    has it, or stays so."""
    empty = float("-inf" if is_safe else "nan")
    none = do(aten.eq.Scalar, do(aten.amax.default, total, [-1], True), float("-inf"))
    return do(aten.masked_fill.Scalar, do(aten.clamp_min.default, total, FARTHEST), none, empty)


def _viewed(total: fx.Node, shape: list[int], wanted: list[int], is_safe: bool, do: Callable[..., fx.Node]) -> fx.Node:
    """What is added to scores of a shape, for those looked at as another one."""
    own = [1] * (len(shape) - len(shape_of(total))) + shape_of(total)
    alike = 0
    while alike < min(len(shape), len(wanted)) and shape[-1 - alike] == wanted[-1 - alike]:
        alike += 1
    if all(n == 1 for n in own[: len(own) - alike]):
        return do(aten.reshape.default, total, [1] * (len(wanted) - alike) + own[len(own) - alike :])
    whole = do(aten.expand.default, _finite(do(aten.reshape.default, total, own), is_safe, do), shape)
    return do(aten.reshape.default, whole, wanted)


def reads_rows(site: Written) -> bool:
    """Whether features lie next to each other, as kernels read them."""
    query, keys, values = (value(n) for n in (site.query, site.keys, site.values))
    made: list[Tensor] = [t for t in (query, keys, values) if t is not None]
    return made[0].stride(3) == 1 and made[1].stride(3 if site.key_rows else 2) == 1 and made[2].stride(3) == 1
