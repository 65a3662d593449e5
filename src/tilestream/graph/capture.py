"""ATen graphs of a model: taken from torch.compile, or recorded for analysis. torch.fx stays the graph."""

from __future__ import annotations

import contextlib
import logging
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from tilestream.errors import CaptureError
from tilestream.graph.attention_masks import settle_masks
from tilestream.graph.fake import faked, is_fake
from tilestream.graph.provenance import OTHERS
from tilestream.graph.repeated_heads import share_heads
from tilestream.graph.rewrites.table import When, rewrite
from tilestream.graph.state import preserved

if TYPE_CHECKING:
    from tilestream.graph.eager import EagerOp

Kind = Literal["inference", "forward", "backward"]

_ALONE = {"automatic_dynamic_shapes": False, "recompile_limit": sys.maxsize, "accumulated_recompile_limit": sys.maxsize}
"""Dynamo keeps what it learned with a layer's code, whichever model ran it; a capture must not depend on that."""


class NeedsValuesError(CaptureError):
    """What the model does depends on values, and its tensors have none."""


Change = Callable[[fx.GraphModule], fx.GraphModule]


@dataclass(frozen=True)
class Captured:
    """Graphs of one model in the order Dynamo made them, and what lies between them.

    Attributes:
        kinds: of each graph: ``inference`` (no gradients), ``forward`` (saves what its backward needs) or ``backward``.
        breaks: why there are several graphs, or why a part is in none, each with the user's line.
        eager: operators that ran outside of every graph.
        ran: why the model had to be run with its real values; empty where it was not.
    """

    graphs: tuple[fx.GraphModule, ...]
    kinds: tuple[Kind, ...]
    breaks: tuple[str, ...] = ()
    eager: tuple[EagerOp, ...] = ()
    ran: str = ""


def capture(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    keywords: Mapping[str, Any] | None = None,
    training: bool = False,
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]] | None = None,
    masks: bool = True,
    change: Change | None = None,
) -> Captured:
    """Record the functional ATen graphs that ``model(*inputs, **keywords)`` makes; of inference with its writes into
    arguments at the end.

    Nothing is computed and no memory taken: tensors are fake. Only a model that branches on values is run, since
    nothing else can tell which way it goes. No decompositions: ``addmm``, ``native_layer_norm``, ``gelu`` and the like
    stay whole. The model, its inputs and the random number generators are afterwards as they were (``graph.state``),
    also where the model was run and where it failed.

    Args:
        training: with gradients, and the backward graphs for all that wants them; otherwise under ``torch.no_grad``.
        partition: cuts a joint graph into forward and backward, as AOTAutograd's ``partition_fn``; by default all that
            the backward graph reads is saved.
        masks: whether those of attention are settled, as they are where the option ``attention`` is on.
        change: what to make of each inference graph as it comes from AOTAutograd.

    Raises:
        CaptureError: the model fails on these inputs, Dynamo or AOTAutograd refuse it, it holds no tensor operation,
            or training has nothing to train.
    """
    fakes, arguments, named = faked(model, inputs, keywords or {})
    try:
        return _record(_Recorder(partition, masks, change), model, arguments, named, training, fakes)
    except Exception as failure:
        if not _needs_values(failure):
            raise
        why = f"what it does depends on values{_at(failure)}"
        if is_fake((list(inputs), dict(keywords or {}))):
            raise NeedsValuesError(f"the model could not be captured: {why}", "give it real tensors") from failure
        recorder = _Recorder(partition, masks, change)
        return replace(_record(recorder, model, inputs, keywords or {}, training, None), ran=why)


@dataclass
class _Recorder:
    """The back end that records; ``inside`` counts the calls of its graphs that are going on."""

    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]] | None
    masks: bool
    change: Change | None
    graphs: list[fx.GraphModule] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)
    inside: int = 0

    def backend(self, graph: fx.GraphModule, example: list[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import default_partition

        reason = getattr(graph, "compile_subgraph_reason", None)
        if reason is not None and reason.graph_break:
            self.breaks.append(_told(reason.reason) + _where(reason.user_stack))
        if self.masks:
            settle_masks(graph)
            share_heads(graph)
        compiler = aot_autograd(
            fw_compiler=self._keep("forward"),
            bw_compiler=self._keep("backward"),
            inference_compiler=self._keep("inference"),
            partition_fn=self.partition or default_partition,
            keep_inference_input_mutations=True,
        )
        return self._counted(compiler(graph, example))

    def _keep(self, kind: Kind) -> Callable[..., Any]:
        def keep(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            if self.change is not None and kind == "inference":
                graph = self.change(graph)
            rewrite(graph, When.NORMAL_FORM)
            self.graphs.append(graph)
            self.kinds.append(kind)
            return boxed(self._counted(fx.Interpreter(graph).boxed_run))

        return keep

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.inside += 1
            try:
                return function(*args)
            finally:
                self.inside -= 1

        return call


def _record(
    recorder: _Recorder,
    model: Callable[..., Any],
    inputs: Sequence[Any],
    keywords: Mapping[str, Any],
    training: bool,
    fakes: contextlib.AbstractContextManager[Any] | None,
) -> Captured:
    from tilestream.graph.eager import Watch

    watch = Watch(lambda: recorder.inside > 0)
    before = _refusals()
    run = torch.compile(alone(model), backend=recorder.backend)
    try:
        kept = preserved(model, (inputs, keywords), values=fakes is None)
        with _quiet(), kept, torch._dynamo.config.patch(_ALONE), fakes or contextlib.nullcontext(), watch:
            with torch.set_grad_enabled(training):
                results = run(*inputs, **keywords)
                if training:
                    recorder.inside += 1  # the engine's own steps between the graphs are no operators of the model
                    _backward(model, (inputs, keywords), results)
    except Exception as failure:
        if _needs_values(failure) or isinstance(failure, CaptureError):
            raise
        raise _failed(model, inputs, keywords, fakes, failure) from failure
    refused = [r for r in _refusals() - before if not recorder.breaks or not recorder.graphs]
    if not recorder.graphs and not watch.found:
        raise CaptureError("the model made no graph of tensor operations", "give a model that computes on its inputs")
    breaks = dict.fromkeys((*recorder.breaks, *refused))
    return Captured(tuple(recorder.graphs), tuple(recorder.kinds), tuple(breaks), tuple(watch.found))


def alone(model: Callable[..., Any]) -> Callable[..., Any]:
    """A call of the model with code of its own, so that what Dynamo keeps of it goes away with it."""

    def call(*inputs: Any, **keywords: Any) -> Any:
        return model(*inputs, **keywords)

    code = call.__code__.replace(co_name=f"call_{type(model).__name__}")
    made = types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
    made.__kwdefaults__ = call.__kwdefaults__
    return made


def _backward(model: Callable[..., Any], given: Any, results: Any) -> None:
    """Gradients of every result by everything that wants one, which no tensor keeps."""
    outs = [x for x in tree_leaves(results) if isinstance(x, torch.Tensor) and x.requires_grad]
    wanted = [x for x in tree_leaves(given) if isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf]
    wanted += [p for p in model.parameters() if p.requires_grad] if isinstance(model, nn.Module) else []
    if not outs or not wanted:
        raise CaptureError(
            "nothing of the model takes gradients", "set requires_grad on its parameters, or capture it for inference"
        )
    torch.autograd.grad(outs, wanted, [torch.empty_like(x) for x in outs], allow_unused=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's own traceback of a call that fails: the error that is raised tells it in one line."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _failed(
    model: Callable[..., Any], inputs: Sequence[Any], keywords: Mapping[str, Any], fakes: Any, failure: Exception
) -> CaptureError:
    """The model's own error, if it fails without Dynamo too, else Dynamo's; one line."""
    error: Exception = failure
    try:
        kept = preserved(model, (inputs, keywords), values=fakes is None)
        with _quiet(), kept, fakes or contextlib.nullcontext(), torch.no_grad():
            model(*inputs, **keywords)
        remedy = "it runs eagerly, and torch.compile refuses it: TORCH_LOGS=dynamo tells more"
    except Exception as own:
        error, remedy = own, "make it run eagerly on these inputs first"
    return CaptureError(f"the model could not be captured: {_first_line(error)}{_at(error)}", remedy)


def _needs_values(failure: BaseException) -> bool:
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return isinstance(failure, DataDependentOutputException | DynamicOutputShapeException | GuardOnDataDependentSymNode)


def boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a callable that takes one list of arguments, as AOTAutograd wants, so that it may free them early."""

    def call(args: list[Any]) -> Any:
        return function(args)

    call._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return call


_PLAIN = {
    "generic_jump": "a branch on a tensor's value",
    "Attempted to wrap RNN, GRU, or LSTM": "torch.compile does not trace nn.RNN, nn.GRU and nn.LSTM",
}


def _told(reason: str) -> str:
    """A reason of Dynamo's in a line."""
    first = reason.strip().splitlines()[0]
    return next((words for start, words in _PLAIN.items() if first.startswith(start)), first)


def _refusals() -> Counter[str]:
    """Why Dynamo left whole functions to Python, so far in this process, and how often."""
    from torch._dynamo.utils import counters

    found: Counter[str] = Counter()
    for reason, count in (*counters["unimplemented"].items(), *counters["graph_break"].items()):
        found[_told(reason)] += count
    return found


def _where(stack: Sequence[Any]) -> str:
    """`` at my.py:12``: the last frame of the user's."""
    own = [f for f in stack if not f.filename.startswith(OTHERS)]
    return f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


def _at(failure: BaseException) -> str:
    import traceback

    return _where(traceback.extract_tb(failure.__traceback__))


def _first_line(failure: BaseException) -> str:
    text = str(failure).strip()
    return f"{type(failure).__name__}: {text.splitlines()[0].rstrip('.')}" if text else type(failure).__name__
