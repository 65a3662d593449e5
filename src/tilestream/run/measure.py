"""Times a region's candidates on the GPU against Inductor, and rejects those that compute something else."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from tilestream.errors import PlanError, TilestreamError
from tilestream.graph.modules import copied
from tilestream.graph.real import real
from tilestream.graph.region import Region
from tilestream.graph.sizes import hint
from tilestream.ir.dtypes import DTYPES
from tilestream.ir.pipeline import Pipeline
from tilestream.plan.planner import Candidate, NotBuiltYet
from tilestream.run import epilogues, fallback, oracle
from tilestream.run.call import RegionCall
from tilestream.run.executable import Executable, build_ahead, executable, first_built
from tilestream.run.spec import spec_of
from tilestream.run.stopwatch import timed
from tilestream.run.target import Target
from tilestream.run.timing import Captured, capture, to_choose

log = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""Once one candidate is timed, those not built by this time are not waited for: a cold call must not take minutes."""


@dataclass
class Arm:
    """A call captured in a CUDA graph, and its times in microseconds."""

    captured: Captured
    samples: list[float]

    @property
    def us(self) -> float:
        return statistics.median(self.samples)


class Measurer:
    """The ``measure`` of ``planner.plan`` for one region, on fresh random inputs.

    Times are medians over CUDA-graph replays, in rounds that take all candidates in turn: clocks change, but what they
    do to one they do to all. Those that are timed later, as the fallback is, are timed beside the fastest so far, and
    their times are given at its clocks. Before a candidate is timed, its results must be within the oracle's tolerance.

    Args:
        region: what is measured.
        target: the GPU.
        against: whether the fallback is an alternative; not where a strategy is forced.
        patience_s: the same as ``PATIENCE_S``, for this region.
        constant: whether weights are copied once, not at every call.
        graphs: of candidates that Inductor compiles, by their ``detail``, what it is given where that is not the
            region's own graph: with a smaller region in it, as the whole graph would have it.
    """

    def __init__(
        self,
        region: Region,
        target: Target,
        against: bool = True,
        patience_s: float | None = None,
        constant: bool = False,
        graphs: Mapping[str, fx.GraphModule] = MappingProxyType({}),
    ) -> None:
        self._region = region
        self._target = target
        self._against = against
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self._constant = constant
        self._graphs = graphs
        self._inputs: list[Any] | None = None
        self._fastest: Arm | None = None
        self._eager: list[float] = []
        self._exact: list[torch.Tensor] = []

    def __call__(self, candidates: Sequence[Candidate]) -> list[float | Exception]:
        """Microseconds of one call of each candidate. Or, in their places, why there is none:

        ``PlanError`` where results are wrong, with the errors, or where kernels take too long to build while others are
        ready; any ``TilestreamError`` or ``RuntimeError`` of building and running it.
        """
        with timed("timing"):
            start_s = time.monotonic()
            build_ahead([c.pipeline for c in candidates if c.pipeline is not None], self._target.kind)
            self._make_inputs()
            found: dict[int, Arm | Exception] = {}
            left = dict(enumerate(candidates))
            while left:
                index = self._next_built(left, start_s if any(isinstance(x, Arm) for x in found.values()) else None)
                candidate = left.pop(index)
                log.info("%s: %d of %d, %s", self._region.name, len(found) + 1, len(candidates), candidate.name)
                try:
                    found[index] = self._arm(candidate)
                except (TilestreamError, RuntimeError) as error:
                    found[index] = error
            in_order = [found[index] for index in range(len(candidates))]
            try:
                times = iter(self._times([x for x in in_order if isinstance(x, Arm)]))
            except RuntimeError as fault:
                return [fault if isinstance(x, Arm) else x for x in in_order]
            results = [next(times) if isinstance(x, Arm) else x for x in in_order]
        for candidate, result in zip(candidates, results, strict=True):
            if isinstance(result, float):
                log.info("%s: %s takes %.1f us", self._region.name, candidate.name, result)
        return results

    def _make_inputs(self) -> None:
        if self._inputs is None:
            with real(self._target.device):
                self._inputs = random_arguments(self._region)
                self._exact = float64(self._region.graph, self._inputs)
                eager = self._region.graph(*self._inputs)
                self._eager = [oracle.error(own, exact) for own, exact in zip(eager, self._exact, strict=True)]

    def _next_built(self, left: Mapping[int, Candidate], start_s: float | None) -> int:
        """The first of those that are left whose kernels are built, or that is not worth the wait.

        Args:
            start_s: since when candidates are timed; None where none is ready yet, and one is waited for.
        """
        patience_s = None if start_s is None or not self._against else start_s + self._patience_s - time.monotonic()
        groups = [[c.pipeline] if c.pipeline is not None else [] for c in left.values()]
        built = first_built(groups, self._target.kind, None if patience_s is None else max(0.0, patience_s))
        return list(left)[built or 0]

    def _arm(self, candidate: Candidate) -> Arm:
        """The candidate, captured and found right.

        Raises:
            NotBuiltYet: its kernel is not there.
            PlanError: it computes a wrong result.
        """
        if candidate.pipeline is None:
            with timed("inductor"):
                given = self._graphs.get(candidate.detail)
                call = inductors(self._region) if given is None else fallback.rest(given)
                with real(self._target.device):
                    arm = self._captured(call)
                    if given is not None:
                        self._check(candidate, arm)
                    return arm
        if first_built([[candidate.pipeline]], self._target.kind, 0.0) is None:
            raise NotBuiltYet(
                f"{self._region.name}: {candidate.name} is not timed: it takes more than"
                f" {self._patience_s:.0f} s to build",
                f"strategy={candidate.strategy!r} waits for every candidate of that strategy",
            )
        with real(self._target.device):
            spec = spec_of(self._region, candidate.pipeline, self._target.kind, self._constant)
            arm = self._captured(RegionCall(spec, self._target.device, self._build, rescue=False).on_values)
            self._check(candidate, arm)
        return arm

    def _times(self, arms: list[Arm]) -> list[float]:
        """Microseconds of the arms, at the clocks at which the fastest of earlier ones was timed."""
        if not arms:
            return []
        before = self._fastest
        then_us = before.us if before is not None else 0.0
        if before is not None:
            before.samples.clear()
        together = arms if before is None else [before, *arms]
        with real(self._target.device):
            _interleave(together)
        self._fastest = min(together, key=lambda arm: arm.us)
        return [arm.us if before is None else arm.us * then_us / before.us for arm in arms]

    def _build(self, pipeline: Pipeline) -> Executable:
        return executable(pipeline, self._target.kind, self._target.device)

    def _captured(self, call: fallback.Call) -> Arm:
        assert self._inputs is not None
        inputs = self._inputs
        return Arm(capture(lambda: call(inputs)), [])

    def _check(self, candidate: Candidate, arm: Arm) -> None:
        """Replay over poisoned outputs and compare: every element must be written, and right."""
        outputs: Any = arm.captured.outputs
        for output in outputs:
            output.fill_(float("nan"))
        arm.captured.graph.replay()
        torch.cuda.synchronize()
        error, own, good = oracle.judge_by(outputs, self._eager, self._exact)
        if not good:
            message = (
                f"{self._region.name}: {candidate.name} computes a wrong result: its error against float64 is "
                f"{error:.2e}, eager's is {own:.2e}"
            )
            log.error("%s. It is not used; please report this", message)
            raise PlanError(message, "report this with the model; the other candidates are used")


_begun: WeakKeyDictionary[fx.GraphModule, Callable[[], fallback.Call]] = WeakKeyDictionary()


def begin_inductors(region: Region) -> None:
    """Have Inductor's processes compile the kernels of a region that will be timed on it, while others are timed."""
    with timed("inductor"):
        _begun[region.graph] = fallback.begin(as_left(region))


def inductors(region: Region) -> fallback.Call:
    """What Inductor makes of a region, which may have begun."""
    begun = _begun.pop(region.graph, None)
    return fallback.rest(as_left(region)) if begun is None else begun()


def as_left(region: Region) -> fx.GraphModule:
    """What Inductor is given of a region that is none: ReLUs are epilogues of products, as in the whole graph."""
    graph = copied(region.graph)
    epilogues.fuse(graph, {})
    return graph


def _interleave(arms: Sequence[Arm]) -> None:
    """Add the samples of one comparison to every arm."""
    for arm, samples in zip(arms, to_choose([arm.captured for arm in arms]), strict=True):
        arm.samples += samples


def random_arguments(region: Region, seed: int = 0) -> list[Any]:
    """Values for ``region.arguments``: constants as they are, sizes of the call that was captured, normal numbers.

    Weights are scaled so that activations stay of order one.
    """
    loads = [op for op in region.program.stages[0].ops if op.index]
    tables = {op.params[0] for op in loads}
    weights = {
        p.index for p in region.parameters if len(region.program.tensor(p.tensor).shape) == 2 and p.tensor not in tables
    }
    values: list[Any] = []
    fixed: set[int] = set()
    generator = torch.Generator(region.device).manual_seed(seed)
    for index, node in enumerate(n for n in region.graph.graph.nodes if n.op == "placeholder"):
        fake = node.meta["val"]
        if "constant" in node.meta:
            fixed.add(index)
            values.append(node.meta["constant"])
            continue
        if not isinstance(fake, torch.Tensor):
            values.append(hint(fake))
            continue
        scale = 1 / math.sqrt(region_width(region, index)) if index in weights else 1.0
        values.append(random_tensor(fake, generator, scale))
    heights = {p.tensor: values[p.index].shape[0] for p in region.parameters if p.tensor in tables}
    for operand in region.inputs:  # rows from all over the table: the same again and again would stay near
        least = min((heights[op.params[0]] for op in loads if op.index == operand.tensor), default=0)
        if least and operand.index not in fixed:
            values[operand.index].random_(0, least, generator=generator)
    return values


def random_tensor(fake: torch.Tensor, generator: torch.Generator | None = None, scale: float = 1.0) -> torch.Tensor:
    """A real tensor with the sizes, strides, dtype and device of ``fake``: normal numbers, zeros where integers.

    Strides may be any: transposed, with gaps, or zero, as an expanded tensor has. Zeros are indices that exist.
    """
    shape, strides = [hint(d) for d in fake.shape], [hint(d) for d in fake.stride()]
    held = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0
    if fake.dtype.is_floating_point:
        memory = (scale * torch.randn(held, device=fake.device, generator=generator)).to(fake.dtype)
    else:
        memory = torch.zeros(held, device=fake.device, dtype=fake.dtype)
    return memory.as_strided(shape, strides)


def region_width(region: Region, index: int) -> int:
    """Input features of the weight that is argument ``index``."""
    operand = next(p for p in region.parameters if p.index == index)
    return region.program.tensor(operand.tensor).shape[-1]


class _Double(fx.Interpreter):
    """Runs an ATen graph in float64: no cast rounds."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.aten._softmax.default or target is torch.ops.aten._log_softmax.default:
            args = (*args[:2], False)
        args = tuple(map(_widest, args))
        return super().call_function(target, args, {name: _widest(v) for name, v in kwargs.items()})


def _widest(argument: Any) -> Any:
    return torch.float64 if isinstance(argument, torch.dtype) and argument in DTYPES else argument


def float64(graph: fx.GraphModule, values: Sequence[Any]) -> list[torch.Tensor]:
    """The results of an ATen graph computed in float64 from start to end."""
    double = [v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in values]
    return list(_Double(graph).run(*double))
