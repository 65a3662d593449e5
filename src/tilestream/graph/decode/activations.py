"""Activations of feed-forward blocks, as operators or written out."""

from __future__ import annotations

from typing import Any

from torch import fx

from tilestream.graph.decode.reading import only, peeled
from tilestream.graph.nodes import Unsupported, aten, packet
from tilestream.graph.written_gelu import written_gelu


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
    if (written := written_gelu(made)) is None:
        raise Unsupported("no activation that a step has", made)
    return "gelu_tanh", written[0]
