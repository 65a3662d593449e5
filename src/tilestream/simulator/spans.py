"""What a simulation returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Span(NamedTuple):
    """One worker busy with one step: ``tiles`` tiles from number ``tile`` on.

    ``start_us`` to ``end_us`` is the work, from the start of the simulation. ``waited_us`` is how long the worker stood
    still before it or at its end, and ``waited_for`` what most of that was for: the name of a tile (its queue was
    empty), the name and "full" (no room in its queue), "dram", "l2", "weights" or "launch"; empty if it never waited.
    """

    launch: int
    stage: str
    replica: int
    worker: int
    tile: int
    tiles: int
    start_us: float
    end_us: float
    waited_us: float = 0.0
    waited_for: str = ""


@dataclass(frozen=True)
class Simulation:
    """Outcome of a simulated run: time, what every worker did, bytes, utilisation.

    ``launches_us`` are the launches' own times, which add up to ``time_us``. ``spans`` are in order of their start.
    ``bytes`` are those of each level (``traffic.Traffic.levels``). ``utilisation`` maps every stage to the working
    share of its SMs while its launch ran, and "tensor", "l2" and "dram" to the share of the device's rate over the
    whole time. ``exact`` is False where only the first ``simulated_rows`` rows were simulated and the rest follows from
    the steady rate; ``note`` says so. ``waits_us`` are, of every stage, the microseconds that its CTAs waited for each
    of ``core.REASONS``, all CTAs together, in the rows that were simulated.
    """

    pipeline: str
    device: str
    rows: int
    time_us: float
    launches_us: tuple[float, ...]
    spans: tuple[Span, ...]
    bytes: dict[str, int]
    utilisation: dict[str, float]
    exact: bool = True
    simulated_rows: int = 0
    note: str = ""
    waits_us: dict[str, dict[str, float]] = field(default_factory=dict)
