"""Devices: descriptions are possible machines, unknown names and impossible numbers are refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilestream import devices
from tilestream.devices import DEVICES, describe
from tilestream.errors import DeviceError

H200 = devices.get("h200")


def properties(name: str, capability: tuple[int, int], sms: int) -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=sms,
        L2_cache_size=50 << 20,
        total_memory=96 << 30,
        shared_memory_per_block_optin=232_448,
    )


def test_get_is_case_blind_and_lists_known_names():
    assert devices.get("H200") is H200
    with pytest.raises(DeviceError, match="a100, h100, h200"):
        devices.get("tpu")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sms": 0}, "sms is 0"),
        ({"dram_bytes_per_s": -1.0}, "dram_bytes_per_s is -1.0"),
        ({"clock_hz": float("nan")}, "clock_hz is nan"),
        ({"queue_exposed": 1.5}, "queue_exposed is 1.5"),
        ({"tensor_flops": {"bf16": 1e12, "f16": 1e12}}, "tensor_flops\\['f32'\\] is None"),
        ({"l2_bytes_per_s": 1e12}, "l2_bytes_per_s is 1000000000000.0"),
        ({"queue_curve": ((64, 2e-6), (32, 1e-6))}, "queue_curve"),
        ({"queue_curve": ()}, "queue_curve"),
    ],
)
def test_impossible_numbers_are_named(change, named):
    with pytest.raises(DeviceError, match=named):
        replace(H200, **change)


def test_queue_curve_passes_through_its_points():
    for device in DEVICES.values():
        for size, seconds in device.queue_curve:
            assert device.queue_s(size) == pytest.approx(seconds)


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 20))
def test_larger_payloads_never_arrive_sooner(a, b):
    small, large = sorted((a, b))
    assert H200.queue_s(small) <= H200.queue_s(large)


def test_a_smaller_gpu_of_the_same_kind_keeps_the_rate_of_an_sm():
    device = describe(properties("NVIDIA H200 NVL", (9, 0), 114))
    assert device is not None
    assert (device.name, device.sms) == ("h200", 114)
    assert device.tensor_flops["bf16"] / 114 == pytest.approx(H200.tensor_flops["bf16"] / 132)
    assert device.dram_bytes_per_s == H200.dram_bytes_per_s
    assert (device.l2_bytes, device.dram_bytes) == (50 << 20, 96 << 30)


@pytest.mark.gpu
def test_the_gpu_of_this_machine_is_known():
    device = devices.detect()
    assert device is not None and device.compute_capability == (9, 0)
    assert device.sms > 0 and device.shared_bytes_per_cta == 232_448


@pytest.mark.parametrize(
    ("name", "capability", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), "h100"),
        ("NVIDIA H200", (9, 0), "h200"),
        ("NVIDIA GH200 480GB", (9, 0), "h200"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "a100"),
        ("Some sm_90 board", (9, 0), "h100"),
        ("Tesla T4", (7, 5), None),
    ],
)
def test_describe_by_name_then_by_capability(name, capability, expected):
    device = describe(properties(name, capability, 132 if capability != (8, 0) else 108))
    assert (device.name if device else None) == expected


def test_detect_without_a_gpu(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.detect() is None


def test_no_smaller_than_one_sm():
    with pytest.raises(DeviceError, match="sms is 0"):
        H200.with_sms(0)
