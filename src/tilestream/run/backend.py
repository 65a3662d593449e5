"""The torch.compile back end ``tilestream``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Takes a second to load. ``torch.compile`` loads this module, so that the model's first call need not wait for it.
import torch._inductor.compile_fx  # noqa: F401
from torch import fx

from tilestream.announce import announce
from tilestream.errors import DeviceError, OptionError
from tilestream.options import Options, split
from tilestream.run import fallback, registry
from tilestream.run.cut_models import is_part
from tilestream.run.graphs import Compilation
from tilestream.run.inductor import compile_graph
from tilestream.run.target import Target, resolve

registry.share()


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
