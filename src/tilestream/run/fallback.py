"""What tilestream does not run: Inductor compiles it, or torch runs it eagerly. Announced once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tilestream.announce import announce, first_line, said_later
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
    from torch._inductor.compile_fx import compile_fx

    return _or_else(lambda: compile_fx(graph, inputs, config_patches=dict(patches or {})), lambda: graph.forward)


def is_dynamos(failure: Exception) -> bool:
    """Whether Dynamo takes an exception itself, falls back or starts again. Inductor's errors derive from the same."""
    from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException

    return isinstance(failure, TorchDynamoException) and not isinstance(failure, BackendCompilerFailed)


def or_eager(compiled: Callable[[fx.GraphModule], Any], graph: fx.GraphModule) -> Any:
    """What ``compiled`` makes of a functional ATen graph; the graph itself, operator by operator, where it fails."""
    return _or_else(lambda: compiled(graph), lambda: boxed(_laid_out(graph)))


def _or_else(compiled: Callable[[], Any], instead: Callable[[], Any]) -> Any:
    """What Inductor makes, or ``instead`` where it fails, which is announced."""
    try:
        return compiled()
    except Exception as failure:
        if is_dynamos(failure):
            raise
        _unavailable(failure)
        return instead()


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
    begun: list[Any] = []
    with said_later("it is compiled again"), waiting_later() as waits:
        begun.append(compiled(graph))

    def finished() -> Call:
        if begun:
            with said_later("it is compiled again"):
                for wait in waits:
                    wait()
                return lambda values: begun[0](list(values))
        return rest(graph)

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


def _laid_out(graph: fx.GraphModule) -> Call:
    """``eager``, on values as they lay in memory when the graph was traced: what a forward graph saved may lie
    otherwise, and kernels of attention then refuse it."""
    run, traced = eager(graph), [n.meta.get("val") for n in graph.graph.find_nodes(op="placeholder")]

    def laid_out(value: Any, like: Any) -> Any:
        if not _moved(value, like):
            return value
        return torch.empty_strided(value.shape, like.stride(), dtype=value.dtype, device=value.device).copy_(value)

    return lambda values: run([laid_out(value, like) for value, like in zip(values, traced, strict=True)])


def _moved(value: Any, traced: Any) -> bool:
    """Whether a tensor has other strides than the one that a graph was traced with; symbolic ones are not compared."""
    if not (isinstance(value, torch.Tensor) and isinstance(traced, torch.Tensor)):
        return False
    strides = zip(value.stride(), traced.stride(), strict=True)
    return any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in strides)


def calls_eager() -> bool:
    """Whether this PyTorch's Inductor can call eager's kernels alone, its mode ``lite``."""
    from torch._inductor import list_mode_options

    return "lite" in list_mode_options()


def _unavailable(failure: BaseException) -> None:
    log.info("Inductor failed", exc_info=failure)
    announce(
        f"Inductor could not compile a part of the model, which runs eagerly "
        f"({type(failure).__name__}: {first_line(failure)})"
    )
