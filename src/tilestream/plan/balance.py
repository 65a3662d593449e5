"""How many CTAs each stage of a spatial pipeline gets: Kitsune's integer program (section 3.3, algorithm 2).

The paper maximises the throughput ``T`` of a pipeline subject to ``T <= t_i r_i s_i`` for every stage ``i``,
``T DRAM_bytes <= DRAM_BW``, ``T L2_bytes <= L2_BW``, and the CTAs of each class (SIMT, TENSOR) adding up to the
number of SMs. ``t_i`` is the stage's rate as a kernel of its own, ``s_i = 1 / u_i`` what it gains when its operands
are on the chip, and ``r_i`` what it loses on ``a_i`` CTAs. With ``r_i = a_i / SMs`` their product is ``a_i / load_i``
where ``load_i`` is the seconds that the stage's work keeps the busiest pipe of one SM.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilestream.errors import PlanError
from tilestream.simulator.workload import Engine


@dataclass(frozen=True)
class Load:
    """What one stage asks for: ``seconds`` of one SM for a whole pass, and the ``most`` CTAs that it can use.

    ``most`` is its number of tiles: a CTA without a tile adds nothing. ``counts`` are the numbers of CTAs that it can
    have, rising from 1, where these are not all.
    """

    name: str
    engine: Engine
    seconds: float
    most: int
    counts: Sequence[int] = ()

    def possible(self, sms: int) -> Sequence[int]:
        return self.counts or range(1, min(self.most, sms) + 1)


@dataclass(frozen=True)
class Balance:
    """CTAs by stage, passes a second, and what limits them: a stage's name, ``dram`` or ``l2``."""

    ctas: dict[str, int]
    passes_per_s: float
    limit: str


def balance(loads: Sequence[Load], sms: int, dram_s: float = 0.0, l2_s: float = 0.0) -> Balance:
    """CTAs that maximise the slowest stage's rate; each class has ``sms`` to give and gives all that can be used.

    They are given one by one to the slowest stage (as many more as it can take), which has the optimum of the integer
    program: rates are linear in the CTAs, so the last one given bounds every other choice
    (``tests/studies/test_kitsune_balance.py`` holds it against a solver).

    Args:
        loads: the stages of one pipeline.
        sms: SMs of the device. Each holds one CTA of each class at once.
        dram_s: seconds a pass that DRAM alone takes.
        l2_s: seconds a pass that the L2 alone takes.

    Raises:
        PlanError: a class has more stages than there are SMs.
    """
    ctas: dict[str, int] = {}
    for engine in Engine:
        part = [x for x in loads if x.engine is engine]
        if len(part) > sms:
            raise PlanError(
                f"{len(part)} {engine.value} stages do not fit on {sms} SMs", "cut the region, or use a larger device"
            )
        if part:
            ctas |= _greedy(part, sms)
    seconds = {x.name: x.seconds / ctas[x.name] for x in loads} | {"dram": dram_s, "l2": l2_s}
    limit = max(seconds, key=lambda n: seconds[n])
    return Balance(ctas, 1 / seconds[limit] if seconds[limit] else math.inf, limit)


def _greedy(part: Sequence[Load], sms: int) -> dict[str, int]:
    counts = [x.possible(sms) for x in part]
    at = [0] * len(part)
    slowest = [(-x.seconds, i) for i, x in enumerate(part)]
    heapq.heapify(slowest)
    left = sms - len(part)
    while left and slowest:
        _, i = heapq.heappop(slowest)
        if at[i] + 1 == len(counts[i]) or (more := counts[i][at[i] + 1] - counts[i][at[i]]) > left:
            continue
        at[i] += 1
        left -= more
        heapq.heappush(slowest, (-part[i].seconds / counts[i][at[i]], i))
    return {x.name: counts[i][at[i]] for i, x in enumerate(part)}
