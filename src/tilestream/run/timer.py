"""Times candidates side by side on a GPU, and rejects those that compute something else: the ``Measure`` of choices."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilestream.errors import PlanError, TilestreamError
from tilestream.graph.real import real
from tilestream.ir.pipeline import Pipeline
from tilestream.plan.candidates import FALLBACK, Candidate
from tilestream.plan.chooser import NotTimedNow
from tilestream.run import oracle, timing
from tilestream.run.executable import build_ahead, first_built
from tilestream.run.stopwatch import timed
from tilestream.run.target import Target

log = logging.getLogger(__name__)


def _own_pipeline(candidate: Candidate) -> Sequence[Pipeline]:
    return () if candidate.pipeline is None else (candidate.pipeline,)


@dataclass(frozen=True)
class Trial:
    """The same thing computed by several candidates, on values that are made up.

    Args:
        name: of what is computed.
        make: the values, on the target's device.
        call: builds a candidate; what it returns runs it on the values and returns its results.
        plain: the same by PyTorch's operators, of the values in their own precision or in float64; None where nothing
            is held against it.
        pipelines: what of a candidate is compiled in the background, before it is built.
        beside_us: microseconds that a candidate takes besides its call.
        with_host: whether calls are timed as Python makes them, each by itself, and not as CUDA graphs.
    """

    name: str
    make: Callable[[], Sequence[Any]]
    call: Callable[[Candidate, Sequence[Any]], Callable[[], Sequence[Tensor]]]
    plain: Callable[..., Sequence[Tensor]] | None = None
    pipelines: Callable[[Candidate], Sequence[Pipeline]] = _own_pipeline
    beside_us: Callable[[Candidate], float] = lambda _: 0.0
    with_host: bool = False

    @staticmethod
    def of_two(
        name: str,
        make: Callable[[], Sequence[Any]],
        ours: Callable[..., Sequence[Tensor]],
        library: Callable[..., Sequence[Tensor]],
        plain: Callable[..., Sequence[Tensor]],
    ) -> Trial:
        """One way of ours beside a library's, which is the fallback; each a function of the values."""

        def call(candidate: Candidate, values: Sequence[Any]) -> Callable[[], Sequence[Tensor]]:
            return partial(library if candidate.strategy == FALLBACK else ours, *values)

        return Trial(name, make, call, plain)


@dataclass
class Arm:
    """A candidate, captured in a CUDA graph, and the microseconds that a call of it takes."""

    candidate: Candidate
    captured: timing.Captured
    us: float = math.inf


class Timer:
    """The ``chooser.Measure`` of a trial.

    Times are medians over CUDA-graph replays, in rounds that take all candidates in turn: clocks change, but what they
    do to one they do to all. Those that are timed later, as the fallback is, are timed beside the fastest so far, and
    their times are given at the clocks of the first. Before a candidate is timed, its results must be within the
    oracle's tolerance.

    Args:
        patience_s: how long kernels are waited for once one candidate is there; infinite: until all are built.
    """

    def __init__(self, trial: Trial, target: Target, patience_s: float = math.inf) -> None:
        self.trial = trial
        self._target = target
        self._patience_s = patience_s
        self._values: Sequence[Any] | None = None
        self._right: tuple[list[float], list[Tensor]] | None = None
        self._fastest: Arm | None = None

    def __call__(self, candidates: Sequence[Candidate]) -> list[float | Exception]:
        """Microseconds of one call of each candidate. Or, in their places, why there is none:

        ``PlanError`` where results are wrong, with the errors; ``NotTimedNow`` where kernels take too long to build
        while others are ready, or memory is short; any ``TilestreamError`` or ``RuntimeError`` of building and running.
        """
        with timed("timing"), real(self._target.device):
            start_s = time.monotonic()
            build_ahead([p for c in candidates for p in self.trial.pipelines(c)], self._target.kind)
            found: dict[str, Arm | Exception] = {}
            left = list(candidates)
            while left:
                candidate, is_built = self._next(left, found, start_s)
                log.info("%s: %d of %d, %s", self.trial.name, len(found) + 1, len(candidates), candidate.name)
                try:
                    found[candidate.name] = self._arm(candidate, is_built)
                except torch.OutOfMemoryError as short:
                    found[candidate.name] = NotTimedNow(f"{self.trial.name}: {short}", "leave the GPU more memory")
                except (TilestreamError, RuntimeError) as error:
                    found[candidate.name] = error
            arms = [x for x in found.values() if isinstance(x, Arm)]
            try:
                self._take_times(arms)
            except RuntimeError as fault:
                found |= {arm.candidate.name: fault for arm in arms}
        return [self._result(c, found[c.name]) for c in candidates]

    def _result(self, candidate: Candidate, found: Arm | Exception) -> float | Exception:
        if isinstance(found, Exception):
            return found
        us = found.us + self.trial.beside_us(candidate)
        log.info("%s: %s takes %.1f us", self.trial.name, candidate.name, us)
        return us

    def _next(self, left: list[Candidate], found: dict[str, Arm | Exception], start_s: float) -> tuple[Candidate, bool]:
        """The first of those that are left whose kernels are built, or that is not worth the wait; whether they are.

        As long as none is captured, one is waited for.
        """
        waits = math.isinf(self._patience_s) or not any(isinstance(x, Arm) for x in found.values())
        patience_s = None if waits else max(0.0, start_s + self._patience_s - time.monotonic())
        built = first_built([self.trial.pipelines(c) for c in left], self._target.kind, patience_s)
        return left.pop(built or 0), built is not None

    def _arm(self, candidate: Candidate, is_built: bool) -> Arm:
        """The candidate, captured and found right.

        Raises:
            NotTimedNow: its kernel is not there.
            PlanError: it computes a wrong result.
        """
        if not is_built:
            raise NotTimedNow(
                f"{self.trial.name}: {candidate.name} is not timed: it takes more than {self._patience_s:.0f} s to"
                " build",
                f"strategy={candidate.strategy!r} waits for every candidate of that strategy",
            )
        if self._values is None:
            self._values = self.trial.make()
        arm = Arm(candidate, timing.capture(self.trial.call(candidate, self._values)))
        if self.trial.plain is not None and candidate.usable:  # the fallback's results are PyTorch's business
            self._check(arm, self.trial.plain)
        return arm

    def _take_times(self, arms: list[Arm]) -> None:
        """Time the arms, beside the fastest of earlier ones, at the clocks at which that was timed."""
        if not arms:
            return
        together = arms if self._fastest is None else [self._fastest, *arms]
        to_choose = timing.one_by_one if self.trial.with_host else timing.to_choose
        now_us = [statistics.median(samples) for samples in to_choose([arm.captured for arm in together])]
        scale = 1.0 if self._fastest is None else self._fastest.us / now_us[0]
        for arm, us in zip(together, now_us, strict=True):
            arm.us = us * scale
        self._fastest = min(together, key=lambda arm: arm.us)

    def _check(self, arm: Arm, plain: Callable[..., Sequence[Tensor]]) -> None:
        """Replay over poisoned results and compare: every element must be written, and right."""
        assert self._values is not None
        if self._right is None:
            exact = oracle.in_float64(plain, self._values)
            eager = plain(*self._values)
            self._right = [oracle.error(own, right) for own, right in zip(eager, exact, strict=True)], exact
        outputs: Any = arm.captured.outputs
        for output in outputs:
            output.fill_(float("nan"))
        arm.captured.replay()
        error, own, good = oracle.judge_by(outputs, *self._right)
        if not good:
            message = (
                f"{self.trial.name}: {arm.candidate.name} computes a wrong result: its error against float64 is "
                f"{error:.2e}, eager's is {own:.2e}"
            )
            log.error("%s. It is not used; please report this", message)
            raise PlanError(message, "report this with the model; the other candidates are used")
