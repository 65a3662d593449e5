"""Everything that is not ours: Inductor, and where that fails, the fx graph run eagerly. Announced once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

log = logging.getLogger(__name__)

_said: set[str] = set()

Call = Callable[[Sequence[Any]], Sequence[Any]]
"""Takes the values of a graph's placeholders, returns those of its outputs."""


def announce(message: str) -> None:
    """Log one line that users see (a warning), once a process."""
    if message not in _said:
        _said.add(message)
        log.warning("tilestream: %s", message)


def whole(graph: fx.GraphModule, inputs: list[Any]) -> Any:
    """A Dynamo graph compiled by Inductor as if it had been asked in the first place."""
    try:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs)
    except Exception as failure:
        _unavailable(failure)
        return graph.forward


def rest(graph: fx.GraphModule) -> Call:
    """A functional ATen graph, whose placeholders have fake values, compiled by Inductor.

    Takes ``torch._inductor.standalone_compile``; where torch has none, or it fails, runs the graph eagerly.
    """
    example = [n.meta.get("val") for n in graph.graph.nodes if n.op == "placeholder"]
    try:
        from torch._inductor import standalone_compile

        compiled = standalone_compile(graph, example, dynamic_shapes="from_graph")
    except Exception as failure:
        _unavailable(failure)
        return eager(graph)

    def call(values: Sequence[Any]) -> Sequence[Any]:
        return compiled(*values)

    return call


def eager(graph: fx.GraphModule) -> Call:
    """The graph, operator by operator."""
    forward = graph.forward

    def call(values: Sequence[Any]) -> Sequence[Any]:
        with torch.no_grad():
            return forward(*values)

    return call


def _unavailable(failure: BaseException) -> None:
    lines = str(failure).strip().splitlines()
    log.debug("Inductor failed", exc_info=failure)
    announce(
        f"Inductor could not compile a part of the model, which runs eagerly "
        f"({type(failure).__name__}: {lines[0] if lines else 'no message'})"
    )
