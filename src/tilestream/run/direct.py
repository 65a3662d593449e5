"""Graphs that are regions and views of their arguments, and nothing else: called without Inductor's wrapper.

Of the host's time of a call, that wrapper is the larger part where a model is one kernel. Torch's caches never hold
such a graph: a note on disk spares a second process the search, whose key is a hash of all of torch's source files.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tilestream.graph.capture import boxed
from tilestream.graph.nodes import is_sym, is_view
from tilestream.plan.cache import store_sealed
from tilestream.run.operator import REGION, region


def is_direct(graph: fx.GraphModule) -> bool:
    """Whether Inductor would have nothing to compile: regions, their parts, views, arithmetic on sizes."""
    return all(node.op in ("placeholder", "output") or _is_free(node) for node in graph.graph.nodes)


def _is_free(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    return node.target in (operator.getitem, REGION) or is_view(node) or is_sym(node)


def direct(graph: fx.GraphModule) -> Callable[..., Any]:
    """The graph as a boxed function that takes a list of arguments, which it empties."""
    for node in graph.graph.find_nodes(op="call_function", target=REGION):
        node.target = region
    graph.recompile()
    forward = graph.forward

    def call(arguments: list[Any]) -> Any:
        values = tuple(arguments)
        arguments.clear()
        return forward(*values)

    return boxed(call)


@dataclass(frozen=True)
class DirectNote:
    """Says of a graph that Dynamo captured that it was direct when it was last compiled. A wrong one costs time alone.

    ``path`` is None where nothing is kept on disk.
    """

    path: Path | None

    @cached_property
    def was_direct(self) -> bool:
        """Whether an earlier compilation left the note."""
        return self.path is not None and os.path.exists(self.path)  # False where the folder cannot be read

    def settle(self, is_direct: bool) -> None:
        """Leave the note or withdraw it, by what this compilation found."""
        if self.path is None or is_direct == self.was_direct:
            return
        if is_direct:
            store_sealed(self.path, {"direct": True})
        else:
            with contextlib.suppress(OSError):
                self.path.unlink()


def direct_note(folder: Path | None, graph: fx.GraphModule, inputs: Sequence[Any], identity: str) -> DirectNote:
    """The note about a captured graph under ``folder``, for inputs of these sizes.

    Args:
        identity: what else decides its regions (``Compilation.identity``).
    """
    if folder is None:
        return DirectNote(None)
    text = "\n".join((graph.code, identity, *map(_layout, inputs)))
    return DirectNote(folder / "direct" / f"{hashlib.sha256(text.encode()).hexdigest()}.json")


def _layout(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    strides = value.stride() if value.layout == torch.strided else value.layout
    return f"{value.shape} {strides} {value.dtype} {value.device}"
