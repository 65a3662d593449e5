"""The regions of one graph that Dynamo captured: found, planned, placed; and whether they pay for the whole."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, field
from typing import Any

from torch import Tensor, fx

from tilestream.announce import announce, announce_failure, announced, said_later
from tilestream.errors import PlanError
from tilestream.graph.capture import Kind
from tilestream.graph.modules import copied
from tilestream.graph.nodes import takes_tf32
from tilestream.graph.region import Region
from tilestream.graph.rewrites.normal_form import fold_batches
from tilestream.graph.rewrites.operators import SEGMENT_REDUCE, SEGMENTS
from tilestream.graph.rewrites.sorted_sums import COUNTED
from tilestream.graph.rewrites.table import rewrite
from tilestream.graph.selection import Cut, Partition
from tilestream.graph.tails import Tail
from tilestream.kernels.step.shape import Shape
from tilestream.options import Options
from tilestream.plan import chain_choice
from tilestream.plan.borders import saved_us
from tilestream.plan.cache import versions
from tilestream.plan.candidates import Candidate, Plan
from tilestream.plan.decode import predicted_us
from tilestream.plan.find import Found, find
from tilestream.plan.gradient_launches import GradientLaunch
from tilestream.plan.interaction import JOINT_INTERACTIONS
from tilestream.plan.left_out import LeftOut, of_partition
from tilestream.plan.pairs import Pair
from tilestream.plan.parts import RegionAnalysis
from tilestream.plan.plan_graph import of_cut, plan_graph
from tilestream.plan.tails import all_promising
from tilestream.plan.turned import turned
from tilestream.run import ahead, gradients, other_ways, prepare, replacements
from tilestream.run.chain_calls import ChainCalls
from tilestream.run.decode import stepped
from tilestream.run.masked_attention import stream_masked
from tilestream.run.place import Calls
from tilestream.run.stopwatch import timed
from tilestream.run.target import Target
from tilestream.run.time_chains import chain_trial
from tilestream.run.trained_attention import fuse_trained
from tilestream.run.whole import Whole, is_far_ahead, least_us

log = logging.getLogger(__name__)


@dataclass
class Compilation:
    """One compilation of a captured graph: inference, or forward and backward.

    ``plans`` are those of the calls that were placed last; ``beside`` those of operators of ours in an inference graph;
    ``rewritten`` says that a joint graph had some, or that masks of attention were changed; ``saved_us`` is what
    Inductor saves over regions' borders (``plan.borders``).

    It lives as long as the compiled function, so it holds the user's tensors by weak references only.

    Args:
        inputs: the values that Dynamo compiles for, in the order of the captured graph's placeholders.
        patches: Inductor's configuration for the graph.
        is_part: whether the graph is one of several that the model was cut into (``cut_models``).
    """

    options: Options
    target: Target
    inputs: InitVar[Sequence[Any]]
    patches: Mapping[str, Any] = field(default_factory=dict)
    plans: list[Plan] = field(default_factory=list)
    saved_us: float | None = None
    beside: list[Plan] = field(default_factory=list)
    rewritten: bool = False
    is_part: bool = False
    masked: int = 0
    step: tuple[fx.GraphModule, Shape] | None = None
    """An inference graph whose decode step is one operator."""

    def __post_init__(self, inputs: Sequence[Any]) -> None:
        self._planned = self.options
        self._found: dict[Kind, Found] = {}  # in copies of the graphs that will be streamed
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
            "is_part": self.is_part,
            "versions": versions(),
        }
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()

    def stream(self, graph: fx.GraphModule, kwargs: Mapping[str, Any]) -> bool:
        """Put calls in the place of the graph's regions, weight gradients and interactions; whether there are any.

        Interactions of training are in place already, since ``stream_joint``.

        Raises:
            PlanError: with ``fallback=False``: an operator or a region cannot run as a pipeline.
        """
        self.plans, self.saved_us = [], None
        backward, training = bool(kwargs.get("is_backward")), not kwargs.get("is_inference", False)
        if training:
            self._planned = self.options.with_(constant_weights=False)  # steps of training change them
        try:
            if not training:
                rewrite(graph, fold_batches)
                self.beside = replacements.replace(graph, self.options, self.target)
                self.masked = self._attends() and stream_masked(graph, self.options)
            with timed("regions"):
                kind: Kind = "backward" if backward else "forward" if training else "inference"
                known = self._found.pop(kind, None)
                found = find(graph, kind, self.options, self.target.hardware, known)
            self._announce(found)
            with timed("planning"):
                if known is None:
                    self._begin(found)
                if not training and prepare.measures(self.options, self.target):
                    found = other_ways.fastest(found, self._planned, self.target)
                later = {} if training else self._tails(found)
                shorter = [tail.region for tail in later.values()]
                ahead.begin(shorter, self._planned, self.target)
                ahead.plan_as_built([*found.regions, *shorter], self._planned, self.target)
                found = found.with_tails(other_ways.faster(found, later, self._planned, self.target))
                plans = Measured(self._planned, self.target)
                made = plan_graph(found, plans, self.target.hardware)
                prepare.note(made)
            # Why another region is left, one that could not be planned or built, is said of each.
            if left := sum(prepare.prefers_fallback(a) for a in made if a.kind == "region"):
                announce(
                    f"{left} of {len(found.regions)} regions go to Inductor, which is as fast there. "
                    "tilestream.explain(model, *inputs) tells all"
                )
            if self._whole().measures():
                self.saved_us = self._saved_us(graph, made)
            self._place(graph, made)
        except Exception as failure:
            if not self.options.fallback:
                raise
            announce_failure("the graph goes to Inductor", failure)
            return False
        ours = (SEGMENTS, SEGMENT_REDUCE)
        self.rewritten = self.rewritten or any(n.target in ours or COUNTED in n.meta for n in graph.graph.nodes)
        return bool(self.plans or self.beside or self.rewritten or self.masked)

    def stream_step(self, graph: fx.GraphModule) -> bool:
        """Whether a graph of inference is a decode step, and is all ours: the reference machine was asked for. On a GPU
        it is one of the ways that ``choose`` compares."""
        self.step = None
        if not self.options.decode_step or not (self.target.kind == "reference" or self._whole().measures()):
            return False
        with announced("the decode step is not one kernel", self.options.fallback):
            self.step = stepped(graph, self.options, self.target)
        return self.step is not None and self.target.kind == "reference"

    def stream_joint(self, graph: fx.GraphModule, results: int) -> None:
        """Put our operators in the place of interactions and attentions of a joint graph, before it is cut.

        Args:
            results: how many of its outputs are the forward graph's.
        """
        made = replacements.replace_by(JOINT_INTERACTIONS, graph, self.options, self.target)
        fused = fuse_trained(graph, results, self.options, self.target)
        self.rewritten = bool(self.rewritten or made or fused)

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
        kinds: tuple[Kind, Kind] = ("forward", "backward")
        for graph, kind in zip((forward, backward), kinds, strict=True):
            with said_later(f"nothing of the {kind} graph is prepared"):
                with timed("regions"):
                    found = find(copied(graph), kind, self.options, self.target.hardware)
                self._found[kind] = found
                with timed("planning"):
                    launches += self._begin(found)
                regions += found.regions
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

        Interactions of training are in both, and where there are no regions sorted sums alone are not asked about: they
        were predicted to pay, but for the host, which counts where a model is cut.
        """
        has_ours = bool(self.plans or self.masked or self.step)
        if self.rewritten and not has_ours and not (self.is_part and kwargs.get("is_inference") and _sums(streamed)):
            return compiled(streamed)
        return self._whole().choose(streamed, plain, compiled, inputs, kwargs, self.step)

    def choose_step(
        self, plain: fx.GraphModule, compiled: Callable[..., Any], inputs: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """The compiled decode step, where the graph is one that is far ahead of whatever else it may become: then no
        regions are looked for. None otherwise."""
        if self.step is None or not self._whole().measures():
            return None
        least = least_us(plain.graph, self.target.hardware)
        if not is_far_ahead(predicted_us(self.step[1], self.target.hardware), least):
            return None
        self.plans, self.saved_us = [], None
        return self._whole().choose(plain, plain, compiled, inputs, kwargs, self.step, least)

    def keep(self, training: bool) -> None:
        """Note that the graph's regions are all there is to it."""
        self._whole().note(training)

    def _whole(self) -> Whole:
        originals = [known() for known in self._inputs]
        beside_us = sum(made.gain_us for made in self.beside)
        return Whole(
            self.options, self.target, self.patches, self.plans, originals, beside_us, self.saved_us, self.is_part
        )

    def _attends(self) -> bool:
        """Whether attention over a mask may be ours: the graph is timed with it and without, or the reference machine
        was asked for."""
        return self._whole().measures() or self.target.kind == "reference"

    def _begin(self, found: Found) -> list[GradientLaunch]:
        """Begin to compile the kernels that will be timed; the launches of gradients among them."""
        if not prepare.measures(self.options, self.target):
            return []
        ahead.begin(found.regions, self._planned, self.target)
        if not found.sites:
            return []
        # Sums share a launch with those of the same region, which is an operator to them only if it comes to run.
        cuts = [cut for cut in found.cuts if ahead.may_run(cut.region, self._planned, self.target)]
        return gradients.prepare(found.sites, cuts, self.options, self.target)

    def _tails(self, found: Found) -> dict[str, Tail]:
        """The tails that may run; none where nothing is timed."""
        if not prepare.measures(self.options, self.target):
            return {}
        return all_promising(found, self._planned, self.target.hardware)

    def _place(self, graph: fx.GraphModule, made: Sequence[RegionAnalysis]) -> None:
        """Put calls in the place of what runs. An exception of ours costs the part, and is announced."""
        calls = Calls(graph)
        for each in made:
            if not (running := each.running):
                continue
            with announced(f"{each.name} goes to Inductor", self.options.fallback):
                if isinstance(each.of, Pair):
                    calls.of_chain(ChainCalls(each.of, self.target.kind))
                elif isinstance(each.of, GradientLaunch):
                    calls.of_sums(each.of, running[0], self.target.kind)
                elif each.of is not None:
                    calls.of_region(each.of, running[0], self.target.kind, self._planned.constant_weights)
                self.plans += [a.plan for a in (*each.parts, each) if a.plan is not None]
        calls.settle()

    def _saved_us(self, graph: fx.GraphModule, made: Sequence[RegionAnalysis]) -> float | None:
        """What Inductor saves over the borders of what will run; None where a backward chain does, of which that cannot
        be told. Sums of weight gradients are products, which Inductor fuses with nothing."""
        regions = [each for each in made if each.running and each.kind != "weight gradients"]
        if any(each.kind != "region" for each in regions):
            return None
        with timed("planning"), announced("the graph may be compiled with its regions and without"):
            by_name = {n.name: n for n in graph.graph.nodes}
            members = {each.name: [by_name[n.name] for n in each.nodes] for each in regions}
            return saved_us(graph.graph, members, self.target.hardware, takes_tf32())
        return None

    def _announce(self, found: Found) -> None:
        log.info("%d of %d operators in %d regions", covered(found), found.operators, len(found.regions))
        if found.exclusions and not self.options.fallback:
            first = found.exclusions[0]
            raise PlanError(f"{first.op} at {first.source or '?'}: {first.reason}", "allow fallback=True")
        if found.exclusions and found.kind != "backward":  # which repeats the lines of its forward graph
            announce(summary(found, self._left_out(found)))
        _trace(found)

    def _left_out(self, found: Found) -> LeftOut | None:
        """What stays out, by its time; None where that is not known: the line then names the first operator."""
        with announced("the time of what goes to Inductor is not known"):
            return of_partition(found.graph.graph, found, self.target.hardware, takes_tf32())


@dataclass(frozen=True)
class Measured:
    """Plans by measurement where the target is a GPU (``plan_graph.Plans``). An exception of ours costs the part."""

    options: Options
    target: Target

    def region(self, cut: Cut) -> RegionAnalysis:
        plan, problem = prepare.planned(cut.region, self.options, self.target)
        return of_cut(cut, plan, problem, turned(cut.region, self.options).us)

    def sums(self, launch: GradientLaunch) -> Plan | None:
        where = launch.sites[0].source or "no source line"
        with announced(f"weight gradients ({where}) go to Inductor", self.options.fallback):
            return gradients.plan(launch, self.options, self.target)

    def chain(self, pair: Pair, apart: Sequence[Candidate]) -> Plan | None:
        options, target = self.options, self.target
        with announced("a region and its weights' gradients stay apart", options.fallback):
            measures = prepare.measures(options, target) and options.strategy == "auto"
            forced = target.kind == "reference"
            asked = chain_choice.question(pair.joined, pair.launch.rows, target.hardware, measures, forced)
            return prepare.chosen(asked, lambda: chain_trial(pair, target), options, target)


def _sums(graph: fx.GraphModule) -> bool:
    """Whether rows are summed in sorted order. Single values in 16 bits are so whatever it takes."""
    made = graph.graph.find_nodes(op="call_function", target=SEGMENT_REDUCE)
    return any(n.meta["val"].dim() > 1 for n in made)


def covered(found: Partition) -> int:
    """How many operators lie in regions."""
    return sum(len(r.operators) for r in found.regions)


def summary(found: Partition, out: LeftOut | None) -> str:
    """One line on what goes to Inductor: how much, the operators that take most of it, and why they do."""
    of = [e for e in found.exclusions if out is not None and e.op == out.operator]
    first = next((e for e in of if out is not None and e.source == out.source), (of or found.exclusions)[0])
    number = f"{len(found.exclusions)} of {found.operators}"
    why = f"({first.source or 'no source line'}): {first.reason}"
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
