"""What a rewrite must leave: a graph of which every new node has the value that it computes."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from tilestream.graph.nodes import ASSERTIONS, packet
from tilestream.graph.rewrites import table
from tilestream.graph.rewrites.insert import mode_of
from tilestream.graph.rewrites.table import Run
from tilestream.graph.sizes import same_shape

_held: weakref.WeakKeyDictionary[fx.Node, str] = weakref.WeakKeyDictionary()
_lint = table.check


def check(graph: fx.Graph, run: Run) -> None:
    """In the place of ``table.check``: besides, each node that a rewrite made or changed says what it computes."""
    _lint(graph, run)
    for node in graph.nodes:
        call = f"{node.target} {node.args} {node.kwargs}"
        if node.op != "call_function" or "tensor_meta" in node.meta or _held.get(node) == call:
            continue
        if packet(node) in ASSERTIONS or not all("val" in n.meta for n in node.all_input_nodes):
            continue  # made by torch, for values that are no tensors
        assert "val" in node.meta, f"{run.__name__}: {node.format_node()} has no value"
        fakes: Any = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with mode_of(n.meta["val"] for n in node.all_input_nodes) or contextlib.nullcontext():
            made = node.target(*fakes[0], **fakes[1])  # pyright: ignore[reportCallIssue]
        said = node.meta["val"]
        if isinstance(made, torch.Tensor):
            assert same_shape(made, said) and made.dtype == said.dtype, (
                f"{run.__name__}: {node.format_node()} is {made}"
            )
        _held[node] = call
