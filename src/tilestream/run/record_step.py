"""Runs a decode step on a GPU with and without stamps: its time, and what every CTA did when."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilestream.kernels.step.kernel import StepKernel
from tilestream.kernels.step.shape import Shape, sizes_of
from tilestream.run.timing import timed_side_by_side
from tilestream.simulator.steps import NAMES


@dataclass(frozen=True)
class StageTimes:
    """Of a stage, medians over layers in microseconds.

    Attributes:
        ctas: that have rows of it.
        us: from the last CTA's end of the stage in front to the last one's of this.
        hand_over_us: from the same to when the last CTA has its first values.
        rows_us: from a CTA's first values to its last word, a median over CTAs. most_rows_us: the largest.
    """

    ctas: float
    us: float
    hand_over_us: float
    rows_us: float
    most_rows_us: float


@dataclass(frozen=True)
class StepSlice:
    """What a CTA did of a stage: times in microseconds from the first CTA's begin."""

    cta: int
    layer: int
    stage: str
    begin_us: float
    values_us: float
    end_us: float


@dataclass(frozen=True)
class StepRecording:
    """A step that ran.

    Attributes:
        time_us: of the kernel. stamped_us: of the same with stamps.
        stamps: nanoseconds ``[CTA, layer and the head, stage, 3]`` (``tilestream.cuda.step.stamps_of``).
    """

    device: str
    time_us: float
    stamped_us: float
    stamps: Tensor

    @property
    def overhead(self) -> float:
        """Of stamps, as a share of the time."""
        return self.stamped_us / self.time_us - 1

    def slices(self) -> Iterator[StepSlice]:
        """What each CTA did, in order of CTA and time."""
        there = self.stamps[..., 2] > 0
        first = self.stamps[..., 0][there].min() if there.any() else 0
        us = (self.stamps - first).double() / 1e3
        for cta, layer, stage in there.nonzero().tolist():
            yield StepSlice(cta, layer, NAMES[stage], *us[cta, layer, stage].tolist())

    def by_stage(self) -> dict[str, StageTimes]:
        """By stage, but for the first one, in front of which nothing ended."""
        us = self.stamps.double() / 1e3
        found: dict[str, list[tuple[float, ...]]] = {}
        before = None
        for layer in range(us.shape[1]):
            for stage, name in enumerate(NAMES):
                if not len(of := us[us[:, layer, stage, 2] > 0, layer, stage]):
                    continue
                if before is not None:
                    rows = of[:, 2] - of[:, 1]
                    times = (of[:, 2].max() - before, of[:, 1].max() - before, rows.median(), rows.max())
                    found.setdefault(name, []).append((float(len(of)), *map(float, times)))
                before = of[:, 2].max()
        return {n: StageTimes(*map(statistics.median, zip(*each, strict=True))) for n, each in found.items()}


def record_step(shape: Shape, place: int | None = None) -> StepRecording:
    """Run a step of random weights on the GPU present, behind ``place`` tokens, or in the last place of its cache.

    Raises:
        DeviceError, CompileError, QueueTimeout: as a step that is launched.
    """
    from tilestream.cuda.step import loaded

    given = operands(shape, shape.positions - 1 if place is None else place)
    kernels = [loaded(StepKernel(shape, stamps=on), 0) for on in (False, True)]
    calls = [lambda kernel=kernel: kernel(*given[:7], numbers=(0, *given[9:])) for kernel in kernels]  # pyright: ignore
    time_us, stamped_us = timed_side_by_side(calls)
    return StepRecording(torch.cuda.get_device_name(0), time_us, stamped_us, kernels[1].stamps.cpu())


def operands(s: Shape, place: int, device: str = "cuda", seed: int = 0) -> list[Any]:
    """What ``graph.decode.op.decode_step`` takes, random: a token behind ``place`` others."""
    g = torch.Generator(device).manual_seed(seed)

    def data(*sizes: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*sizes, generator=g, device=device) * scale).bfloat16()

    sizes = sizes_of(s)
    names = [*s.form.weights * s.layers, *s.form.last]
    weights = [
        (0 if "bias" in n or s.form.norm == "rms_plus_one" else 1) + data(*sizes[n], scale=0.1)
        if len(sizes[n]) == 1
        else data(*sizes[n], scale=sizes[n][0 if s.form.turned and n != "head" else 1] ** -0.5)
        for n in names
    ]
    caches = [data(s.batch, s.key_heads, s.positions, s.features) for _ in range(2 * s.layers)]
    there = torch.arange(s.positions, device=device) <= place
    mask = torch.where(there, 0.0, float("-inf")).bfloat16().view(1, 1, 1, -1) if s.masked else None
    angle = torch.rand(1, 1, s.rotary, generator=g, device=device) * 6
    turn = [None, None] if not s.rotary else [angle.cos().bfloat16(), angle.sin().bfloat16()]
    lengths = [torch.tensor(place, device=device) for _ in range(s.layers)]
    numbers = (s.features**-0.5, 1e-5, 1e-6, 1.0)
    return [data(s.batch, 1, s.width), *turn, mask, weights, caches, lengths, s.form.text, False, *numbers]
