"""What each ATen operator is in tile ops: one rule an operator, and the reason where there is none."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from tilestream.graph.lowering import Emitter, Value, dtype_of
from tilestream.graph.nodes import MATMULS, Unsupported, aten, is_slice, keeps_features, packet
from tilestream.graph.operators import backward, elementwise, features, gathers  # noqa: F401
from tilestream.graph.operators.linear import put_off
from tilestream.graph.operators.reasons import reason
from tilestream.graph.operators.rules import ELEMENTWISE, RULES

__all__ = ["ELEMENTWISE", "RULES", "emit", "only_sliced"]


def emit(e: Emitter, node: fx.Node) -> Value:
    """Append the tile ops of ``node``, and record its value.

    A linear of which only slices are used is put off: each slice becomes a linear over its part
    of the weight.

    Raises:
        Unsupported: with the reason.
    """
    rule = RULES.get(packet(node))
    if rule is None:
        raise Unsupported(reason(node))
    e.start(node)
    if node.target is not operator.getitem and not isinstance(node.meta.get("val"), list | tuple):
        dtype_of(node)
    sliced = packet(node) in MATMULS and only_sliced(node, e.members)
    found = Value.of(put_off(e, node) if sliced else rule(e, node), _shape(node))
    e.values[node] = found
    return found


def _shape(node: fx.Node) -> Sequence[int | torch.SymInt]:
    """The shape of a node, of its first result where it has several."""
    fake = node.meta["val"]
    return (fake[0] if isinstance(fake, list | tuple) else fake).shape


def only_sliced(node: fx.Node, members: frozenset[fx.Node] | None) -> bool:
    """Whether every use of ``node`` (directly, or through views that keep the features) takes a slice of it."""
    return bool(node.users) and all(
        (members is None or user in members) and _slices(user, members) for user in node.users
    )


def _slices(user: fx.Node, members: frozenset[fx.Node] | None) -> bool:
    if packet(user) in (aten.view, aten._unsafe_view):
        return keeps_features(user) and only_sliced(user, members)
    return is_slice(user)
