"""Attention in a joint graph, written out or a library's operator, with its gradients: found, and said as ours.

Written out, weights as large as heads times queries times keys are saved for the backward graph, and their gradients go
through memory twice.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isclose
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from tilestream.graph.lying import elsewhere, lie_alike
from tilestream.graph.masked.op import empty_result
from tilestream.graph.nodes import aten, packet, value
from tilestream.graph.rewrites.insert import call, cast
from tilestream.graph.rewrites.shared_keys import given_to, mask_given, operands_of, scale_of
from tilestream.graph.short_attention import GRADIENTS, SHORT
from tilestream.graph.written_attention import (
    IN_ORDER,
    TURNS,
    Written,
    factor_of,
    fuse,
    is_known,
    narrow,
    shape_of,
    short,
    size_of,
    source,
    terms,
    unexpanded,
    written_at,
)

CONTIGUOUS = torch.contiguous_format
TURNED = ((-2, -1), (-1, -2), (2, 3), (3, 2))


@dataclass(frozen=True)
class Trained:
    """An attention of a joint graph.

    Attributes:
        forward: as it is written out, or the operator that it is.
        read: queries [B, H, Q, F], keys and values [B, H, K, F]; keys may be turned.
        added: shapes [period or 1, H or 1, Q or 1, K or 1] of what is added to scores.
        gradient: of the result, [B, H, Q, F].
        ends: the gradients of queries, keys and values; that of keys is [B, H, F, K] if ``turned``.
        bias: the gradient [1, H, Q, K] or [H, Q, K] of what is added to the scores of all sequences, if it is wanted.
    """

    forward: Written | fx.Node
    read: tuple[fx.Node, fx.Node, fx.Node]
    added: tuple[tuple[int, ...], ...]
    scale: float
    gradient: fx.Node
    ends: tuple[fx.Node, fx.Node, fx.Node]
    turned: bool = False
    bias: fx.Node | None = None

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """All that somebody else reads, the forward graph's first."""
        site = self.forward
        made = site.results if isinstance(site, Written) else (_result(site),)
        return (*made, *self.ends, *([self.bias] if self.bias else []))

    @property
    def leaves(self) -> list[fx.Node]:
        """All that it reads."""
        site = self.forward
        more = site.leaves if isinstance(site, Written) else _masks(site)
        return list(dict.fromkeys([*self.read, *more, self.gradient]))

    @property
    def key_rows(self) -> bool:
        """Whether keys are [B, H, K, F], and not turned."""
        return not isinstance(self.forward, Written) or self.forward.key_rows

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Batches, heads, queries, keys and features."""
        batches, heads, queries, features = value(self.read[0]).shape  # pyright: ignore
        return batches, heads, queries, size_of(self.read[1]) // (batches * heads * features), features


def trained_attentions(owner: fx.GraphModule, results: Sequence[fx.Node]) -> list[Trained]:
    """All attentions of a joint graph whose gradients are wanted.

    Args:
        results: what its forward part returns.
    """
    found = [_library(node) for node in owner.graph.nodes]
    found += [_written(site) for site in _forward_sites(owner, results)]
    return [site for site in found if site is not None]


def _forward_sites(owner: fx.GraphModule, results: Sequence[fx.Node]) -> Iterator[Written]:
    """What is written out, as the forward part has it: nobody else there reads what lies in between."""
    if not any(packet(n) is aten._softmax_backward_data for n in owner.graph.nodes):
        return
    alone, places = fx.Graph(), dict[fx.Node, fx.Node]()
    alone.graph_copy(owner.graph, places)
    alone.output(tuple(places[n] for n in results))
    alone.eliminate_dead_code()
    back = {copy: node for node, copy in places.items()}
    for copy in alone.nodes:
        if (site := written_at(copy)) is not None:
            steps = tuple(replace(s, node=back[s.node], other=map_arg(s.other, back.__getitem__)) for s in site.steps)
            last, query, keys, values = (back[n] for n in (site.last, site.query, site.keys, site.values))
            made = tuple(back[n] for n in site.results)
            yield replace(site, last=last, results=made, query=query, keys=keys, values=values, steps=steps)


def _library(node: fx.Node) -> Trained | None:
    """An attention that is an operator."""
    name = str(node.target)
    if not name.startswith("aten._scaled_dot_product_") or "backward" in name:
        return None
    read, given = tuple(operands_of(node)), given_to(node)
    backward = [u for n in (node, *node.users) for u in n.users if f"{packet(node).__name__}_backward" in str(u.target)]
    if (
        len(read) != 3
        or len(set(backward)) != 1
        or not all(is_known(n) and len(shape_of(n)) == 4 for n in read)
        or _is_unlike(node, given)
    ):
        return None
    (made,) = set(backward)
    parts = {n.args[1]: n for n in made.users if n.target is operator.getitem}
    if set(parts) != {0, 1, 2} or not isinstance(made.args[0], fx.Node) or made.args[1:4] != read:
        return None
    whole, shapes = [*shape_of(read[0])[:3], shape_of(read[1])[2]], tuple(tuple(shape_of(n)) for n in _masks(node))
    if any(len(s) != 4 or any(n not in (1, full) for n, full in zip(s, whole, strict=True)) for s in shapes):
        return None
    return Trained(node, read, shapes, scale_of(node), made.args[0], (parts[0], parts[1], parts[2]))


def _result(node: fx.Node) -> fx.Node:
    """What a library's attention returns first."""
    return next(n for n in node.users if n.target is operator.getitem and n.args[1] == 0)


def _is_unlike(node: fx.Node, given: dict[str, Any]) -> bool:
    """Whether it does something else besides, its result lies by heads, or somebody reads more of it than that and
    what gradients want."""
    result = value(_result(node))
    if result is None or not lie_alike(result, empty_result(result, by_token=True)):
        return True
    read = [u for part in node.users if part.args[1] != 0 for u in part.users]
    return bool(given.get("is_causal") or given.get("dropout_p")) or any("backward" not in str(u.target) for u in read)


def _masks(node: fx.Node) -> list[fx.Node]:
    """What a library's attention adds to its scores, if it adds anything: once for what has the same."""
    mask = mask_given(given_to(node))
    once = None if mask is None else unexpanded(mask)
    return [once if len(shape_of(once)) == 4 else mask] if once is not None and mask is not None else []


def _written(site: Written) -> Trained | None:
    """An attention that is written out, if all that its gradients are is known."""
    weights, found = _behind(site.last.args[0], aten._softmax, aten._safe_softmax), terms(site)
    if weights is None or found is None:
        return None
    backward = [n for n in _readers(weights) if packet(n) is aten._softmax_backward_data]
    given = _behind(backward[0].args[0], aten.bmm) if len(backward) == 1 else None
    if given is None:
        return None
    shape, keys = shape_of(site.query), site.sizes[3]
    gradient = source(given.args[0], shape)
    by_value = [n for n in given.args[0].users if packet(n) is aten.bmm and n.args[1] is given.args[0]]  # pyright: ignore
    if gradient is None or len(by_value) != 1 or _reached(by_value[0].args[0], weights) != 1.0:
        return None
    by_value = _latest(by_value[0], [*shape[:2], keys, shape[3]], site.values)
    by_query = by_key = bias = None
    for reader, read, factor in _scores_readers(backward[0], 1.0):
        if packet(reader) is aten.bmm and reader.args[0] is read and (by := _reached(reader.args[1], site.keys)):
            by_query = _latest(reader, shape, site.query, factor * by, found[1])
        elif packet(reader) is aten.bmm and reader.args[1] is read and (by := _reached(reader.args[0], site.query)):
            by_key = _latest(reader, [*shape[:2], shape[3], keys], site.keys, factor * by, found[1])
        elif bias is None and _sums_sequences(reader, read, list(site.sizes)) and factor == 1.0:
            bias = reader
        else:
            return None
    if by_query is None or by_key is None or by_value is None or by_query[1] or by_value[1]:
        return None
    shared = sum(step.kind == "add" and own == [1, *site.sizes[1:]] for step, _, own in found[0])
    if bias is not None and (shared != 1 or any(f != 1.0 for _, f, _ in found[0])):
        return None
    added = tuple(tuple(own) for *_, own in found[0])
    read, gradient = (site.query, site.keys, site.values), narrow(gradient)
    ends = (by_query[0], by_key[0], by_value[0])
    return Trained(site, read, added, found[1], gradient, ends, not by_key[1], bias)


def put(site: Trained, each: int) -> None:
    """Our operators in the place of an attention and of its gradients; a CTA of those takes ``each`` sequences."""
    forward = site.forward
    if isinstance(forward, Written):
        ours = fuse(forward, partial(short, forward))
    else:
        with forward.graph.inserting_before(forward):
            ours = call(forward, SHORT, *site.read, _masks(forward), site.scale, True)
        _result(forward).replace_all_uses_with(ours)
    first = min(site.ends if site.bias is None else (*site.ends, site.bias))
    with first.graph.inserting_before(first):
        both = call(ours, GRADIENTS, site.gradient, *ours.args, site.bias is not None, each)
        firsts, lasts, sums = (call(ours, operator.getitem, both, k) for k in range(3))
        if len(shape_of(sums)) == len(shape_of(lasts)) + 1:  # of many queries, in parts
            lasts = cast(firsts, call(ours, aten.sum.dim_IntList, sums, [0]))
        _put_ends(site, [firsts] if site.sizes[2] == site.sizes[3] else [firsts, lasts])
        if site.bias is not None:
            whole = cast(site.bias, call(ours, aten.sum.dim_IntList, sums, [0]))
            site.bias.replace_all_uses_with(call(ours, aten.reshape.default, whole, shape_of(site.bias)))
    if isinstance(forward, fx.Node):
        _erase(forward)  # some are random to torch, and never dead


def _erase(node: fx.Node) -> None:
    """A node, and all that reads it."""
    for user in list(node.users):
        _erase(user)
    node.graph.erase_node(node)


def _put_ends(site: Trained, made: Sequence[fx.Node]) -> None:
    """Results of ``GRADIENTS`` in the place of gradients; where those are put together, as they lie."""
    rows = [call(n, aten.select.int, n, 2, k) for n in made for k in range(shape_of(n)[2])]
    own = [call(n, aten.transpose.int, n, 1, 2) for n in rows]
    ends = list(site.ends)
    if site.turned:
        for turn in [u for u in ends[1].users if u.target is aten.transpose.int and u.args[1:] in TURNED]:
            _stand_in(turn, own[1])
            ends[1] = own[1]
        if site.ends[1].users:
            _stand_in(site.ends[1], call(own[1], aten.transpose.int, own[1], -2, -1))
    together = {3: ends, 2: ends[1:]}[shape_of(made[-1])[2]]
    for stack in [u for u in together[-1].users if u.target is aten.stack.default]:
        if list(stack.args[0]) == together and stack.args[1:] in ((), (0,)):  # pyright: ignore[reportArgumentType]
            _stand_in(stack, call(own[0], aten.permute.default, made[-1], [2, 0, 3, 1, 4]))
            stack.graph.erase_node(stack)
    for end, mine in zip(ends, own, strict=True):
        if end is not mine and end.users:
            _stand_in(end, mine)


def _stand_in(before: fx.Node, own: fx.Node) -> None:
    """``own`` in the place of ``before``: as it lies, or copied where a view of it would be none."""
    values = elsewhere(before.graph, before, own.meta["val"])
    if values is None:
        lay: Any = value(before)
        by_token = lay.dim() == 4 and lie_alike(lay, empty_result(lay, by_token=True))
        order = [1, 2] if by_token else [0, 0]
        dense = call(own, aten.clone.default, call(own, aten.transpose.int, own, *order), memory_format=CONTIGUOUS)
        own = call(own, aten.transpose.int, dense, *order)
        values = elsewhere(before.graph, before, own.meta["val"]) or {}
    for node, val in values.items():
        node.meta["val"] = val
    before.replace_all_uses_with(own)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads a node, through views, copies and conversions."""
    for user in node.users:
        if _passes(user):
            yield from _readers(user)
        else:
            yield user


def _scores_readers(node: fx.Node, factor: float) -> Iterator[tuple[fx.Node, fx.Node, float]]:
    """Who reads gradients of scores, what they are then, and the product of the numbers they were multiplied by."""
    for user in node.users:
        number = factor_of(user)
        if _passes(user):
            yield from _scores_readers(user, factor)
        elif number is not None:
            yield from _scores_readers(user, factor * number)
        else:
            yield user, node, factor


def _behind(node: Any, *ops: Any) -> fx.Node | None:
    """The nearest of ``ops`` behind views, copies and conversions."""
    while isinstance(node, fx.Node) and packet(node) not in ops:
        node = node.args[0] if _passes(node) else None
    return node


def _passes(node: fx.Node) -> bool:
    """Whether it is a view, a copy or a conversion of all elements of its operand, in their order."""
    views = packet(node) in IN_ORDER and size_of(node) == size_of(node.args[0])
    return views or packet(node) is aten._to_copy


def _latest(
    node: fx.Node, shape: list[int], leaf: fx.Node, factor: float = 1.0, wanted: float = 1.0
) -> tuple[fx.Node, bool] | None:
    """What comes of a product [.., rows, columns] as the gradient of ``leaf``: through views, numbers, conversions and
    turns, in this shape, of the dtype of ``leaf`` and multiplied by the number that is wanted; whether it was turned.
    """
    turned = False
    while not _is_gradient(node, leaf, [*shape[:2], shape[3], shape[2]] if turned else shape) or not isclose(
        factor, wanted, rel_tol=1e-6
    ):
        user = next(iter(node.users)) if len(node.users) == 1 else node
        number, turns = factor_of(user), user.target is aten.transpose.int and user.args[1:] in TURNED
        if user is node or not (number is not None or turns or packet(user) in (*IN_ORDER, aten._to_copy)):
            return None
        node, factor, turned = user, factor * (number or 1.0), turned is not turns
    return node, turned


def _is_gradient(node: fx.Node, leaf: fx.Node, shape: list[int]) -> bool:
    return shape_of(node) == shape and value(node).dtype is value(leaf).dtype  # pyright: ignore[reportOptionalMemberAccess]


def _reached(node: Any, leaf: fx.Node) -> float | None:
    """By what ``node`` is ``leaf`` multiplied, if it is that, turned or not."""
    factor = 1.0
    while isinstance(node, fx.Node) and node is not leaf:
        number = factor_of(node)
        if number is None and packet(node) not in (*IN_ORDER, *TURNS, aten._to_copy):
            return None
        node, factor = node.args[0], factor * (number or 1.0)
    return factor if node is leaf else None


def _sums_sequences(node: fx.Node, read: fx.Node, sizes: list[int]) -> bool:
    return packet(node) is aten.sum and shape_of(read) == sizes and node.args[1] == [0]
