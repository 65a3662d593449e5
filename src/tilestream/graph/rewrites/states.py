"""States of a recurrent model, rows that each call replaces: read a row at a time, and all written by one launch.

AOTAutograd leaves a copy into each state at the end of the graph. Behind kernels of ours each would be a launch.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from tilestream.graph.live import storage
from tilestream.graph.nodes import argument, packet, value
from tilestream.graph.own import operator as own_operator
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.settings import Settings

aten = torch.ops.aten


def written(states: list[Tensor], values: list[Tensor]) -> None:
    """Write ``values`` into ``states``, whose elements they are in this order."""
    places: list[Tensor] = []
    left = iter(values)
    for state in states:
        first, flat = 0, state.view(-1)
        while first < len(flat):
            made = next(left)
            places.append(flat[first : first + made.numel()].view(made.shape))
            first += made.numel()
    torch._foreach_copy_(places, values)  # pyright: ignore[reportPrivateImportUsage]


WRITE_STATES = own_operator(
    "write_states(Tensor(a!)[] states, Tensor[] values) -> ()", written, lambda states, values: None
)


def write_together(graph: fx.Graph, _: Settings) -> int:
    """One operator for all copies of single rows into arguments, which are read a row at a time."""
    copies = {n: rows for n in graph.nodes if (rows := _rows_written(n))}
    if not copies:
        return 0
    states: list[Any] = [copy.args[0] for copy in copies]
    single: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        _read_a_row(node, states, single)
    last = [*copies][-1]
    with graph.inserting_before(graph.output_node()):  # what reads states as they were comes before
        values = [_cast(row, copy.args[0]) for copy, parts in copies.items() for row in parts]
        call(last, WRITE_STATES, states, values)
    for copy, parts in copies.items():
        made: Any = copy.args[1]
        graph.erase_node(copy)
        if packet(made) is aten.copy and len(parts) == 1 and made.users:  # a state is read again behind its write
            with graph.inserting_before(made):
                shape = list(made.meta["val"].shape)
                made.replace_all_uses_with(call(made, aten.view.default, _cast(parts[0], made), shape))
    return len(copies)


def _rows_written(copy: fx.Node) -> list[fx.Node]:
    """The rows that are all of a state behind ``copy``; none where it is no such copy. What shares an argument's memory
    is none: it may be a state that is written itself."""
    if copy.target is not aten.copy_.default or copy.users:
        return []
    state, made = copy.args[:2]
    kept = value(state)
    if not isinstance(state, fx.Node) or state.op != "placeholder" or kept is None or not kept.is_contiguous():
        return []
    if not isinstance(made, fx.Node):
        return []
    whole: Any = made.args[1] if packet(made) is aten.copy and made.args[0] is state else made
    joined = packet(whole) in (aten.cat, aten.stack) and argument(whole, 1, "dim", 0) == 0
    rows = list(whole.args[0]) if joined else [whole]
    fakes = [value(row) for row in rows]
    width = kept.shape[-1] if kept.dim() and kept.is_floating_point() else 0
    single = all(f is not None and f.dim() and f.numel() == f.shape[-1] == width for f in fakes)
    single = single and all(storage(row).op == "call_function" for row in rows)
    return rows if single and width * len(rows) == kept.numel() else []


def _cast(row: fx.Node, state: Any) -> fx.Node:
    kept = state.meta["val"].dtype
    return row if row.meta["val"].dtype == kept else call(row, aten._to_copy.default, row, dtype=kept)


def _read_a_row(node: fx.Node, states: list[Any], rows: dict[Any, fx.Node]) -> None:
    """A row of a state that is cast as a whole, as a cast of that row, one for all who read it: those of ``rows``."""
    if node.target is operator.getitem and packet(node.args[0]) is aten.unbind:  # pyright: ignore[reportArgumentType]
        whole: Any = node.args[0]
        source, dim, index = whole.args[0], argument(whole, 1, "dim", 0), node.args[1]
    elif node.target is aten.select.int:
        source, dim, index = node.args
    else:
        return
    cast: Any = source if packet(source) is aten._to_copy else None  # pyright: ignore[reportArgumentType]
    state = cast.args[0] if cast is not None else source
    if state not in states or dim != 0:
        return
    key = (state, index, str(cast and cast.kwargs))
    if key not in rows:
        with node.graph.inserting_before(node):
            rows[key] = call(node, aten.select.int, state, 0, index)
            if cast is not None:
                rows[key] = call(node, cast.target, rows[key], **cast.kwargs)
    node.replace_all_uses_with(rows[key])
