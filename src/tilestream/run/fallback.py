"""What tilestream does not run: Inductor compiles it, or torch runs it eagerly. Announced once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tilestream.announce import announce, first_line

log = logging.getLogger(__name__)

Call = Callable[[Sequence[Any]], Sequence[Any]]
"""Takes the values of a graph's placeholders, returns those of its outputs."""


def whole(graph: fx.GraphModule, inputs: list[Any], patches: Mapping[str, Any] | None = None) -> Any:
    """A Dynamo graph compiled by Inductor as if it had been asked in the first place.

    ``patches`` is Inductor's configuration for this graph. Where Inductor fails, the graph runs eagerly.
    """
    from torch._dynamo.exc import TorchDynamoException

    try:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs, config_patches=dict(patches or {}))
    except TorchDynamoException:
        raise  # Dynamo's own: it falls back, or starts again
    except Exception as failure:
        _unavailable(failure)
        return graph.forward


def rest(graph: fx.GraphModule) -> Call:
    """A functional ATen graph, whose placeholders have fake values, compiled by Inductor.

    Takes ``torch._inductor.standalone_compile``; where it fails, runs the graph eagerly.
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
    log.info("Inductor failed", exc_info=failure)
    announce(
        f"Inductor could not compile a part of the model, which runs eagerly "
        f"({type(failure).__name__}: {first_line(failure)})"
    )
