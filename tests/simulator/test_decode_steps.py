"""A decode step as stages behind hand-overs: against one that counts time in small steps, and at its limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.fit import fit_steps
from tilestream.devices import H200, get
from tilestream.kernels.step.form import QWEN3 as QWEN3_FORM
from tilestream.kernels.step.form import Form
from tilestream.kernels.step.shape import Shape
from tilestream.plan.decode import predicted_us
from tilestream.simulator.steps import ROWS_S, WORDS, StepStage, simulate_step

SMOLLM = Shape(30, 576, 1536, 9, 3, 64, 512, 49152)
QWEN3 = Shape(28, 1024, 3072, 16, 8, 128, 512, 151936, form=QWEN3_FORM)
PARALLEL = Shape(12, 768, 3072, 12, 12, 64, 512, 50304, form=Form(gated=False, parallel=True))
LLAMA = Shape(16, 2048, 8192, 32, 8, 64, 512, 128256)


def by_small_steps(stages: Sequence[StepStage], rate: float, ring: float) -> float:
    """Seconds of the stages: memory fills the rings at ``rate``, also while a stage waits, and stages empty them."""
    step_s, now, ahead = 2e-9, 0.0, 0.0
    for stage in stages:
        size, ready = stage.bytes, now + 1e-6 * stage.hand_over_us
        while now < ready:
            ahead, now = min(ring, ahead + step_s * rate), now + step_s
        ready += ROWS_S
        left = float(size)
        while left > 1e-6:
            taken = min(left, ahead)
            left, ahead = left - taken, ahead - taken
            if left > 1e-6:
                ahead, now = ahead + step_s * rate, now + step_s
        while now < ready:
            ahead, now = min(ring, ahead + step_s * rate), now + step_s
    return now


@pytest.mark.parametrize("shape", [replace(SMOLLM, layers=3), replace(LLAMA, layers=2)], ids=["waits", "memory"])
@pytest.mark.parametrize("factor", [1.0, 0.1])
def test_against_small_steps(shape: Shape, factor: float) -> None:
    device = H200.scale("hand_over_s", factor)
    ring = shape.slots * shape.slot_bytes * device.sms
    run = simulate_step(shape, device)
    want = 1e6 * by_small_steps(run.stages, device.dram_bytes_per_s, ring)
    assert run.time_us - run.launch_us == pytest.approx(want, rel=0.01)


@pytest.mark.parametrize("shape", [SMOLLM, QWEN3, LLAMA, PARALLEL], ids=["SmolLM", "Qwen3", "Llama", "parallel"])
def test_limits(shape: Shape) -> None:
    run = simulate_step(shape, H200)
    norms = 2 * (shape.layers * (2 * shape.width + 2 * shape.features * shape.form.head_norms) + shape.width)
    caches = 4 * shape.layers * shape.key_heads * shape.positions * shape.features
    assert abs(run.bytes - caches + norms - shape.weight_bytes) <= norms
    assert sum(stage.hand_over_us > 0 for stage in run.stages) == shape.hand_overs
    least = shape.hand_overs * 1e6 * (H200.hand_over_s + ROWS_S)
    floor, waits = 1e6 * run.bytes / H200.dram_bytes_per_s, sum(s.hand_over_us + 1e6 * ROWS_S for s in run.stages)
    assert least <= waits and max(floor, waits) <= run.time_us <= floor + waits + run.launch_us
    no_waits = simulate_step(shape, replace(H200, hand_over_s=1e-10))
    rows = shape.hand_overs * 1e6 * ROWS_S
    assert max(floor, rows) <= no_waits.time_us <= run.time_us


def test_many_sequences_hand_over_more() -> None:
    """Words of a sequence are read in as long as those of another: what is left is the same for all."""
    one, two, four = (
        sum(s.hand_over_us for s in simulate_step(replace(QWEN3, batch=n, positions=64), H200).stages)
        for n in (1, 2, 4)
    )
    assert one < two and four - two == pytest.approx(2 * (two - one), rel=0.02)


def test_the_coefficient_is_what_its_script_fits() -> None:
    assert pytest.approx(fit_steps.fitted(), abs=0.01) == WORDS
    for case in fit_steps.measured():  # on most of them it was not fitted
        assert 0.7 < fit_steps.ratio(case, WORDS) < 1.25, case


def test_devices() -> None:
    """Hardware queues would shorten hand-overs; fewer SMs have less room for what comes ahead."""
    us = {name: predicted_us(SMOLLM, get(name)) for name in ("h200", "h200+hand_over_s*0.1", "h200+sms*0.25")}
    assert us["h200+hand_over_s*0.1"] < 0.68 * us["h200"]
    assert us["h200+sms*0.25"] > us["h200"]
    assert predicted_us(LLAMA, get("h200+dram_bytes_per_s*0.5")) > 1.8 * predicted_us(LLAMA, H200)
