"""Two ways to run an operator, timed once a kind of it: kept in the process and on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilestream.errors import PlanError
from tilestream.options import Options
from tilestream.plan.cache import load_sealed, store_sealed, versions
from tilestream.plan.planner import MARGIN
from tilestream.run import oracle
from tilestream.run.target import Target
from tilestream.run.timing import capture, to_choose

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """Microseconds of a way to run an operator, and of the one that the graph has."""

    other_us: float
    present_us: float

    @property
    def wins(self) -> bool:
        """Whether the graph is to have the other one."""
        return self.other_us <= MARGIN * self.present_us


_choices: dict[str, Choice] = {}


def choose(folder: str, kind: Any, options: Options, target: Target, measured: Callable[[], Choice]) -> Choice:
    """The choice for ``kind``, a frozen dataclass of all that decides times: from this process, the disk, or now."""
    about = [folder, vars(kind), target.hardware.name, versions()]
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    path = options.cache_folder / folder / f"{key}.json"
    kept = _choices.get(key) or (load_sealed(path) if options.cache else None)
    made = Choice(**kept) if isinstance(kept, dict) else kept
    if made is None:
        made = measured()
        if options.cache:
            store_sealed(path, vars(made))
    log.info("%s: %s", kind, made)
    _choices[key] = made
    return made


def timed(name: str, other: Callable[[], Tensor], present: Callable[[], Tensor], exact: Tensor) -> Choice:
    """Both captured and timed in turn; the other one held to ``exact``, in float64, first.

    Raises:
        PlanError: it computes something else.
    """
    arms = [capture(other), capture(present)]
    out: Any = arms[0].outputs
    out.fill_(float("nan"))
    arms[0].graph.replay()
    torch.cuda.synchronize()
    seen: Any = arms[1].outputs
    error, own, good = oracle.judge([out], [seen], [exact])
    if not good:
        raise PlanError(
            f"{name} computes a wrong result: its error against float64 is {error:.2e}, that of what the graph has"
            f" {own:.2e}",
            "report this with the model; what the graph has is used",
        )
    other_us, present_us = (statistics.median(s) for s in to_choose(arms))
    return Choice(other_us, present_us)
