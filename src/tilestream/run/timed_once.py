"""Two ways to run an operator, timed once a kind of it: kept in the process and on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from tilestream.errors import PlanError
from tilestream.options import Options
from tilestream.plan.cache import load_sealed, store_sealed, versions
from tilestream.plan.planner import MARGIN
from tilestream.run import oracle
from tilestream.run.target import Target
from tilestream.run.timing import Captured, capture, to_choose

log = logging.getLogger(__name__)

T = TypeVar("T")


class Entry:
    """What was timed, in the cache on disk: a file named by a hash of all that decides the times.

    Args:
        folder: the cache's, for entries of one kind.
        about: what decides beside the hardware and the versions of what compiles, as JSON has it.
    """

    def __init__(self, folder: str, about: Any, options: Options, target: Target) -> None:
        text = json.dumps([folder, about, target.hardware.name, versions()], sort_keys=True)
        self.key = hashlib.sha256(text.encode()).hexdigest()
        self._path = options.cache_folder / folder / f"{self.key}.json"
        self._used = options.cache

    def load(self, made: type[T]) -> T | None:
        """What ``store`` wrote of a dataclass; None where there is nothing, or nothing of these fields."""
        found = load_sealed(self._path) if self._used else None
        try:
            return None if found is None else made(**found)
        except TypeError:
            return None

    def store(self, found: Any) -> None:
        """Write a dataclass of numbers, unless the options say that nothing is kept."""
        if self._used:
            store_sealed(self._path, vars(found))


@dataclass(frozen=True)
class Choice:
    """Microseconds of a way to run an operator, and of the one that the graph has."""

    other_us: float
    present_us: float

    @property
    def gain_us(self) -> float:
        return self.present_us - self.other_us

    @property
    def wins(self) -> bool:
        """Whether the graph is to have the other one."""
        return self.other_us <= MARGIN * self.present_us


_choices: dict[str, Choice] = {}


def choose(folder: str, kind: Any, options: Options, target: Target, measured: Callable[[], Choice]) -> Choice:
    """The choice for ``kind``, a frozen dataclass of all that decides times: from this process, the disk, or now."""
    entry = Entry(folder, asdict(kind), options, target)
    made = _choices.get(entry.key) or entry.load(Choice)
    if made is None:
        made = measured()
        entry.store(made)
    log.info("%s: %s", kind, made)
    _choices[entry.key] = made
    return made


def timed(name: str, other: Callable[[], Tensor], present: Callable[[], Tensor], exact: Tensor) -> Choice:
    """Both captured and timed in turn; the other one held to ``exact``, in float64, first.

    Raises:
        PlanError: it computes something else.
    """
    arms = [capture(other), capture(present)]
    seen: Any = arms[1].outputs
    hold(name, arms[0], seen, exact)
    other_us, present_us = (statistics.median(s) for s in to_choose(arms))
    return Choice(other_us, present_us)


def hold(name: str, arm: Captured, present: Tensor, exact: Tensor) -> None:
    """Replay ``arm`` over a poisoned result: every element must be written, and be about as near to float64 as that of
    what the graph has.

    Raises:
        PlanError: one is not.
    """
    out: Any = arm.outputs
    out.fill_(float("nan"))
    arm.graph.replay()
    torch.cuda.synchronize()
    error, own, good = oracle.judge([out], [present], [exact])
    if not good:
        raise PlanError(
            f"{name} computes a wrong result: its error against float64 is {error:.2e}, that of what the graph has"
            f" {own:.2e}",
            "report this with the model; what the graph has is used",
        )
