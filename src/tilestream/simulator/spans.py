"""What a simulation returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Span(NamedTuple):
    """One worker busy with one step: ``tiles`` tiles from number ``tile`` on.

    ``start_us`` to ``end_us`` is the work, from the start of the simulation. ``waited_us`` is how long the worker stood
    still before it, and ``waited_for`` what most of that was for: the name of a tile (its queue was empty), "dram",
    "l2", "weights" or "launch". ``held_us`` is how long it then stood still with its result, and ``held_for`` why: the
    name of a tile and "full" (no room in its queue), or "room" (the word that there is some was on its way).
    ``slow_us`` is, of the work itself, how long it stood still for rows that were still coming from ``slow_for``:
    "dram" or "l2". Names are empty where it did not wait.
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
    held_us: float = 0.0
    held_for: str = ""
    slow_us: float = 0.0
    slow_for: str = ""


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
