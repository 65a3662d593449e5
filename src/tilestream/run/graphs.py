"""The regions of one graph that Dynamo captured: found, planned, placed; and whether they pay for the whole."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from tilestream.announce import announce, announce_failure
from tilestream.errors import PlanError
from tilestream.graph.capture import normalise
from tilestream.graph.gradients import GradientSite
from tilestream.graph.joint import narrow_products
from tilestream.graph.modules import copied
from tilestream.graph.moved import Text, moved, text
from tilestream.graph.region import Region
from tilestream.graph.row_sums import own_operands
from tilestream.graph.selection import Partition
from tilestream.options import Options
from tilestream.plan.cache import versions
from tilestream.plan.gradient_launches import GradientLaunch
from tilestream.plan.left_out import LeftOut, of_partition
from tilestream.plan.planner import Plan
from tilestream.plan.regions import find_regions
from tilestream.run import ahead, gradients, prepare, tails
from tilestream.run.backward_chains import join_chains
from tilestream.run.interaction import Choice, stream_interactions
from tilestream.run.place import Placed, place
from tilestream.run.spec import encode, spec_of
from tilestream.run.stopwatch import timed
from tilestream.run.target import Target
from tilestream.run.whole import Whole

log = logging.getLogger(__name__)


@dataclass
class Compilation:
    """One compilation of a captured graph: inference, or forward and backward.

    ``interactions`` are those of an inference graph; ``rewritten`` says that a joint graph had some.

    It lives as long as the compiled function, so it holds the user's tensors by weak references only.

    Args:
        inputs: the values that Dynamo compiles for, in the order of the captured graph's placeholders.
        patches: Inductor's configuration for the graph.
    """

    options: Options
    target: Target
    inputs: InitVar[Sequence[Any]]
    patches: Mapping[str, Any] = field(default_factory=dict)
    placed: list[Placed] = field(default_factory=list)
    gradients: list[Plan] = field(default_factory=list)
    interactions: list[Choice] = field(default_factory=list)
    rewritten: bool = False

    def __post_init__(self, inputs: Sequence[Any]) -> None:
        self._planned = self.options
        self._partitions: dict[bool, tuple[Text, Partition]] = {}  # by whether a graph is a backward graph
        self._sizes = [int(math.log(max(1, t.numel()), prepare.GROWTH)) for t in inputs if isinstance(t, Tensor)]
        self._inputs = [weakref.ref(t) if isinstance(t, Tensor) else (lambda: None) for t in inputs]

    @property
    def identity(self) -> str:
        """What decides the regions of a graph, besides the graph, in every process: a hash."""
        decides = {
            "options": {name: str(value) for name, value in asdict(self.options).items() if name != "cache_dir"},
            "target": [self.target.kind, asdict(self.target.hardware)],
            # A plan serves its rows and a few times as many: a graph with symbolic sizes is compiled anew for more.
            "sizes": self._sizes,
            "versions": versions(),
        }
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()

    def stream(self, graph: fx.GraphModule, kwargs: Mapping[str, Any]) -> bool:
        """Put calls in the place of the graph's regions, weight gradients and interactions; whether there are any.

        Interactions of training are in place already, since ``stream_joint``.

        Raises:
            PlanError: with ``fallback=False``: an operator or a region cannot run as a pipeline.
        """
        self.placed, self.gradients = [], []
        backward, training = bool(kwargs.get("is_backward")), not kwargs.get("is_inference", False)
        if training:
            self._planned = self.options.with_(constant_weights=False)  # steps of training change them
        try:
            if not training:
                self.interactions = stream_interactions(graph, False, self.options, self.target)
            found, summed = self._found(graph, backward, training)
            self._announce(graph, found, backward)
            with timed("planning"):
                self._prepare(found, summed)
                later = {} if training else tails.all_promising(found, self._planned, self.target)
                shorter = [tail.region for tail in later.values()]
                ahead.begin(shorter, self._planned, self.target)
                ahead.plan_as_built([*found.regions, *shorter], self._planned, self.target)
                found = tails.start_later(graph, found, later, self._planned, self.target)
                before = len(prepare.analyses())
                self.placed = place(graph, found, self._spec_for)
            # Why another region is left, one that could not be planned or built, is said of each.
            if left := sum(prepare.prefers_fallback(a, self.target) for a in prepare.analyses()[before:]):
                announce(
                    f"{left} of {len(found.regions)} regions go to Inductor, which is as fast there. "
                    "tilestream.explain(model, *inputs) tells all"
                )
            if backward:
                self.gradients = gradients.stream_gradients(graph, self.options, self.target)
                self.gradients += join_chains(graph, self.options, self.target)
        except Exception as failure:
            if not self.options.fallback:
                raise
            announce_failure("the graph goes to Inductor", failure)
            return False
        return bool(self.placed or self.gradients or self.interactions or self.rewritten)

    def stream_joint(self, graph: fx.GraphModule) -> None:
        """Put our operators in the place of the interactions of a joint graph, before it is cut."""
        self.rewritten = bool(stream_interactions(graph, True, self.options, self.target))

    def prepare(self, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        """Begin to compile what both graphs of a training step will want, and plan both as it comes: the forward graph,
        asked for first, would wait for the longest of its own kernels while those of the other are there.

        The graphs stay as they are. What goes wrong here costs nothing: streaming them will say it.
        """
        if not prepare.measures(self.options, self.target):
            return
        self._planned = self.options.with_(constant_weights=False)
        regions: list[Region] = []
        launches: list[GradientLaunch] = []
        for graph, is_backward in ((forward, False), (backward, True)):
            try:
                own = copied(graph)
                found, summed = self._found(own, is_backward, training=True)
                self._partitions[is_backward] = text(own.graph), found
                with timed("planning"):
                    launches += self._prepare(found, summed)
                regions += found.regions
            except Exception as failure:
                log.debug("nothing to prepare; streaming the graph will say why", exc_info=failure)
        with timed("planning"):
            ahead.plan_as_built(regions, self._planned, self.target, launches)

    def choose(
        self,
        streamed: fx.GraphModule,
        plain: fx.GraphModule,
        compiled: Callable[..., Any],
        inputs: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """The compiled graph that runs: with its regions, or without, where those do not pay for the whole.

        Interactions of training are in both.
        """
        if self.rewritten and not (self.placed or self.gradients):
            return compiled(streamed)
        return self._whole().choose(streamed, plain, compiled, inputs, kwargs)

    def keep(self, training: bool) -> None:
        """Note that the graph's regions are all there is to it."""
        self._whole().note(training)

    def _whole(self) -> Whole:
        plans = [prepare.plan(p.region, self._planned, self.target) for p in self.placed]
        originals = [known() for known in self._inputs]
        launches = [*plans, *self.gradients]
        beside_us = sum(made.gain_us for made in self.interactions)
        return Whole(self.options, self.target, self.patches, launches, originals, beside_us)

    def _found(self, graph: fx.GraphModule, backward: bool, training: bool) -> tuple[Partition, list[GradientSite]]:
        """The regions of a graph, which is brought into its normal form, and its weight gradients; none of those where
        the graph was prepared, and all their kernels are begun.
        """
        if backward and narrow_products(graph.graph):
            graph.recompile()
        with timed("regions"):
            kept_out, hardware = own_operands(graph.graph) if backward else {}, self.target.hardware
            normal = normalise(graph)
            before, prepared = self._partitions.pop(backward, ((), None))
            if prepared is not None and before == text(normal.graph):
                return moved(prepared, normal.graph), []
            return find_regions(normal, self.options, hardware, kept_out, training=training, backward=backward)

    def _prepare(self, found: Partition, summed: Sequence[GradientSite]) -> list[GradientLaunch]:
        """Begin to compile the kernels that will be timed; the launches of gradients among them."""
        if not prepare.measures(self.options, self.target):
            return []
        ahead.begin(found.regions, self._planned, self.target)
        if not summed:
            return []
        # Sums share a launch with those of the same region, which is an operator to them only if it comes to run.
        cuts = tuple(cut for cut in found.cuts if ahead.may_run(cut.region, self._planned, self.target))
        return gradients.prepare(summed, replace(found, cuts=cuts), self.options, self.target)

    def _spec_for(self, region: Region) -> str | None:
        """What the operator is told of a region; None where Inductor runs it, which is announced."""
        if region.device.type != self.target.device.type:
            announce(f"{region.name} goes to Inductor: its tensors are on {region.device}")
            return None
        pipeline = prepare.pipeline_of(region, self._planned, self.target)
        if pipeline is None:
            return None
        try:
            return encode(spec_of(region, pipeline, self.target.kind, self._planned.constant_weights))
        except Exception as failure:
            if not self.options.fallback:
                raise
            announce_failure(f"{region.name} goes to Inductor", failure)
            return None

    def _announce(self, graph: fx.GraphModule, found: Partition, backward: bool) -> None:
        log.info("%d of %d operators in %d regions", covered(found), found.operators, len(found.regions))
        if found.exclusions and not self.options.fallback:
            first = found.exclusions[0]
            raise PlanError(f"{first.op} at {first.source or '?'}: {first.reason}", "allow fallback=True")
        if found.exclusions and not backward:  # backward graphs repeat the lines of their forward ones
            announce(summary(found, self._left_out(graph, found)))
        _trace(found)

    def _left_out(self, graph: fx.GraphModule, found: Partition) -> LeftOut | None:
        """What stays out, by its time; None where that is not known: the line then names the first operator."""
        try:
            tf32 = torch.get_float32_matmul_precision() != "highest"
            return of_partition(graph.graph, found, self.target.hardware, tf32)
        except Exception as failure:
            announce_failure("the time of what goes to Inductor is not known", failure)
            return None


def covered(found: Partition) -> int:
    """How many operators lie in regions."""
    return sum(len(r.operators) for r in found.regions)


def summary(found: Partition, out: LeftOut | None) -> str:
    """One line on what goes to Inductor: how much, the operators that take most of it, and why they do."""
    of = [e for e in found.exclusions if out is not None and e.op == out.operator]
    first = next((e for e in of if out is not None and e.source == out.source), (of or found.exclusions)[0])
    number, why = (
        f"{len(found.exclusions)} of {found.operators}",
        f"({first.source or 'no source line'}): {first.reason}",
    )
    if out is None:
        said = f"{number} operators go to Inductor: {first.op} {why}"
    else:
        said = f"{number} operators go to Inductor, with {out.share:.0%} of the predicted time. "
        said += f"Most of it, {out.largest_share:.0%}: {out.largest} {why}"
    return f"{said}. tilestream.explain(model, *inputs) tells all"


def _trace(found: Partition) -> None:
    """Put the partition into tlparse's report, where torch has structured traces."""
    try:
        from torch._logging._internal import trace_structured
    except ImportError:
        return
    from tilestream.ir.text import show

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "tilestream_regions", "encoding": "string"},
        payload_fn=lambda: "\n\n".join(show(r.program) for r in found.regions),
    )
