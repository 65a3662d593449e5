"""The cost model against every timed variant: rank correlation, error, and where the true best stands."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from scipy.stats import spearmanr

from tilestream import devices
from tilestream.kernels.coefficients.shared_tile import H200_SHARED_TILE, Coefficients
from tilestream.kernels.product.sharing import Middle
from tilestream.studies.flashfuser import measured
from tilestream.studies.flashfuser.hand_written import cost
from tilestream.studies.flashfuser.measured import Variant, variants


@dataclass(frozen=True)
class Score:
    """One shape, warm or cold. ``rank``: the place that the model gives to the variant that is truly best, from 1.

    ``lost``: how much slower than that the variant is that the model calls best; ``middles`` whether the model and
    the measurements agree on L2, DSM or nothing for the middle.
    """

    shape: str
    cold: bool
    held_out: bool
    count: int
    error: float
    worst: float
    correlation: float
    rank: int
    lost: float
    middle: Middle
    measured_middle: Middle

    def __str__(self) -> str:
        kind = "held out" if self.held_out else "fitted"
        return (
            f"{self.shape} {'cold' if self.cold else 'warm'} ({kind}, {self.count} variants): mean error"
            f" {self.error:.1%}, worst {self.worst:.2f}x, rank correlation {self.correlation:.2f}, true best is"
            f" number {self.rank}, choice {self.lost:.1%} slower than it; middle {self.middle}, measured"
            f" {self.measured_middle}"
        )


def judged(rates: Coefficients = H200_SHARED_TILE) -> list[Score]:
    """Scores of every shape that was timed, held-out shapes first."""
    shapes = sorted({v.shape for v in variants()}, key=lambda s: (not _any(s).held_out, s))
    return [score(s, cold, rates) for s in shapes for cold in (False, True)]


def score(shape: str, cold: bool, rates: Coefficients = H200_SHARED_TILE) -> Score:
    device = devices.get("h200")
    rows = [v for v in variants() if v.shape == shape]
    predicted = [cost(v.chain, v.variant, device, cold, rates).us for v in rows]
    true = [v.cold_us if cold else v.warm_us for v in rows]
    errors = [abs(p / t - 1) for p, t in zip(predicted, true, strict=True)]
    factors = [max(p / t, t / p) for p, t in zip(predicted, true, strict=True)]
    best, chosen = true.index(min(true)), predicted.index(min(predicted))
    return Score(
        shape,
        cold,
        rows[0].held_out,
        len(rows),
        sum(errors) / len(errors),
        max(factors),
        float(spearmanr(predicted, true)[0]),  # type: ignore[arg-type]
        1 + sum(p < predicted[best] for p in predicted),
        true[chosen] / true[best] - 1,
        rows[chosen].variant.middle,
        rows[best].variant.middle,
    )


def phases() -> list[dict[str, Any]]:
    """When each phase is over by the model and by the kernels' clocks, microseconds from the start of the CTAs.

    The fit saw whole launches alone, and of those G4's and G8's.
    """
    device, made = devices.get("h200"), []
    for shape, (v, told) in measured.clocks().items():
        p = cost(v.chain, v.variant, device)
        launch, *others = (part.seconds for part in p.parts)
        steps = (launch - H200_SHARED_TILE.gap_s + others[0], *others[1:])
        ends = [s * 1e6 for s in accumulate(steps)]
        made.append({"shape": shape, "held_out": v.held_out, "predicted_us": ends, "clocks_us": list(told)})
    return made


def _any(shape: str) -> Variant:
    return next(v for v in variants() if v.shape == shape)
