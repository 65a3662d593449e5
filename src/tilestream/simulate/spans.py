"""What a simulation returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """One worker busy with one step of tiles.

    ``start_us`` and ``end_us`` bound the work itself. ``waited_us`` is how long the worker stood idle
    before it, and ``waited_for`` what it waited for: a queue's tile name (``"h1"``: empty,
    ``"h2 full"``: no credit), ``"weights"``, ``"launch"`` or ``""``.
    """

    worker: int
    stage: str
    replica: int
    tile: int
    tiles: int
    start_us: float
    end_us: float
    waited_us: float = 0.0
    waited_for: str = ""


@dataclass(frozen=True)
class Simulation:
    """Outcome of a simulated run: time, work of every worker, bytes and utilisation.

    ``spans`` holds at least the first steps of every worker, in time order; ``exact`` is False where the steady state
    was extrapolated, and ``note`` says from which step. ``utilisation`` maps a stage to the busy share of its SMs and
    ``"tensor"``, ``"l2"`` and ``"dram"`` to the share of the machine's rate over the whole time.
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
    note: str = ""
