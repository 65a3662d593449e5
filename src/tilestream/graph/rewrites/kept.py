"""Which lists of edges may be kept from call to call: views of a graph's arguments that it does not change."""

from __future__ import annotations

from torch import fx

from tilestream.graph.live import storage
from tilestream.graph.nodes import is_ours
from tilestream.graph.rewrites.each import each
from tilestream.graph.rewrites.operators import COPIED, LENT, SEGMENTS, SORTED_INDEX
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.rewrites.shared_keys import given_to


def argument_of(index: fx.Node) -> fx.Node | None:
    """The argument of the graph that ``index`` is a view of, or is; None where it is computed, or changed in place."""
    index = storage(index)
    return index if index.op == "placeholder" and not is_written(index) else None


@each(SEGMENTS.overloadpacket)
def keep_lists(node: fx.Node, _: Settings) -> fx.Node | None:
    """Let sorts of arguments be kept, and what is picked in their order. ``run.kept_lists`` decides in each call."""
    index, nodes = node.args[:2]
    if not isinstance(index, fx.Node) or argument_of(index) is None:
        return None
    lends = all(map(_only_read, node.users))
    node.args = (index, nodes, LENT if lends else COPIED, *node.args[3:])
    for user in [user for part in node.users for user in part.users if lends and user.target is SORTED_INDEX]:
        index, order, rows, wraps = (*user.args, True)[:4]
        assert isinstance(index, fx.Node)
        if argument_of(index) is not None and _only_read(user):
            user.args = (index, order, rows, wraps, LENT)
    return node


def _only_read(node: fx.Node) -> bool:
    """Whether operators of ours alone read a tensor: they neither write there nor give out its memory, as a graph's
    results do."""
    return all(map(is_ours, node.users))


def _writes(user: fx.Node, node: fx.Node) -> bool:
    """Whether a call that writes some of its arguments writes this one."""
    given = given_to(user)
    arguments = user.target._schema.arguments  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
    written = [given.get(a.name) for a in arguments if a.alias_info and a.alias_info.is_write]
    return any(node is w or (isinstance(w, (list, tuple)) and node in w) for w in written)


def is_written(node: fx.Node) -> bool:
    """Whether the graph writes into this argument, or into a view of it."""
    for user in node.users:
        schema = getattr(user.target, "_schema", None)
        if schema is not None and schema.is_mutable and _writes(user, node):
            return True
        if schema is not None and any(r.alias_info is not None for r in schema.returns) and is_written(user):
            return True
    return False
