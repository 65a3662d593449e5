"""GELU by tanh as models write it out, ``0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`` (Hendrycks and Gimpel
2016): of which node a node is that."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from tilestream.graph.nodes import aten, packet

INNER = (math.sqrt(2 / math.pi), 0.044715)
CLOSE = 1e-6
"""Numbers of models are rounded as float32 is."""


def written_gelu(made: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """What ``made`` is GELU by tanh of, and the nodes that compute it, the last first; None where it is none."""
    for half, grown in ((0, 1), (1, 0)):
        if packet(made) is aten.mul and len(made.args) == 2:
            found = _read(made, made.args[half], made.args[grown])
            if found is not None:
                return found
    return None


def _read(made: fx.Node, half: Any, grown: Any) -> tuple[fx.Node, list[fx.Node]] | None:
    x, tanh = _by(half, aten.mul, 0.5), _by(grown, aten.add, 1.0)
    inner = _by(tanh.args[0], aten.mul, INNER[0]) if tanh is not None and packet(tanh) is aten.tanh else None
    if x is None or tanh is None or inner is None or packet(inner) is not aten.add or len(inner.args) != 2:
        return None
    cubic = inner.args[1] if inner.args[0] is x else inner.args[0]
    cube = _by(cubic, aten.mul, INNER[1])
    if cube is None or x not in inner.args or _by(cube, aten.pow, 3.0) is not x:
        return None
    scaled: Any = tanh.args[0]
    return x, [made, half, grown, tanh, scaled, inner, cubic, cube]  # pyright: ignore[reportReturnType]


def _by(node: Any, of: Any, number: float) -> fx.Node | None:
    """Input of an operator of it and a number."""
    if not isinstance(node, fx.Node) or packet(node) is not of or len(node.args) != 2 or node.kwargs:
        return None
    given, by = node.args
    if not isinstance(given, fx.Node) or not isinstance(by, int | float) or abs(by - number) > CLOSE * number:
        return None
    return given
