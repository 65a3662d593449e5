"""Never slower, as a whole: a graph with its regions against the same graph without them, both timed.

What each region gains, measured alone, is known. Where that is much of the graph's time there is no question; where it
is little, as where regions stand in the way of what Inductor would fuse, or where Inductor tunes its own kernels, the
whole is compiled twice and the winner kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tilestream.graph.real import real
from tilestream.graph.sizes import hint
from tilestream.options import Options
from tilestream.plan.gradients import STRATEGY
from tilestream.plan.planner import Plan, fallback_of
from tilestream.plan.shown import total_us
from tilestream.run.measure import random_tensor
from tilestream.run.stopwatch import timed
from tilestream.run.target import Target
from tilestream.run.timed_once import Entry
from tilestream.run.timing import at_most_us, timed_to_choose

log = logging.getLogger(__name__)

CLEAR = 0.15
"""Regions whose measured gain is at least this share of the whole's time need no second compilation."""

CLEAR_OF_SUMS = 0.02
"""The same where every launch is one of weight gradients. Without us they are a library's products, which Inductor
fuses with nothing, so that regions stand in nobody's way; what it gains by fusing their biases' sums is less than what
is not counted: the sums gained 941 us of GraphCast's backward graph where 388 were counted, 108 of DLRM's for 87."""

MEMORY_SHARE = 0.4
"""Of the free device memory, what copies of a graph's inputs may take."""

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
    """

    regions: int
    backward: bool
    training: bool
    gain_us: float
    streamed_us: float | None
    without_us: float | None

    @property
    def streams(self) -> bool:
        """Whether the graph with its regions is the one that runs."""
        return self.streamed_us is None or self.without_us is None or self.streamed_us <= self.without_us

    @property
    def inductor_us(self) -> float | None:
        """What Inductor takes by itself, or of a graph that is regions and nothing else, with ReLUs as epilogues of its
        products; None where that was not timed, as in training."""
        return None if self.training else self.without_us


def wholes() -> list[WholeTiming]:
    """The graphs that this process has compiled so far, with the times that decided."""
    return list(_wholes)


def measured(timings: Sequence[WholeTiming]) -> tuple[float | None, float | None]:
    """Microseconds of one call of all these graphs, as they run and by Inductor alone; None where one is not known."""
    if not timings:
        return None, None
    kept = total_us(t.streamed_us if t.streams else t.without_us for t in timings)
    return kept, total_us(t.inductor_us for t in timings)


@dataclass(frozen=True)
class Whole:
    """The choice for one graph.

    Args:
        patches: Inductor's configuration for the graph.
        plans: those of the launches that the graph calls.
        originals: the values that Dynamo compiles for, None where one is gone: indices among them are in range.
        beside_us: what operators of ours that are no pipelines gain, by their own measurements.
    """

    options: Options
    target: Target
    patches: Mapping[str, Any]
    plans: Sequence[Plan]
    originals: Sequence[Any]
    beside_us: float = 0.0

    def choose(
        self,
        streamed: fx.GraphModule,
        plain: fx.GraphModule,
        compiled: Callable[..., Any],
        fakes: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """The compiled graph that runs.

        Args:
            streamed, plain: the graph with and without regions, not decomposed.
            compiled: compiles one of them, with changes to Inductor's arguments.
            fakes: the graph's arguments as fake tensors and symbolic sizes.
        """
        kind = (len(self.plans), bool(kwargs.get("is_backward")), not kwargs.get("is_inference", False))
        if not self._measures():
            _wholes.append(WholeTiming(*kind, 0.0, None, None))
            return compiled(streamed)
        gain_us = sum(map(gain, self.plans)) + self.beside_us
        entry = self._entry(streamed)
        kept = entry.load(WholeTiming)
        if kept is not None:
            _wholes.append(kept)
            return compiled(streamed if kept.streams else plain)
        # CUDA-graph trees capture by themselves; what is timed here is captured here.
        trees = bool(kwargs.get("cudagraphs"))
        bare: dict[str, Any] = {"cudagraphs": _no_cudagraphs()} if trees else {}
        arms = [compiled(streamed, **bare)]
        try:
            with timed("timing"), real(self.target.device):
                arguments = self._arguments(streamed, fakes)
                streamed_us = self._timed(_caller(arms[0], arguments), gain_us, training=kind[2])
            without_us = None
            if streamed_us is not None and (gain_us < self._clear() * streamed_us or self._is_tuned):
                arms.append(compiled(plain, **bare))
                with timed("timing"), real(self.target.device):
                    streamed_us, without_us = timed_to_choose([_caller(arm, arguments) for arm in arms])
        except (RuntimeError, MemoryError) as failure:
            log.warning("the graph could not be timed as a whole: %s", failure)
            return compiled(streamed) if trees else arms[0]
        found = WholeTiming(*kind, gain_us, streamed_us, without_us)
        log.info("whole graph: %s", found)
        _wholes.append(found)
        entry.store(found)
        if trees:
            return compiled(streamed if found.streams else plain)
        return arms[0] if found.streams else arms[1]

    def _timed(self, call: Callable[[], Any], gain_us: float, training: bool) -> float | None:
        """Microseconds of a call. None where the gain is clear whatever it takes exactly, in training: its times are
        told to nobody, and to warm up, capture and replay both graphs was up to 2 s of GraphCast's first call."""
        if training and not self._is_tuned and gain_us >= self._clear() * at_most_us(call):
            return None
        (us,) = timed_to_choose([call])
        return us

    def note(self, training: bool) -> None:
        """Record a graph that is regions and nothing else: their own times are the graph's."""
        others = [fallback_of(p.candidates) for p in self.plans]
        chosen = [p.chosen for p in self.plans]
        mine, theirs = (total_us(c.measured_us for c in candidates) for candidates in (chosen, others))
        _wholes.append(WholeTiming(len(self.plans), False, training, sum(map(gain, self.plans)), mine, theirs))

    @property
    def _is_tuned(self) -> bool:
        """Whether Inductor tunes this graph, and may be faster than the kernels that regions were held against: plans
        are kept whatever Inductor's configuration."""
        return bool(self.patches.get("max_autotune") or self.patches.get("coordinate_descent_tuning"))

    def _measures(self) -> bool:
        on_gpu = self.target.kind == "cuda" and self.options.measure and self.options.strategy == "auto"
        return on_gpu and not torch.cuda.is_current_stream_capturing()

    def _clear(self) -> float:
        """The share of the whole's time that a gain must be to need no second compilation."""
        sums = all(plan.chosen.strategy == STRATEGY for plan in self.plans) and not self.beside_us
        return CLEAR_OF_SUMS if sums else CLEAR

    def _arguments(self, graph: fx.GraphModule, fakes: Sequence[Any]) -> list[Any]:
        """Values for the graph's arguments: the user's own where they are read only and known, else like them.

        Raises:
            MemoryError: they would take too much of the device's memory.
        """
        placeholders = graph.graph.find_nodes(op="placeholder")
        known = self._known(placeholders)
        free = torch.cuda.mem_get_info(self.target.device)[0]
        values: list[Any] = []
        made = 0
        for node, fake, original in zip(placeholders, fakes, known, strict=True):
            if not isinstance(fake, torch.Tensor):
                values.append(hint(fake))
                continue
            if _alike(original, fake):
                values.append(original.detach())
                if not is_written(node):
                    continue
                values[-1] = values[-1].clone()
            else:
                values.append(random_tensor(fake))
            made += values[-1].numel() * values[-1].element_size()
            if made > MEMORY_SHARE * free:
                raise MemoryError(f"copies of its inputs would take more than {MEMORY_SHARE:.0%} of the free memory")
        return values

    def _known(self, placeholders: Sequence[fx.Node]) -> list[Any]:
        """The user's value of each argument; None for others, as values that are saved for the backward graph."""
        if len(self.originals) == len(placeholders):
            return list(self.originals)
        by_name = {f"primals_{index + 1}": value for index, value in enumerate(self.originals)}
        return [by_name.get(node.name) for node in placeholders]

    def _entry(self, streamed: fx.GraphModule) -> Entry:
        shapes = [
            [str(x) for x in (*v.shape, *v.stride(), v.dtype, v.device)] if isinstance(v, torch.Tensor) else str(v)
            for v in (n.meta.get("val") for n in streamed.graph.find_nodes(op="placeholder"))
        ]
        about = [streamed.code, shapes, str(sorted(self.patches.items()))]
        return Entry("wholes", about, self.options, self.target)


def gain(plan: Plan) -> float:
    """Microseconds that a pipeline takes less than Inductor alone: measured where both were, else predicted."""
    other = fallback_of(plan.candidates)
    for mine, theirs in (
        (plan.chosen.measured_us, other.measured_us),
        (plan.chosen.predicted_us, other.predicted_us),
    ):
        if mine is not None and theirs is not None:
            return theirs - mine
    return 0.0


def _caller(compiled: Any, arguments: Sequence[Any]) -> Callable[[], Any]:
    return lambda: compiled(list(arguments))


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


def is_written(node: fx.Node) -> bool:
    """Whether the graph writes into this argument, or into a view of it."""
    for user in node.users:
        schema = getattr(user.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            return True
        if schema is not None and any(r.alias_info is not None for r in schema.returns) and is_written(user):
            return True
    return False
