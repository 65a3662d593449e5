"""The torch.compile back end ``tilestream``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tilestream import fallback
from tilestream.aten.nodes import is_constant
from tilestream.capture import boxed, normalise
from tilestream.errors import DeviceError, OptionError, PlanError
from tilestream.options import Options, parse
from tilestream.regions import Partition, partition
from tilestream.segments import Segment
from tilestream.stopwatch import timed
from tilestream.target import Target, resolve

log = logging.getLogger(__name__)

TRAINING = (
    "a training graph goes to Inductor: only inference graphs are streamed "
    "(call the model under torch.no_grad() or torch.inference_mode())"
)


def tilestream(graph: fx.GraphModule, inputs: list[Any], **given: Any) -> Callable[..., Any]:
    """Compile a Dynamo graph: ``torch.compile(model, backend="tilestream", options={...})``.

    Inference graphs are cut into regions; what is not taken, and training graphs, go to Inductor.

    Args:
        graph: the graph that Dynamo made.
        inputs: its example inputs.
        given: ``options``, a mapping of the fields of ``Options``.

    Raises:
        OptionError: an option is unknown or contradicts another.
        DeviceError: ``target`` cannot be had, or ``fallback`` is off.
    """
    options = parse(given.pop("options", None))
    if any(v is not None for v in given.values()):
        raise OptionError(f"argument {next(iter(given))!r} of torch.compile", "use options={...}")
    if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in inputs):
        if not options.fallback:
            raise PlanError("a training graph with fallback=False", "call the model under torch.no_grad()")
        fallback.announce(TRAINING)
        return fallback.whole(graph, inputs)
    try:
        target = resolve(options, inputs)
    except DeviceError as reason:
        if options.target != "auto" or not options.fallback:
            raise
        fallback.announce(f"everything goes to Inductor: {reason.cause}")
        return fallback.whole(graph, inputs)
    from torch._dynamo.backends.common import aot_autograd

    def inference(aten: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        return compile_inference(aten, options, target)

    return aot_autograd(fw_compiler=training, bw_compiler=training, inference_compiler=inference)(graph, inputs)


def training(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    """Forward and backward graphs: Inductor's."""
    fallback.announce(TRAINING)
    return boxed(fallback.rest(graph))


def compile_inference(graph: fx.GraphModule, options: Options, target: Target) -> Callable[..., Any]:
    """A functional ATen graph as a boxed callable.

    Raises:
        PlanError: with ``fallback=False``: an operator or a region cannot run as a pipeline.
    """
    with timed("regions"):
        found = partition(normalise(graph))
    log.info("%d of %d operators in %d regions", covered(found), found.operators, len(found.regions))
    if found.exclusions and not options.fallback:
        first = found.exclusions[0]
        raise PlanError(f"{first.op} at {first.source or '?'}: {first.reason}", "allow fallback=True")
    if found.exclusions:
        fallback.announce(summary(found))
    _trace(found)
    with timed("planning"):
        return boxed(Program.build(graph, found, options, target))


def covered(found: Partition) -> int:
    """How many operators lie in regions."""
    return sum(len(r.operators) for r in found.regions)


def summary(found: Partition) -> str:
    """One line on what goes to Inductor, and why."""
    first = found.exclusions[0]
    reason = f"{first.op} ({first.source or 'no source line'}): {first.reason}"
    others = len(found.exclusions) - 1
    return (
        f"{len(found.exclusions)} of {found.operators} operators go to Inductor: {reason}"
        + (f"; and {others} more" if others else "")
        + ". tilestream.explain(model, *inputs) tells all"
    )


def _trace(found: Partition) -> None:
    """Put the partition into tlparse's report, where torch has structured traces."""
    try:
        from torch._logging._internal import trace_structured
    except ImportError:
        return
    from tilestream.show import show

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "tilestream_regions", "encoding": "string"},
        payload_fn=lambda: "\n\n".join(show(r.program) for r in found.regions),
    )


@dataclass(frozen=True)
class Step:
    """One segment, compiled; ``dead`` values are not needed after it."""

    call: fallback.Call
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    dead: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """The segments of a graph in order. Called with a list of arguments, which it empties."""

    placeholders: tuple[str, ...]
    constants: dict[str, torch.Tensor]
    steps: tuple[Step, ...]
    outputs: tuple[Any, ...]

    @staticmethod
    def build(graph: fx.GraphModule, found: Partition, options: Options, target: Target) -> Program:
        """Compile the regions, then what is left; a region that Inductor runs is compiled with its neighbours."""
        from tilestream.runtime import compile_region

        regions = {r.name: compile_region(r, options, target) for r in found.regions}
        taken = {name: call for name, call in regions.items() if call is not None}
        found = found.keep(taken)
        nodes = list(graph.graph.nodes)
        outputs = tuple(nodes[-1].args[0])
        kept = {o.name for o in outputs if isinstance(o, fx.Node)}
        placeholders = tuple(n.name for n in nodes if n.op == "placeholder")
        constants = {n.name: getattr(graph, n.target) for n in nodes if is_constant(n)}
        steps: list[Step] = []
        for index, segment in enumerate(found.segments):
            later = {a for s in found.segments[index + 1 :] for a in s.arguments} | kept
            dead = tuple(dict.fromkeys(n for n in (*segment.arguments, *segment.results) if n not in later))
            steps.append(Step(_call(segment, taken), segment.arguments, segment.results, dead))
        return Program(placeholders, constants, tuple(steps), outputs)

    def __call__(self, args: list[Any]) -> list[Any]:
        values = {**self.constants, **dict(zip(self.placeholders, args, strict=True))}
        args.clear()
        for step in self.steps:
            results = step.call([values[name] for name in step.arguments])
            values.update(zip(step.results, results, strict=True))
            for name in step.dead:
                del values[name]
        return [values[o.name] if isinstance(o, fx.Node) else o for o in self.outputs]


def _call(segment: Segment, regions: Mapping[str, fallback.Call]) -> fallback.Call:
    if segment.region is not None:
        return regions[segment.region.name]
    with timed("inductor"):
        return fallback.eager(segment.graph) if segment.trivial else fallback.rest(segment.graph)
