"""ATen graphs of a model: taken from torch.compile, or recorded for analysis. torch.fx stays the graph."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx

from tilestream.errors import CaptureError

log = logging.getLogger(__name__)

_ALONE = {
    "automatic_dynamic_shapes": False,
    "recompile_limit": sys.maxsize,
    "accumulated_recompile_limit": sys.maxsize,
}
"""Dynamo keeps what it learned with a layer's code, whichever model ran it; a capture must not depend on that."""

_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)\n\s*(?P<code>.*)')
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class Captured:
    """Inference graphs of one model, in the order Dynamo made them, and why there are several."""

    graphs: tuple[fx.GraphModule, ...]
    breaks: tuple[str, ...] = ()


def capture(model: Callable[..., Any], inputs: Sequence[Any]) -> Captured:
    """Record the functional ATen graphs that ``model(*inputs)`` makes under ``torch.no_grad``.

    The model runs once, eagerly. No decompositions: ``addmm``, ``native_layer_norm``, ``gelu``
    and the like stay whole.

    Raises:
        CaptureError: Dynamo or AOTAutograd refused the model, or it holds no tensor operation.
    """
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[fx.GraphModule] = []

    def record(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(normalise(graph))
        return boxed(fx.Interpreter(graph).boxed_run)

    def backend(graph: fx.GraphModule, example: list[Any]) -> Any:
        return aot_autograd(fw_compiler=record, inference_compiler=record)(graph, example)

    before = _breaks()
    try:
        with torch.no_grad(), torch._dynamo.config.patch(_ALONE):
            torch.compile(model, backend=backend)(*inputs)
    except Exception as failure:
        raise CaptureError(
            f"the model could not be captured: {_first_line(failure)}",
            "check that it runs eagerly on these inputs; TORCH_LOGS=dynamo tells more",
        ) from failure
    if not graphs:
        raise CaptureError("the model made no graph of tensor operations", "give a model that computes on its inputs")
    return Captured(tuple(graphs), tuple(_breaks()[len(before) :]))


def boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a callable that takes one list of arguments, as AOTAutograd wants, so that it may free them early."""

    def call(args: list[Any]) -> Any:
        return function(args)

    call._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return call


def normalise(graph: fx.GraphModule) -> fx.GraphModule:
    """Drop what is dead, make every part of a split a slice of its own, and give each use of a view its own view.

    The graph is functional already: AOTAutograd has removed mutations. Views are free, so their copies
    are too, and each can then lie inside or outside a region as its user does.
    """
    from tilestream.aten.views import share_nothing, split_to_slices, unlift_constants

    graph.graph.eliminate_dead_code()
    unlift_constants(graph.graph)
    split_to_slices(graph.graph)
    share_nothing(graph.graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def source(node: fx.Node) -> str:
    """The user's line that made ``node``: ``file.py:12 in forward: code``, or an empty string.

    The last frame outside torch's own code, since ``torch.nn`` modules call functions of their own.
    """
    trace = node.meta.get("stack_trace") or ""
    frames = list(_FRAME.finditer(trace))
    own = [f for f in frames if not f["file"].startswith(_TORCH)] or frames
    if not own:
        return ""
    frame = own[-1]
    return f"{Path(frame['file']).name}:{frame['line']} in {frame['function'].strip()}: {frame['code'].strip()}"


def value(node: fx.Node) -> torch.Tensor | None:
    """The fake tensor of a node; ``None`` for SymInts, tuples and nodes without one."""
    fake = node.meta.get("val")
    return fake if isinstance(fake, torch.Tensor) else None


def expression(dim: int | torch.SymInt) -> sympy.Expr:
    """A dimension as a sympy expression, so that symbolic sizes can be compared without guards."""
    return sympy.Integer(dim) if isinstance(dim, int) else dim.node.expr


def settled(dim: int | torch.SymInt) -> int | torch.SymInt:
    """The number, where a guard has fixed a symbolic dimension: the inputs of a weight that is not symbolic do."""
    known = expression(dim)
    return int(known) if known.is_Integer else dim


def product(dims: Sequence[int | torch.SymInt]) -> sympy.Expr:
    """The product of dimensions, expanded, so that equal products compare equal."""
    return sympy.expand(sympy.prod([expression(d) for d in dims]))


def same_size(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two dimensions are known to be equal."""
    return expression(a) == expression(b)


def hint(dim: int | torch.SymInt, default: int = 1024) -> int:
    """The size that a symbolic dimension has in the call that is being compiled."""
    if isinstance(dim, int):
        return dim
    known = dim.node.hint if dim.node.has_hint() else None
    return int(known) if known is not None else default


def _breaks() -> list[str]:
    try:
        from torch._dynamo.utils import counters
    except ImportError:
        return []
    return [f"{reason} ({count}x)" for reason, count in counters["graph_break"].items()]


def _first_line(failure: BaseException) -> str:
    text = str(failure).strip() or type(failure).__name__
    return text.splitlines()[0]
