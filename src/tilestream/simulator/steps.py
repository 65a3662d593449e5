"""A decode step as one kernel (``kernels/step``): its stages one after the other, each behind a hand-over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from math import ceil

from tilestream.devices import Device
from tilestream.kernels.coefficients import scaling
from tilestream.kernels.step.kernel import STAGES
from tilestream.kernels.step.shape import TILE, Shape

ROWS_S = 1.5e-6
"""From a CTA's first values of a stage to its last word of it, where memory is no limit: medians over CTAs and layers
of SmolLM's and Qwen3's stages lie between 0.8 and 2.5 us on an H200 (docs/decoding.md)."""
WORDS = 2.65
"""How many times as long as the L2 would take CTAs read what others have made, which is polled and put together: a
regression coefficient of steps of Qwen3-0.6B of 8 and 32 sequences (benchmarks/fit/fit_steps.py)."""

NAMES = tuple(name.removeprefix("the ") for name in STAGES)
PROJECT, ATTEND, OUTPUT, GATE, DOWN, HEAD = NAMES


@dataclass(frozen=True)
class StepStage:
    """A stage of a layer.

    Attributes:
        bytes: of weights and caches that it reads. ahead: of them those that came while others were waited for.
        hand_over_us: until all CTAs have what it reads of others, which takes longer the more it is; 0 of the first,
            which reads the token's embedding.
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

    shape: Shape
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
        """Stages of one name together, of all layers, in the order of ``NAMES``."""
        found = sorted(self.stages, key=lambda stage: NAMES.index(stage.name))
        return [list(same) for _, same in groupby(found, key=lambda stage: stage.name)]


def simulate_step(shape: Shape, device: Device, words: float = WORDS) -> StepRun:
    """Run a step over a full cache.

    Memory delivers at its rate all the time, unless all rings are full: so weights of the stages to come
    arrive while a stage waits. What a stage still needs then, it waits for: at the memory's rate, or at an SM's for the
    CTA that has most of it; and at least for ``ROWS_S``.
    """
    ring = shape.slots * shape.slot_bytes * device.sms
    ahead, made = 0.0, []
    for name, layer, size, most in _reads(shape, device.sms):
        has_row = not made or (shape.form.parallel and name == GATE)  # which is the one in front's
        waits = 0.0 if has_row else device.hand_over_s + words * _words_s(shape, name, device)
        ahead = min(float(ring), ahead + waits * device.dram_bytes_per_s)
        there = min(1.0, ahead / size)
        memory = (1 - there) * max(size / device.dram_bytes_per_s, most / device.sm_bytes_per_s)
        takes = max(memory, ROWS_S * scaling.cycles(device))
        made.append(StepStage(name, layer, size, round(there * size), 1e6 * waits, 1e6 * takes))
        ahead = min(float(ring), max(0.0, ahead + takes * device.dram_bytes_per_s - size))
    return StepRun(shape, 1e6 * device.launch_s, tuple(made))


def _words_s(s: Shape, stage: str, device: Device) -> float:
    """Seconds in which the L2 delivers the words of others to a stage, all of them to each CTA with rows of it."""
    pairs = ceil(s.width / (2 * TILE))
    ctas = {ATTEND: s.key_heads * s.batch * s.splits, OUTPUT: pairs, DOWN: pairs}.get(stage, device.sms)
    values = {OUTPUT: s.heads * s.features * s.splits, DOWN: s.hidden}.get(stage, s.width) * s.batch
    size = 4.0 * values  # a word of eight bytes has two
    if stage == OUTPUT and s.splits > 1:
        size += values  # sums of shares
    if stage == ATTEND:
        size = 8.0 * (s.heads // s.key_heads + 2) * s.features * ceil(ctas / device.sms)
    return size * max(1 / device.sm_bytes_per_s, min(ctas, device.sms) / device.l2_bytes_per_s)


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
        GATE: product(s.hidden, s.width, 2 if s.form.gated else 1),
        DOWN: product(s.width, s.hidden),
    }
    order = (PROJECT, GATE, ATTEND, OUTPUT, DOWN) if s.form.parallel else tuple(layer)
    for number in range(s.layers):
        for name in order:
            yield name, number, *layer[name]
    yield HEAD, s.layers, *product(s.vocabulary, s.width)
