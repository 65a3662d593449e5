"""The candidates that a choice is made of where nothing is timed: the few best of each strategy, by the time shown.

The cost model ranks candidates in microseconds; the event loop, whose times are shown, takes milliseconds for one. So
the model says which few are simulated. As those of one strategy are the same under ``auto`` as where that strategy is
asked for, ``auto`` is never shown to take longer than a strategy by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tilestream.devices import Device
from tilestream.plan import margins
from tilestream.plan.candidates import FALLBACK, Candidate, prediction_of
from tilestream.plan.recipes import HALF
from tilestream.plan.shown import pipeline_us
from tilestream.plan.turned import reads_them

STUCK = "the simulator cannot bring it to its end on this device"

Shown = Callable[[], float | None]


def finalists(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The ``margins.EACH_SHOWN`` best legal ones by prediction of every strategy, and of it on half of the SMs."""
    legal = sorted((c for c in candidates if c.pipeline is not None and not c.rejected), key=prediction_of)
    kinds: dict[tuple[str, bool], list[Candidate]] = {}
    for c in legal:
        kinds.setdefault((c.strategy, c.detail.endswith(HALF)), []).append(c)
    return [c for kind in kinds.values() for c in kind[: margins.EACH_SHOWN]]


def simulated(
    candidates: Sequence[Candidate], rows: int, device: Device, fallback_us: Shown, before_us: float = 0.0
) -> tuple[Candidate, ...]:
    """``candidates``, the finalists and the fallback with the time that is shown of them.

    Args:
        fallback_us: what is shown of the fallback.
        before_us: of copies of weights that are made before a call of any pipeline that does not read them as they lie.
    """
    chosen = {id(c) for c in finalists(candidates)}

    def shown(c: Candidate) -> Candidate:
        if c.strategy == FALLBACK:
            return replace(c, simulated_us=fallback_us())
        if id(c) not in chosen or c.pipeline is None:
            return c
        us = pipeline_us(c.pipeline, rows, device)
        return (
            replace(c, rejected=STUCK) if us is None else replace(c, simulated_us=us + before_us * (not reads_them(c)))
        )

    return tuple(map(shown, candidates))
