"""States of a recurrent model, rows that each call replaces: read a row at a time, and all written by one launch.

AOTAutograd leaves a copy into each state at the end of the graph. Behind kernels of ours each would be a launch.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from tilestream.graph.live import storage
from tilestream.graph.nodes import argument, aten, packet, tensor_of
from tilestream.graph.own import operator as own_operator
from tilestream.graph.rewrites.insert import call, cast
from tilestream.graph.rewrites.settings import Settings


def write_states(states: list[Tensor], values: list[Tensor]) -> None:
    """Write ``values`` into ``states``, whose rows they are in this order."""
    rows = [row for state in states for row in state.view(-1, state.shape[-1])]
    torch._foreach_copy_(rows, [v.flatten() for v in values])  # pyright: ignore[reportPrivateImportUsage]


WRITE_STATES = own_operator(write_states, lambda states, values: None, writes=("states",))


def write_together(graph: fx.Graph, _: Settings) -> int:
    """One operator for all copies of single rows into arguments, which are read a row at a time."""
    copies = {n: rows for n in graph.nodes if (rows := _rows_written(n))}
    if not copies:
        return 0
    states: list[Any] = [copy.args[0] for copy in copies]
    for node in list(graph.nodes):
        _read_a_row(node, states)
    with graph.inserting_before(graph.output_node()):  # what reads states as they were comes before
        values = [cast(row, row, tensor_of(copy.args[0]).dtype) for copy, rows in copies.items() for row in rows]
        call([*copies][-1], WRITE_STATES, states, values)
    for state, copy in zip(states, copies, strict=True):
        made: Any = copy.args[1]
        graph.erase_node(copy)
        if packet(made) is aten.copy and made.args[0] is state:  # a state that may be read again behind its write
            with graph.inserting_before(made):
                row, kept = made.args[1], made.meta["val"]
                made.replace_all_uses_with(call(made, aten.view.default, cast(row, row, kept.dtype), list(kept.shape)))
    return len(copies)


def _rows_written(copy: Any) -> list[fx.Node]:
    """The rows that are all of a state behind ``copy``; none where it is no such copy. What shares an argument's memory
    is none: it may be a state that is written itself."""
    if copy.target is not aten.copy_.default or copy.users or not isinstance(made := copy.args[1], fx.Node):
        return []
    state, kept = copy.args[0], tensor_of(copy.args[0])
    whole: Any = made.args[1] if packet(made) is aten.copy and made.args[0] is state else made
    joined = packet(whole) in (aten.cat, aten.stack) and argument(whole, 1, "dim", 0) == 0
    rows = list(whole.args[0]) if joined else [whole]
    width = kept.shape[-1] if kept.dim() and kept.is_floating_point() and kept.is_contiguous() else 0
    shapes = [tensor_of(row).shape for row in rows]
    single = width and all(shape and shape.numel() == shape[-1] == width for shape in shapes)
    own = state.op == "placeholder" and all(storage(row).op == "call_function" for row in rows)
    return rows if single and own and width * len(rows) == kept.numel() else []


def _read_a_row(node: fx.Node, states: list[Any]) -> None:
    """A row of a state that is cast as a whole, as a cast of that row."""
    given: Any = node.args
    if node.target is operator.getitem and packet(given[0]) is aten.unbind and argument(given[0], 1, "dim", 0) == 0:
        source = given[0].args[0]
    elif node.target is aten.select.int and given[1] == 0:
        source = given[0]
    else:
        return
    is_cast = packet(source) is aten._to_copy
    state = source.args[0] if is_cast else source
    if state in states:
        with node.graph.inserting_before(node):
            row = call(node, aten.select.int, state, 0, given[-1])
            node.replace_all_uses_with(call(node, source.target, row, **source.kwargs) if is_cast else row)
