"""What tilestream does not run: Inductor compiles it, or torch runs it eagerly. Announced once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tilestream.announce import announce, first_line
from tilestream.graph.capture import boxed
from tilestream.graph.modules import copied
from tilestream.graph.rewrites.insert import mode_of
from tilestream.run.decompose import simplified
from tilestream.run.late_kernels import waiting_later

log = logging.getLogger(__name__)

Call = Callable[[Sequence[Any]], Sequence[Any]]
"""Takes the values of a graph's placeholders, returns those of its outputs."""


def whole(graph: fx.GraphModule, inputs: list[Any], patches: Mapping[str, Any] | None = None) -> Any:
    """A Dynamo graph compiled by Inductor as if it had been asked in the first place.

    ``patches`` is Inductor's configuration for this graph. Where Inductor fails, the graph runs eagerly.
    """
    try:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs, config_patches=dict(patches or {}))
    except Exception as failure:
        if is_dynamos(failure):
            raise
        _unavailable(failure)
        return graph.forward


def is_dynamos(failure: Exception) -> bool:
    """Whether Dynamo takes an exception itself, falls back or starts again. Inductor's errors derive from the same."""
    from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException

    return isinstance(failure, TorchDynamoException) and not isinstance(failure, BackendCompilerFailed)


def or_eager(compiled: Callable[[fx.GraphModule], Any], graph: fx.GraphModule) -> Any:
    """What ``compiled`` makes of a functional ATen graph; the graph itself, operator by operator, where it fails."""
    try:
        return compiled(graph)
    except Exception as failure:
        if is_dynamos(failure):
            raise
        _unavailable(failure)
        return boxed(eager(graph))


def rest(graph: fx.GraphModule) -> Call:
    """A functional ATen graph, whose placeholders have fake values, compiled by Inductor as a part of the whole would
    be: decomposed, lowered, and tuned when it first runs. Where Inductor fails, the graph runs eagerly.

    ``torch._inductor.standalone_compile`` would go through AOTAutograd, tune twice and pack the result for a file.
    """
    try:
        code = compiled(graph)
    except Exception as failure:
        _unavailable(failure)
        return eager(graph)

    def call(values: Sequence[Any]) -> Sequence[Any]:
        return code(list(values))

    return call


def begin(graph: fx.GraphModule) -> Callable[[], Call]:
    """``rest`` in two parts: when this returns, Inductor's processes compile its kernels; the result waits for them."""
    try:
        with waiting_later() as waits:
            code = compiled(graph)
    except Exception as failure:
        log.debug("it is compiled again, which will say why", exc_info=failure)
        return lambda: rest(graph)

    def finished() -> Call:
        try:
            for wait in waits:
                wait()
        except Exception as failure:
            log.debug("it is compiled again, which will say why", exc_info=failure)
            return rest(graph)
        return lambda values: code(list(values))

    return finished


def compiled(graph: fx.GraphModule) -> Any:
    """Inductor's code of a graph as ``rest`` takes it: called with a list of values. Its failures are the caller's.

    The mode of the graph's own fake values counts, whichever graph is being compiled around this one.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner

    own = copied(graph)
    example = [n.meta.get("val") for n in graph.graph.nodes if n.op == "placeholder"]
    with tracing(TracingContext(mode_of(example))), torch.no_grad():
        return compile_fx_inner(simplified(own, example), example, is_inference=True)


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
