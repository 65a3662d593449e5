"""The torch.compile back end ``tilestream``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch._inductor.compile_fx  # noqa: F401
from torch import fx

from tilestream.announce import announce
from tilestream.errors import DeviceError, OptionError
from tilestream.options import Options, split
from tilestream.run import fallback
from tilestream.run.graphs import Compilation
from tilestream.run.inductor import compile_graph
from tilestream.run.target import Target, resolve


class Backends(dict[str, Any]):
    """torch's table of back ends by name, in which ``tilestream`` may be registered more than once: by threads that ask
    for it for the first time, at the same time.

    torch looks a name up, loads what it stands for, and registers that, without a lock: while one thread loads this
    package, others find the name missing too, and all but the first then fail with ``duplicate name``. Loading gives
    each of them the same function, so that to register it again changes nothing; a table that never says that it has
    the name lets them.
    """

    def __contains__(self, name: object) -> bool:
        return name != "tilestream" and super().__contains__(name)


def share() -> None:
    """Put such a table in the place of torch's; without one of the kind known, all stays as it is."""
    from torch._dynamo.backends import registry

    found = getattr(registry, "_COMPILER_FNS", None)
    if isinstance(found, dict) and not isinstance(found, Backends):
        registry._COMPILER_FNS = Backends(found)


share()


def tilestream(graph: fx.GraphModule, inputs: list[Any], **given: Any) -> Callable[..., Any]:
    """Compile a Dynamo graph: ``torch.compile(model, backend="tilestream", options={...})``.

    Regions become kernels of ours, and Inductor compiles the graph around them, once: inference, and the forward and
    backward graphs of training. A graph without a region goes to Inductor as if it had been asked in the first place.

    Args:
        graph: the graph that Dynamo made.
        inputs: its example inputs.
        given: ``options``, a mapping of the fields of ``Options`` and of Inductor's options; or ``mode``, one of
            ``torch.compile``'s, which is Inductor's.

    Raises:
        OptionError: an option is unknown or contradicts another.
        DeviceError: ``target`` cannot be had, or ``fallback`` is off.
        PlanError: with ``fallback=False``: an operator or a region cannot run as a pipeline.
    """
    options, patches = split(given.pop("options", None), given.pop("mode", None))
    if any(v is not None for v in given.values()):
        raise OptionError(f"argument {next(iter(given))!r} of torch.compile", "use options={...} or mode=")
    target = _target(options, inputs)
    if target is None:
        return fallback.whole(graph, inputs, patches)
    return compile_graph(graph, inputs, Compilation(options, target, inputs, patches, is_part=is_part(graph)))


def _target(options: Options, inputs: list[Any]) -> Target | None:
    """What runs the pipelines of a graph with these inputs; None where nothing can, which is announced."""
    try:
        return resolve(options, inputs)
    except DeviceError as reason:
        if options.target != "auto" or not options.fallback:
            raise
        announce(f"everything goes to Inductor: {reason.cause}")
        return None


RESUMED = "__resume_at"
"""How Dynamo's code names what runs behind a cut."""


def is_part(graph: fx.GraphModule) -> bool:
    """Whether a graph that Dynamo is compiling ends at a cut, or is called by code that has been cut.

    No CUDA graph holds such a model, as a rule since it asks the GPU for a size, so that each graph begins on an idle
    GPU and waits for what the host takes to enqueue it.
    """
    reason = getattr(graph, "compile_subgraph_reason", None)
    if reason is not None and reason.graph_break:
        return True
    frame = sys._getframe()  # Dynamo compiles a frame when it is called, so its callers are compiled already
    while frame is not None:
        if any(name.startswith(RESUMED) for name in frame.f_code.co_names):
            return True
        frame = frame.f_back
    return False
