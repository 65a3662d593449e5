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

    ``most`` is its number of tiles: a CTA without a tile adds nothing.
    """

    name: str
    engine: Engine
    seconds: float
    most: int


@dataclass(frozen=True)
class Balance:
    """CTAs by stage, passes a second, and what limits them: a stage's name, ``dram`` or ``l2``."""

    ctas: dict[str, int]
    passes_per_s: float
    limit: str


def balance(loads: Sequence[Load], sms: int, dram_s: float = 0.0, l2_s: float = 0.0, *, exact: bool = False) -> Balance:
    """CTAs that maximise the slowest stage's rate; each class has ``sms`` to give and gives all that can be used.

    Args:
        loads: the stages of one pipeline.
        sms: SMs of the device. Each holds one CTA of each class at once.
        dram_s: seconds a pass that DRAM alone takes.
        l2_s: seconds a pass that the L2 alone takes.
        exact: solve with ``scipy.optimize.milp``. The default gives CTAs one by one to the slowest stage, which
            has the same optimum: rates are linear in the CTAs, so the last one given bounds every other choice.

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
            ctas |= _program(part, sms) if exact else _greedy(part, sms)
    seconds = {x.name: x.seconds / ctas[x.name] for x in loads} | {"dram": dram_s, "l2": l2_s}
    limit = max(seconds, key=lambda n: seconds[n])
    return Balance(ctas, 1 / seconds[limit] if seconds[limit] else math.inf, limit)


def _greedy(part: Sequence[Load], sms: int) -> dict[str, int]:
    ctas = {x.name: 1 for x in part}
    slowest = [(-x.seconds, i) for i, x in enumerate(part)]
    heapq.heapify(slowest)
    left = sms - len(part)
    while left and slowest:
        _, i = heapq.heappop(slowest)
        load = part[i]
        if ctas[load.name] >= load.most:
            continue
        ctas[load.name] += 1
        left -= 1
        heapq.heappush(slowest, (-load.seconds / ctas[load.name], i))
    return ctas


def _program(part: Sequence[Load], sms: int) -> dict[str, int]:
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp  # half a second that the closed form need not spend

    n = len(part)
    scale = max(x.seconds for x in part) or 1.0
    most = np.array([float(max(1, min(x.most, sms))) for x in part])
    # Unknowns: CTAs of each stage, then T in passes per ``scale`` seconds.
    rates = np.hstack([-np.diag([1.0] * n), np.array([[x.seconds / scale] for x in part])])
    given = min(float(sms), most.sum())
    total = np.array([[1.0] * n + [0.0]])
    solved = milp(
        np.array([0.0] * n + [-1.0]),
        constraints=[LinearConstraint(rates, -np.inf, 0.0), LinearConstraint(total, given, given)],
        integrality=np.array([1] * n + [0]),
        bounds=Bounds(np.array([1.0] * n + [0.0]), np.append(most, np.inf)),  # pyright: ignore[reportArgumentType]
    )
    if solved.x is None:
        raise PlanError(f"the integer program of {n} stages was not solved: {solved.message}", "report the pipeline")
    return {x.name: int(round(v)) for x, v in zip(part, solved.x[:n], strict=True)}
