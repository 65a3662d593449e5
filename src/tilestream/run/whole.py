"""Never slower, as a whole: a graph with its regions against the same graph without them, both timed.

What each region gains, measured alone, is known. Where that is much of the graph's time there is no question; where it
is little, it must be more than Inductor is predicted to save by fusing operators of regions with others
(``plan.borders``). Else, or where Inductor tunes its own kernels, the whole is compiled twice and the winner kept.

Beside both stands the graph without regions by eager's own kernels, operator by operator: cuBLASLt's products with
biases, cuDNN's convolutions, whatever PyTorch runs. Inductor calls them, so that views cost nothing and CUDA-graph
trees take them too. That needs no kernel compiled, and is timed wherever an inference graph is.

Times are those of CUDA graphs. One of several graphs of a model (``run.backend.is_part``) is timed as it will be
called: by itself, with what the host takes, and always both ways, since what its regions gain on the GPU says nothing
of that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import fx

from tilestream.devices import Device
from tilestream.errors import PlanError
from tilestream.graph.capture import boxed
from tilestream.graph.costs.flops import of_node
from tilestream.graph.nodes import value
from tilestream.graph.real import real
from tilestream.graph.rewrites.kept import is_written
from tilestream.graph.rewrites.shared_keys import is_attention
from tilestream.graph.sizes import hint
from tilestream.kernels.step.shape import Shape
from tilestream.options import Options
from tilestream.plan import margins
from tilestream.plan.candidates import FALLBACK, Candidate, Plan, time_of
from tilestream.plan.chooser import Question, Time, choose
from tilestream.plan.decode import predicted_us
from tilestream.plan.gradients import STRATEGY
from tilestream.plan.shown import total_us
from tilestream.run import fallback, prepare, timing
from tilestream.run.few_queries import FEW_QUERIES
from tilestream.run.made_up import check_room, random_tensor
from tilestream.run.stopwatch import timed
from tilestream.run.target import Target
from tilestream.run.timer import Timer, Trial

log = logging.getLogger(__name__)

STREAMED, EAGER, STEP = "with its regions", "by eager's kernels", "decode step"
ENOUGH = "not timed: what its regions gain is enough"
FAR = "not timed: its regions and attentions alone take longer than the step"
ALONE = "not timed: its products and attention, each a launch, take longer than the step"
PAID = "not timed: regions gain more than Inductor saves by fusing over their borders"

Order = Callable[[Sequence[Candidate], Time], Sequence[Candidate]]

_wholes: list[WholeTiming] = []


@dataclass(frozen=True)
class WholeTiming:
    """A graph with its regions and without, microseconds a call; None where it was not timed.

    Without regions an inference graph is Inductor's alone. One of training is not: it was cut into forward and backward
    by us, and has our sums in sorted order and our interactions in it.

    Attributes:
        training: whether the graph is one of a training step's two.
        gain_us: what the regions gain by their own measurements.
        streamed_us: None in training too where the gain is clear by a few calls before the GPU is at its clocks.
        eager_us: by eager's kernels, where they are what runs.
    """

    regions: int
    backward: bool
    training: bool
    gain_us: float
    streamed_us: float | None
    without_us: float | None
    eager_us: float | None = None

    @property
    def streams(self) -> bool:
        """Whether the graph with its regions is the one that runs."""
        if self.eager_us is not None:
            return False
        return self.streamed_us is None or self.without_us is None or self.streamed_us <= self.without_us

    @property
    def inductor_us(self) -> float | None:
        """What Inductor takes by itself, or of a graph that is regions and nothing else, with activations as epilogues
        of its products; None where that was not timed, as in training."""
        return None if self.training else self.without_us


def wholes() -> list[WholeTiming]:
    """The graphs that this process has compiled so far, with the times that decided."""
    return list(_wholes)


def measured(timings: Sequence[WholeTiming]) -> tuple[float | None, float | None]:
    """Microseconds of one call of all these graphs, as they run and by Inductor alone; None where one is not known."""
    if not timings:
        return None, None
    kept = total_us(t.streamed_us if t.streams else t.without_us if t.eager_us is None else t.eager_us for t in timings)
    return kept, total_us(t.inductor_us for t in timings)


def is_far_ahead(step_us: float | None, others_us: float) -> bool:
    """Whether a decode step takes far less than all else would."""
    return step_us is not None and step_us <= margins.STEP * others_us


def least_us(graph: fx.Graph, device: Device) -> float:
    """What a graph's products and attention take at least, each a launch that reads its operands."""
    operands = [
        [v for n in node.all_input_nodes if (v := value(n)) is not None] for node in graph.nodes if of_node(node)
    ]
    moved = sum(t.numel() * t.element_size() for each in operands for t in each)
    return 1e6 * (len(operands) * device.launch_s + moved / device.dram_bytes_per_s)


@dataclass(frozen=True)
class Whole:
    """The choice for one graph.

    Args:
        patches: Inductor's configuration for the graph.
        plans: those of the launches that the graph calls.
        originals: the values that Dynamo compiles for, None where one is gone: indices among them are in range.
        beside_us: what operators of ours that are no pipelines gain, by their own measurements.
        saved_us: what Inductor saves by fusing over the borders of regions, as predicted; None where that is not known.
        is_part: whether it is one of several graphs of a model.
    """

    options: Options
    target: Target
    patches: Mapping[str, Any]
    plans: Sequence[Plan]
    originals: Sequence[Any]
    beside_us: float = 0.0
    saved_us: float | None = None
    is_part: bool = False

    def choose(
        self,
        streamed: fx.GraphModule,
        plain: fx.GraphModule,
        compiled: Callable[..., Any],
        fakes: Sequence[Any],
        kwargs: Mapping[str, Any],
        step: tuple[fx.GraphModule, Shape] | None = None,
        least_us: float | None = None,
    ) -> Any:
        """The compiled graph that runs.

        Args:
            streamed, plain: the graph with and without regions, not decomposed.
            step: the graph as a decode step that is one kernel, if it is one: then it is timed in the place of eager's
                kernels.
            compiled: compiles one of them, with changes to Inductor's arguments; ``by_eager``: into calls of eager's
                kernels.
            fakes: the graph's arguments as fake tensors and symbolic sizes.
            least_us: what any other way takes at least: the step alone is timed, and None is the answer unless it takes
                far less.
        """
        kind = (len(self.plans), bool(kwargs.get("is_backward")), not kwargs.get("is_inference", False))
        if not self.measures():
            _wholes.append(WholeTiming(*kind, 0.0, None, None))
            return compiled(streamed)
        # CUDA-graph trees capture by themselves; what is timed here is captured here.
        trees = bool(kwargs.get("cudagraphs"))
        with_host = (self.is_part and not trees) or _waits(plain)
        bare: dict[str, Any] = {"cudagraphs": _no_cudagraphs()} if trees else {}
        ways = {STREAMED: (streamed, False), EAGER: (plain, True), FALLBACK: (plain, False)}
        if step is not None:
            ways[STEP] = (step[0], False)
        made: dict[str, Any] = {}
        values = cache(lambda: self._arguments(streamed, fakes))
        gain_us = sum(plan.gain_us for plan in self.plans) + self.beside_us

        counters = [k for k, n in enumerate(streamed.graph.find_nodes(op="placeholder")) if _counts(n)]
        first = cache(lambda: {k: values()[k].clone() for k in counters})

        def call(candidate: Candidate, values: Sequence[Any]) -> Callable[[], Any]:
            counted, begin = [values[k] for k in counters], list(first().values())

            def run() -> Any:
                if counted:  # a cache that fills up, call by call, would be full
                    torch._foreach_copy_(counted, begin)  # pyright: ignore[reportPrivateImportUsage]
                results = made[candidate.strategy](list(values))
                return results if step is None else _tensors(results)

            return run

        def right(*values: Any) -> list[torch.Tensor]:
            given = [first().get(k, value) for k, value in enumerate(values)]
            nodes = plain.graph.find_nodes(op="placeholder")
            return _tensors(plain(*(v.clone() if is_written(n) else v for n, v in zip(nodes, given, strict=True))))

        def is_clear(us: float | None) -> bool:
            return us is not None and not self._is_tuned and not with_host and gain_us >= self._clear() * us

        def order(candidates: Sequence[Candidate], time: Time) -> Sequence[Candidate]:
            ours, *more, other = candidates
            if step is not None:
                made[STEP] = compiled(step[0], **bare)
                candidates = time(candidates, more)
                if least_us is not None:
                    return [replace(ours, rejected=ALONE), candidates[1], replace(other, rejected=ALONE)]
                if not with_host and self._is_far_behind(streamed, candidates[1].measured_us):
                    return [replace(ours, rejected=FAR), candidates[1], replace(other, rejected=FAR)]
            made[STREAMED] = compiled(streamed, **bare)
            if kind[2] and not with_host and is_clear(self._at_most_us(lambda: call(ours, values()))):
                return [ours, replace(other, rejected=ENOUGH)]
            if step is None:
                made[EAGER] = boxed(fallback.eager(plain))
            ours, *more, other = time(candidates, [ours, *more])
            if ours.measured_us is None and step is None:
                # its regions were each held against Inductor: it runs all the same
                more = [replace(c, rejected=ours.rejected) for c in more]
                return [replace(ours, late=True, rejected=""), *more, replace(other, rejected=ours.rejected)]
            more = [_unless_clear(c, ours.measured_us) for c in more]
            if is_clear(ours.measured_us):
                return [ours, *more, replace(other, rejected=ENOUGH)]
            if ours.measured_us is not None and not with_host and self._pays(gain_us, ours.measured_us):
                return [ours, *more, replace(other, rejected=PAID)]
            made[FALLBACK] = compiled(plain, **bare)
            ours, *more, other = time([ours, *more, other], [other])
            return [ours, *(_unless_clear(c, other.measured_us) for c in more), other]

        # Regions were each held against float64. A step that is one kernel was not.
        held = None if step is None else right
        timer = Timer(Trial("whole graph", values, call, held, with_host=with_host), self.target)
        by_eager = step is None and not kind[2] and fallback.calls_eager()
        asked = self._question(streamed, order, with_host, by_eager, step, least_us is not None)
        found = choose(asked, self.options, timer)
        taken = found.chosen.strategy
        if least_us is not None and not is_far_ahead(found.chosen.measured_us, least_us):
            return None
        others = (c for c in found.candidates if c.usable and c.strategy != EAGER)
        best = min(others, key=time_of, default=found.candidates[0])
        times = (best.measured_us, found.fallback.measured_us)
        _wholes.append(WholeTiming(*kind, gain_us, *times, found.chosen.measured_us if taken == EAGER else None))
        if trees or taken not in made or taken == EAGER:
            graph, calls = ways[taken]
            return compiled(graph, by_eager=True) if calls else compiled(graph)
        return made[taken]

    def _question(
        self,
        streamed: fx.GraphModule,
        order: Order,
        with_host: bool,
        by_eager: bool,
        step: tuple[fx.GraphModule, Shape] | None = None,
        alone: bool = False,
    ) -> Question:
        def decides() -> list[Any]:
            held = [n.meta.get("val") for n in streamed.graph.find_nodes(op="placeholder")]
            shapes = [
                [str(x) for x in (*v.shape, *v.stride(), v.dtype, v.device)] if isinstance(v, torch.Tensor) else str(v)
                for v in held
            ]
            asked = ["whole graph", streamed.code, shapes, str(sorted(self.patches.items())), with_host, by_eager]
            return [*asked, *([STEP] if step else []), *([ALONE] if alone else [])]

        other = Candidate(FALLBACK, None, None)
        ours = [Candidate(STREAMED, None, None, operator="Inductor's code")]
        ours += [Candidate(EAGER, None, None, operator="Inductor's calls")] * by_eager
        if step is not None:
            us = predicted_us(step[1], self.target.hardware)
            ours.append(Candidate(STEP, None, us, operator="one kernel"))
        return Question(
            "whole graph", 0, self.target.hardware, decides, lambda: (*ours, other),
            margin=margins.MARGIN_WHOLE, order=order,
        )  # fmt: skip

    def _is_far_behind(self, streamed: fx.GraphModule, step_us: float | None) -> bool:
        """Whether the regions alone, by their own measurements, and a launch for each attention that is in none, take
        longer than the whole step."""
        regions_us = total_us(plan.chosen.measured_us for plan in self.plans)
        if regions_us is None or self._is_tuned:
            return False
        launches = sum(is_attention(node) or node.target is FEW_QUERIES for node in streamed.graph.nodes)
        return is_far_ahead(step_us, regions_us + 1e6 * self.target.hardware.launch_s * launches)

    def _pays(self, gain_us: float, us: float) -> bool:
        """Whether regions gain more than Inductor saves by fusing their operators with others. ``us``: of the whole."""
        if self._is_tuned or self.saved_us is None:
            return False
        log.info("regions gain %.1f us; Inductor would save %.1f us at their borders", gain_us, self.saved_us)
        return gain_us - self.saved_us >= margins.PAYS * us

    def _at_most_us(self, call: Callable[[], Callable[[], Any]]) -> float | None:
        """Microseconds that a call takes at most, by a few calls before the GPU is at its clocks; None where it fails.

        A training graph whose gain is clear by that is not timed: its times are told to nobody, and to warm up, capture
        and replay both graphs was up to 2 s of GraphCast's first call.
        """
        try:
            with timed("timing"), real(self.target.device):
                return timing.at_most_us(call())
        except (RuntimeError, PlanError) as failure:
            log.debug("timing it will say why", exc_info=failure)
            return None

    def note(self, training: bool) -> None:
        """Record a graph that is regions and nothing else: their own times are the graph's."""
        mine = total_us(p.chosen.measured_us for p in self.plans)
        theirs = total_us(p.fallback.measured_us for p in self.plans)
        _wholes.append(WholeTiming(len(self.plans), False, training, sum(p.gain_us for p in self.plans), mine, theirs))

    @property
    def _is_tuned(self) -> bool:
        """Whether Inductor tunes this graph, and may be faster than the kernels that regions were held against: plans
        are kept whatever Inductor's configuration."""
        return bool(self.patches.get("max_autotune") or self.patches.get("coordinate_descent_tuning"))

    def measures(self) -> bool:
        """Whether the graph is timed with its regions and without."""
        return self.options.strategy == "auto" and prepare.measures(self.options, self.target)

    def _clear(self) -> float:
        """The share of the whole's time that a gain must be to need no second compilation."""
        sums = all(plan.chosen.strategy == STRATEGY for plan in self.plans) and not self.beside_us
        return margins.CLEAR_OF_SUMS if sums else margins.CLEAR

    def _arguments(self, graph: fx.GraphModule, fakes: Sequence[Any]) -> list[Any]:
        """Values for the graph's arguments: the user's own where they are read only and known, else like them.

        Raises:
            NotTimedNow: they would take too much of the device's memory.
        """
        placeholders = graph.graph.find_nodes(op="placeholder")
        given = list(zip(placeholders, fakes, self._known(placeholders), strict=True))
        tensors = [(n, fake, original) for n, fake, original in given if isinstance(fake, torch.Tensor)]
        copied = [fake for n, fake, original in tensors if not _alike(original, fake) or is_written(n)]
        check_room(sum(prod(map(hint, fake.shape)) * fake.dtype.itemsize for fake in copied), self.target.device)

        def like(node: fx.Node, fake: Any, original: Any) -> Any:
            if not isinstance(fake, torch.Tensor):
                return hint(fake)
            if not _alike(original, fake):
                return random_tensor(fake)
            return original.detach().clone() if is_written(node) else original.detach()

        return [like(*each) for each in given]

    def _known(self, placeholders: Sequence[fx.Node]) -> list[Any]:
        """The user's value of each argument; None for others, as values that are saved for the backward graph."""
        if len(self.originals) == len(placeholders):
            return list(self.originals)
        by_name = {f"primals_{index + 1}": value for index, value in enumerate(self.originals)}
        return [by_name.get(node.name) for node in placeholders]


def _unless_clear(eager: Candidate, us: float | None) -> Candidate:
    """Eager's kernels, rejected where the graph by others takes hardly more, ``us``: the host takes longer for them.
    A decode step as it is."""
    if eager.strategy != EAGER or eager.rejected or us is None or eager.measured_us is None:
        return eager
    if eager.measured_us <= margins.EAGER * us:
        return eager
    return replace(eager, rejected="as fast with fewer launches")


def _tensors(results: Sequence[Any]) -> list[torch.Tensor]:
    return [r for r in results if isinstance(r, torch.Tensor)]


def _waits(graph: fx.GraphModule) -> bool:
    """Whether the host asks the GPU for a size, which no CUDA graph can hold."""
    return any(n.meta.get("unbacked_bindings") for n in graph.graph.nodes)


def _no_cudagraphs() -> Any:
    from torch._inductor.utils import BoxedBool

    return BoxedBool(False)


def _alike(original: Any, fake: torch.Tensor) -> bool:
    return (
        isinstance(original, torch.Tensor)
        and type(original) in (torch.Tensor, torch.nn.Parameter)
        and original.dtype == fake.dtype
        and original.device == fake.device
        and list(original.shape) == [hint(d) for d in fake.shape]
        and list(original.stride()) == [hint(d) for d in fake.stride()]
    )


def _counts(node: fx.Node) -> bool:
    """Whether an argument is a number that the graph writes, as how full a cache is."""
    fake = node.meta.get("val")
    return isinstance(fake, torch.Tensor) and fake.dtype == torch.int64 and fake.dim() == 0 and is_written(node)
