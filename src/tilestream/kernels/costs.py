"""What stages and launches are predicted to take: the numbers that every family of kernels fills in."""

from __future__ import annotations

from dataclasses import dataclass

SHARING = 4.0
"""Exponent of a sum of what overlaps but not wholly: of two equal parts, 1.19 times one. It stays above the longest."""


@dataclass(frozen=True)
class StageCost:
    """Seconds of one step of a stage on one SM, by what takes them; ``step_s`` is the time between steps.

    ``tensor_s``: wgmma of all tiles of the step. ``shared_s``: what shared memory carries for them. ``lane_s``:
    epilogues of one warpgroup, each instruction behind the one before. ``inputs_s``: waits for inputs, as the input
    ring is too short for those to be on their way in time; ``first_s``: those of the first tile beyond that.
    ``weights_s``: streamed weights through the SM's port.
    ``queue_s``: exposed part of the hand-over of the step's input. ``scattered``: bytes of the L2 beyond those of the
    values, for stores of parts of sectors.
    """

    stage: str
    replicas: int
    tiles_per_step: int
    tensor_s: float
    shared_s: float
    lane_s: float
    inputs_s: float
    weights_s: float
    queue_s: float
    step_s: float
    scattered: float = 0.0
    first_s: float = 0.0

    @property
    def limit(self) -> str:
        parts = {
            "tensor": self.tensor_s,
            "shared memory": self.shared_s,
            "epilogue": self.lane_s,
            "inputs": self.inputs_s,
            "weights": self.weights_s,
            "queue": self.queue_s,
        }
        return max(parts, key=lambda k: parts[k])


@dataclass(frozen=True)
class LaunchCost:
    """One launch: ``stages_s`` (slowest stage), ``dram_s`` and ``l2_s`` side by side; plus ``fill_s`` and the launch.

    ``stages`` is empty for a library kernel.
    """

    name: str
    stages: tuple[StageCost, ...]
    stages_s: float
    dram_s: float
    l2_s: float
    fill_s: float
    total_s: float
    limit: str


@dataclass(frozen=True)
class ClosedForm:
    """A family whose time is a formula and not events. Its CTAs wait for each other in ways that the event loop does
    not know (a tile shared by columns, units dealt over the grid, sums that meet in the L2), and were measured as
    wholes.

    ``name`` of the kernels, in plural; mean absolute ``error`` of their times on an H200, measured on ``kernels``
    (docs/cost-model.md has where).
    """

    name: str
    error: float
    kernels: str


def overlapped(*seconds: float) -> float:
    """Of parts that run side by side and get in each other's way: more than the longest, less than the sum."""
    longest = max(seconds)
    if longest <= 0:
        return 0.0
    return longest * sum((s / longest) ** SHARING for s in seconds) ** (1 / SHARING)
