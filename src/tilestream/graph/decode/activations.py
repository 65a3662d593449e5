"""Activations of feed-forward blocks, as operators or written out."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from tilestream.graph.decode.reading import either, only, peeled
from tilestream.graph.nodes import Unsupported, packet

aten = torch.ops.aten


def activation_of(node: Any) -> tuple[str, fx.Node]:
    """Which one of ``form.ACTIVATIONS`` a node is, and its input.

    Raises:
        Unsupported: it is none.
    """
    made = peeled(node)
    if packet(made) is aten.gelu:
        kind = "gelu_tanh" if made.kwargs.get("approximate", "none") == "tanh" else "gelu"
        return kind, only(made)
    if packet(made) in (aten.silu, aten.relu):
        return ("silu" if packet(made) is aten.silu else "relu"), only(made)
    is_square = packet(made) is aten.pow and made.args[1] == 2
    if is_square or (packet(made) is aten.mul and made.args[0] is made.args[1]):
        root = peeled(only(made))
        if packet(root) is aten.relu:
            return "relu_squared", only(root)
    return "gelu_tanh", _gelu(made)


def _gelu(made: fx.Node) -> fx.Node:
    """Input of a GELU by tanh, written out."""
    half, grown = either(made, lambda n: n.args[1:] == (0.5,))
    inner = _scaled(only(_scaled(grown, aten.add, 1.0)), aten.mul, math.sqrt(2 / math.pi))
    x, cubic = either(inner, lambda n: packet(n) is not aten.mul)
    cube = _scaled(cubic, aten.mul, 0.044715)
    is_gelu = packet(made) is aten.mul and packet(inner) is aten.add and packet(only(grown)) is aten.tanh
    if not is_gelu or _scaled(cube, aten.pow, 3.0) is not x or _scaled(half, aten.mul, 0.5) is not x:
        raise Unsupported("no activation that a step has", made)
    return x


def _scaled(node: fx.Node, of: Any, number: float) -> fx.Node:
    """Input of an operator of it and a number."""
    if packet(node) is not of or len(node.args) != 2 or node.args[1] != number or node.kwargs:
        raise Unsupported("no activation that a step has", node)
    return only(node)
