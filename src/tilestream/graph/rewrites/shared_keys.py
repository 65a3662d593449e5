"""Queries that share keys and values as rows of one head, where one token of each sequence is decoded.

``scaled_dot_product_attention`` with a mask has kernels that want as many heads of keys as of queries, so models
repeat them: with 32 sequences, 256 positions and Llama-3.2-1B's heads 17 MB of keys and values become 67, written and
read again in every layer. With one token a sequence the queries that share a head are as good as rows of it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from tilestream.graph.nodes import aten, behind, tensor_of, value
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.settings import Runs, Settings

MASKS = ("attn_bias", "attn_mask")
IN_ORDER = (aten.clone.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default)
"""What leaves elements in their order."""
ALIGNED = 16
"""Positions in a row of a mask that is copied: kernels read it in vectors."""


def share_keys(graph: fx.Graph, settings: Settings) -> int:
    """Let every attention of one token a sequence read keys and values that are not repeated; how many do now.

    Each head of keys becomes a sequence of its own, whose tokens are the queries that share it; results are those of
    the same kernel. Left alone is what has other shapes, symbolic ones among them, a mask that differs by head, and
    what the library has no kernel for.
    """
    return sum(_share(graph, node, settings.runs) for node in list(graph.nodes) if is_attention(node))


def is_attention(node: fx.Node) -> bool:
    """Whether a node is a fused attention of which the result alone is used."""
    name = str(node.target)
    if not name.startswith("aten._scaled_dot_product_") or "backward" in name:
        return False
    return all(user.target is operator.getitem and (user.args[1] == 0 or not user.users) for user in node.users)


def _share(graph: fx.Graph, node: fx.Node, runs: Runs | None) -> bool:
    given = given_to(node)
    query, key, values = given["query"], _unrepeated(given["key"]), _unrepeated(given["value"])
    shape = value(query).shape  # pyright: ignore[reportOptionalMemberAccess]
    if key is None or values is None or given.get("is_causal") or len(shape) != 4 or shape[2] != 1:
        return False
    batch, heads, _, features = shape
    (_, groups, positions, _), (_, others, _, width) = (value(x).shape for x in (key, values))  # pyright: ignore
    sizes = (batch, heads, features, groups, positions, width)
    if groups != others or groups == heads or not all(isinstance(n, int) for n in sizes):
        return False
    rows = heads // groups
    name = next((n for n in MASKS if given.get(n) is not None), None)
    if name is not None and not _is_for_all_heads(given[name], batch):
        return False
    before = node.prev
    with graph.inserting_before(node):
        given["query"] = call(node, aten.reshape.default, query, [batch * groups, 1, rows, features])
        given["key"] = call(node, aten.reshape.default, key, [batch * groups, 1, positions, features])
        given["value"] = call(node, aten.reshape.default, values, [batch * groups, 1, positions, width])
        if name is not None:
            given[name] = _mask(node, given[name], batch, groups, rows)
        in_order = [a.name for a in node.target._schema.arguments if not a.kwarg_only]  # pyright: ignore
        arguments = [given.pop(n) for n in in_order if n in given]
        held: Any = map_arg((arguments, given), lambda n: n.meta["val"])
        if runs is not None and not runs(node.target, *held):
            while node.prev is not before:
                graph.erase_node(node.prev)
            return False
        attention = call(node, node.target, *arguments, **given)
        result = call(node, operator.getitem, attention, 0)
        back = call(node, aten.reshape.default, result, [batch, heads, 1, width])
    take_over(node, back)
    return True


def given_to(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call, by name."""
    names = [a.name for a in node.target._schema.arguments]  # pyright: ignore
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def mask_given(given: Mapping[str, Any]) -> fx.Node | None:
    """The mask among an attention's arguments (``given_to``), under whatever name; None where it has none."""
    return next((given[name] for name in MASKS if given.get(name) is not None), None)


def scale_of(node: fx.Node) -> float:
    """What an attention multiplies its scores by."""
    given = given_to(node)
    return given.get("scale") or given["query"].meta["val"].shape[-1] ** -0.5


def operands_of(node: fx.Node) -> list[fx.Node]:
    """An attention's query, key and value."""
    given = given_to(node)
    return [given[name] for name in ("query", "key", "value")]


def _unrepeated(repeated: fx.Node) -> fx.Node | None:
    """Keys or values ``[B, groups, S, F]``, if ``repeated`` ``[B, heads, S, F]`` has each of their heads several times,
    one behind the other."""
    node, seen = behind(repeated, lambda n: n.target in IN_ORDER), value(repeated)
    if node.target is not aten.expand.default or seen is None:
        return None
    (before,) = node.all_input_nodes[:1]
    wide = value(node)
    if before.target is not aten.unsqueeze.default or before.args[1] not in (2, -3) or wide is None or wide.dim() != 5:
        return None
    batch, groups, times, *rest = wide.shape
    single = before.all_input_nodes[0]
    kept = value(single)
    is_repeat = list(seen.shape) == [batch, groups * times, *rest]
    return single if is_repeat and kept is not None and list(kept.shape) == [batch, groups, *rest] else None


def _is_for_all_heads(mask: fx.Node, batch: int) -> bool:
    """Whether every head and every query of a sequence has the same row of the mask."""
    fake = value(mask)
    if fake is None or not all(isinstance(n, int) for n in fake.shape):
        return False
    if fake.dim() == 2:
        return fake.shape[0] == 1
    same = fake.dim() == 4 and fake.shape[2] == 1 and (fake.shape[1] == 1 or fake.stride(1) == 0)
    return same and (_is_for_all_sequences(fake) or (fake.shape[0] == batch and fake.shape[3] % ALIGNED == 0))


def _is_for_all_sequences(mask: torch.Tensor) -> bool:
    return mask.shape[0] == 1 or mask.stride(0) == 0


def _mask(node: fx.Node, mask: fx.Node, batch: int, groups: int, rows: int) -> fx.Node:
    """``mask`` for the queries as rows: ``[batch * groups, 1, rows, S]``; one of two dimensions serves as it is."""
    fake = tensor_of(mask)
    if fake.dim() == 2:
        return mask
    positions = fake.shape[3]
    one = call(node, aten.slice.Tensor, mask, 1, 0, 1)
    if _is_for_all_sequences(fake):
        one = call(node, aten.slice.Tensor, one, 0, 0, 1)
    else:
        each = call(node, aten.expand.default, one, [batch, groups, 1, positions])
        one = call(node, aten.reshape.default, each, [batch * groups, 1, 1, positions])
    return call(node, aten.expand.default, one, [batch * groups, 1, rows, positions])


def take_over(attention: fx.Node, result: fx.Node) -> None:
    """Put ``result`` in the place of what an attention returns first; nobody uses the rest."""
    for user in list(attention.users):
        if user.users:
            result.meta = dict(user.meta)
            user.replace_all_uses_with(result)
        attention.graph.erase_node(user)
    attention.graph.erase_node(attention)  # some are random to torch, and never dead
