"""Which lists of edges may be kept from call to call: views of a graph's arguments that it does not change."""

from __future__ import annotations

from torch import fx

from tilestream.graph.nodes import is_view
from tilestream.graph.rewrites.each import each
from tilestream.graph.rewrites.operators import SEGMENTS
from tilestream.graph.rewrites.settings import Settings


def argument_of(index: fx.Node) -> fx.Node | None:
    """The argument of the graph that ``index`` is a view of, or is; None where it is computed, or changed in place."""
    while is_view(index) and isinstance(before := index.args[0], fx.Node):
        index = before
    written = any(getattr(user.target, "_schema", None) is not None and _writes(user, index) for user in index.users)
    return index if index.op == "placeholder" and not written else None


@each(SEGMENTS.overloadpacket)
def keep_lists(node: fx.Node, _: Settings) -> fx.Node | None:
    """Let sorts of arguments be kept. ``run.kept_lists`` decides in each call."""
    index, nodes = node.args[:2]
    if not isinstance(index, fx.Node) or argument_of(index) is None:
        return None
    node.args = (index, nodes, True, *node.args[3:])
    return node


def _writes(user: fx.Node, argument: fx.Node) -> bool:
    given = zip(user.target._schema.arguments, user.args, strict=False)  # pyright: ignore
    return any(x is argument and a.alias_info is not None and a.alias_info.is_write for a, x in given)
