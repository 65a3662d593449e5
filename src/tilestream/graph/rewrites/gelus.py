"""GELU by tanh that a model writes out in eight operators, as GPT-2 of transformers does, as the one that it is."""

from __future__ import annotations

from torch import fx

from tilestream.graph.nodes import aten
from tilestream.graph.rewrites.each import each
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.written_gelu import written_gelu


@each(aten.mul)
def join_gelus(node: fx.Node, _: Settings) -> fx.Node | None:
    """Not where others read what is computed on the way, as a backward pass does. Rounded once, not eight times."""
    found = written_gelu(node)
    if found is None:
        return None
    x, inside = found
    if any(user not in inside for made in inside[1:] for user in made.users):
        return None
    return call(node, aten.gelu.default, x, approximate="tanh")
