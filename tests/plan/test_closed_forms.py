"""Closed forms: on an H200 as they were fitted, on other devices by the device's own numbers, and shown by everyone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache

import pytest
from closed_form_cases import BLOCKS, H200, cases
from places import GOLDEN

from tilestream import devices
from tilestream.devices import DEVICES, Device
from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.coefficients.shared_tile import H200_GENERATED, HANGS_ON, Coefficients
from tilestream.kernels.families import kernel_of
from tilestream.options import Options
from tilestream.plan.cost import predict
from tilestream.plan.planner import plan
from tilestream.plan.shown import pipeline_us
from tilestream.simulator import simulate

TIMES = GOLDEN / "closed_forms.json"
"""Microseconds on an H200, made when the forms knew no other device."""


@cache
def known() -> dict[str, tuple[Pipeline, int]]:
    return cases()


@cache
def times(device: Device) -> dict[str, float]:
    made = {}
    for name, (pipeline, rows) in known().items():
        us = pipeline_us(pipeline, rows, device)
        assert us is not None, name
        made[name] = us
    return made


def faster(curve: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    return tuple((size, seconds / 4) for size, seconds in curve)


BETTER: dict[str, tuple[Callable[[Device], Device], set[str]]] = {
    "sms": (lambda d: d.scale("sms", 4), set()),  # of a plan that uses as many as before, all stays
    "clock_hz": (
        lambda d: d.scale("clock_hz", 4),
        {"shared tiles", "tiled blocks", "stationary sums", "backward chains"},
    ),
    "tensor_flops": (lambda d: d.scale("tensor_flops", 4), {"tiled blocks"}),
    "simt_flops": (lambda d: d.scale("simt_flops", 4), {"tiled blocks"}),
    "sm_bytes_per_clock": (lambda d: d.scale("sm_bytes_per_clock", 4), {"stationary sums"}),
    "shared_bytes_per_clock": (lambda d: replace(d, shared_bytes_per_clock=512.0), set()),
    "dram_bytes_per_s": (
        lambda d: d.scale("l2_bytes_per_s", 4).scale("dram_bytes_per_s", 4),
        {"shared tiles", "stationary sums", "backward chains"},
    ),
    "l2_bytes_per_s": (lambda d: d.scale("l2_bytes_per_s", 4), {"shared tiles", "stationary sums", "backward chains"}),
    "l2_bytes": (lambda d: d.scale("l2_bytes", 4), set()),
    "launch_s": (
        lambda d: d.scale("launch_s", 0.25),
        {"shared tiles", "tiled blocks", "stationary sums", "backward chains"},
    ),
    "load_s": (lambda d: replace(d, load_s=d.load_s / 4), {"shared tiles"}),
    "ramp_s": (lambda d: replace(d, ramp_s=d.ramp_s / 4), {"stationary sums", "backward chains"}),
    "issue_cycles": (lambda d: replace(d, issue_cycles=d.issue_cycles / 4), {"shared tiles"}),
    "queue_curve": (
        lambda d: replace(d, queue_curve=faster(d.queue_curve)),
        {"shared tiles", "stationary sums", "backward chains"},
    ),
    "dsm_curve": (lambda d: replace(d, dsm_curve=faster(d.dsm_curve)), {"shared tiles"}),
    "dsm_bytes_per_s": (lambda d: replace(d, dsm_bytes_per_s=4 * d.dsm_bytes_per_s), {"shared tiles"}),
}
"""By number of a device: one that is better in it, and the kernels some of which must gain by that."""


def test_on_an_h200_every_prediction_is_what_it_was() -> None:
    assert times(H200) == pytest.approx(json.loads(TIMES.read_text()), rel=1e-12)
    names = {form.name for pipeline, _ in known().values() if (form := kernel_of(pipeline).closed_form) is not None}
    assert names == {"shared tiles", "tiled blocks", "stationary sums", "backward chains"}


def test_every_constant_of_a_shared_tile_hangs_on_a_number_of_the_device() -> None:
    shares = {"lock_step", "skew"}
    assert set(HANGS_ON) == {f.name for f in fields(Coefficients)} - shares
    assert H200_GENERATED.on(H200) == H200_GENERATED


@pytest.mark.parametrize("number", BETTER)
def test_a_device_that_is_better_in_a_number_never_slows_a_plan_down(number: str) -> None:
    better, gain = BETTER[number]
    before, after = times(H200), times(better(H200))
    slower = {name: (us, after[name]) for name, us in before.items() if after[name] > us * (1 + 1e-9)}
    assert not slower
    gained = {
        form.name
        for name, (pipeline, _) in known().items()
        if after[name] < 0.999 * before[name] and (form := kernel_of(pipeline).closed_form) is not None
    }
    assert gained >= gain


def test_a_narrow_port_slows_shared_tiles_and_tiled_blocks_down() -> None:
    """On an H200 it is never what they wait for."""
    before, after = times(H200), times(H200.scale("sm_bytes_per_clock", 1 / 16))
    for name, (pipeline, _) in known().items():
        form = kernel_of(pipeline).closed_form
        if form is not None and form.name in ("shared tiles", "tiled blocks"):
            assert after[name] > 1.01 * before[name], name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["ffn, 8 groups of 8, sums added in any order", "stationary sums"])
def test_known_devices_have_times_of_their_own(device: str, name: str) -> None:
    pipeline, rows = known()[name]
    us = pipeline_us(pipeline, rows, devices.get(device))
    assert us is None or us >= times(H200)[name]


def test_a_launch_that_takes_long_is_paid_by_a_shared_tile_too() -> None:
    """On 100 times the launch it was 7.6 us beside 552 of Inductor's two kernels."""
    slow = H200.scale("launch_s", 100)
    made = plan(BLOCKS["ffn"][0].program(), 128, slow, Options(measure=False))
    us = made.chosen.simulated_us
    assert made.chosen.strategy == "shared" and us is not None
    assert 0.9 * slow.launch_s * 1e6 < us < 2 * slow.launch_s * 1e6


def test_everyone_says_the_same() -> None:
    """The planner's model, ``simulator.simulate`` and what is shown."""
    for name, (pipeline, rows) in known().items():
        simulated = simulate(pipeline, rows, H200)
        assert simulated.time_us == times(H200)[name] == predict(pipeline, rows, H200).us, name
        assert "closed form" in simulated.note
        assert all(0 <= share <= 1 for share in simulated.utilisation.values())
