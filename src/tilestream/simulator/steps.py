"""A decode step as one kernel (``kernels/step``): its stages one after the other, each behind a hand-over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from math import ceil

from tilestream.devices import Device
from tilestream.kernels.coefficients import scaling
from tilestream.kernels.step.kernel import STAGES
from tilestream.kernels.step.shape import Shape

ROWS_S = 1.7e-6
"""From a CTA's first values of a stage to its last word of it, where memory is no limit: medians over CTAs and layers
of SmolLM's and Qwen3's stages lie between 1.0 and 3.1 us on an H200 (benchmarks/results/decode_stages.json)."""

PROJECT, ATTEND, OUTPUT, GATE, DOWN, HEAD = (name.removeprefix("the ") for name in STAGES)


@dataclass(frozen=True)
class StepStage:
    """A stage of a layer.

    Attributes:
        bytes: of weights and caches that it reads. ahead: of them those that came while others were waited for.
        hand_over_us: until all CTAs have what it reads of others; 0 of the first, which reads the token's embedding.
        rows_us: until its rows are made: what a CTA takes for them, or until the rest of its bytes is there.
    """

    name: str
    layer: int
    bytes: int
    ahead: int
    hand_over_us: float
    rows_us: float

    @property
    def us(self) -> float:
        return self.hand_over_us + self.rows_us


@dataclass(frozen=True)
class StepRun:
    """A step on a device: microseconds of its launch, and its stages in order. ``lines``: the user's, by stage."""

    launch_us: float
    stages: tuple[StepStage, ...]
    lines: dict[str, str] = field(default_factory=dict)

    @property
    def time_us(self) -> float:
        return self.launch_us + sum(stage.us for stage in self.stages)

    @property
    def bytes(self) -> int:
        return sum(stage.bytes for stage in self.stages)

    def by_name(self) -> list[list[StepStage]]:
        """Stages of one name together, of all layers, in the order of ``STAGES``."""
        order = [PROJECT, ATTEND, OUTPUT, GATE, DOWN, HEAD]
        found = sorted(self.stages, key=lambda stage: order.index(stage.name))
        return [list(same) for _, same in groupby(found, key=lambda stage: stage.name)]


def simulate_step(shape: Shape, device: Device) -> StepRun:
    """Run a step over a full cache.

    Memory delivers at its rate all the time, unless all rings are full: so weights of the stages to come
    arrive while a stage waits. What a stage still needs then, it waits for: at the memory's rate, or at an SM's for the
    CTA that has most of it; and at least for ``ROWS_S``.
    """
    ring = shape.slots * shape.slot_bytes * device.sms
    ahead, made = 0.0, []
    for name, layer, size, most in _reads(shape, device.sms):
        waits = device.hand_over_s if made else 0.0
        ahead = min(float(ring), ahead + waits * device.dram_bytes_per_s)
        there = min(1.0, ahead / size)
        memory = (1 - there) * max(size / device.dram_bytes_per_s, most / device.sm_bytes_per_s)
        takes = max(memory, ROWS_S * scaling.cycles(device))
        made.append(StepStage(name, layer, size, round(there * size), 1e6 * waits, 1e6 * takes))
        ahead = min(float(ring), max(0.0, ahead + takes * device.dram_bytes_per_s - size))
    return StepRun(1e6 * device.launch_s, tuple(made))


def _reads(s: Shape, ctas: int) -> Iterator[tuple[str, int, int, int]]:
    """Each stage's name, its layer, the bytes that it reads, and those of the CTA with most of them."""
    query, keys = s.heads * s.features, s.key_heads * s.features

    def product(rows: int, columns: int, times: int = 1) -> tuple[int, int]:
        row = 2 * columns * times
        return rows * row, ceil(rows / ctas) * row

    share = 4 * s.features * ceil(s.positions / s.splits)
    layer = {
        PROJECT: product(query + 2 * keys, s.width),
        ATTEND: (4 * keys * s.positions * s.batch, share * ceil(s.key_heads * s.batch * s.splits / ctas)),
        OUTPUT: product(s.width, query),
        GATE: product(s.hidden, s.width, 1 if s.gpt2 else 2),
        DOWN: product(s.width, s.hidden),
    }
    for number in range(s.layers):
        for name, (size, most) in layer.items():
            yield name, number, size, most
    yield HEAD, s.layers, *product(s.vocabulary, s.width)
