"""Devices: descriptions are possible machines, unknown names and impossible numbers are refused."""

from __future__ import annotations

import json
import re
import time
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tilestream import devices, explain
from tilestream.apps import APPS
from tilestream.devices import DEVICES, describe
from tilestream.devices.ranges import RANGES
from tilestream.errors import DeviceError
from tilestream.options import Options
from tilestream.plan.analyse import analyse
from tilestream.plan.predicted import replan

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


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"arbiters": 3}, "arbiters is 3"),
        ({"shared_bytes_per_sm": 1000}, "shared_bytes_per_sm is 1000"),
        ({"sms": "many"}, "sms is 'many'"),
        ({"ctas_per_sm": 2.5}, "ctas_per_sm is 2.5"),
        ({"launch_s": True}, "launch_s is True"),
        ({"tensor_flops": {"bf16": "fast", "f16": 1e12, "f32": 1e12}}, "tensor_flops\\['bf16'\\] is 'fast'"),
    ],
)
def test_what_is_no_machine_is_named(change, named):
    with pytest.raises(DeviceError, match=named):
        replace(H200, **change)


def test_every_number_of_a_device_has_a_range_that_its_refusal_names():
    others = {"name", "compute_capability", "tensor_flops", "queue_curve", "clusters", "dsm_curve"}
    assert set(RANGES) == {f.name for f in fields(H200)} - others
    for name, permitted in RANGES.items():
        for value in (0, -1, float("nan"), float("inf"), "many", None, True, permitted.most * 2):
            with pytest.raises(DeviceError, match=re.escape(f"{name} is {value!r}")) as refused:
                replace(H200, **{name: value})
            assert str(permitted) in str(refused.value)


@pytest.mark.parametrize(
    ("variant", "named"),
    [
        ("h200+sms*1000", "sms is 132000. Remedy: give a whole number from 1 to 16,384"),
        ("h200+sms*0.001", "sms is 0. Remedy: give a whole number from 1 to 16,384"),
        ("h200+registers_per_sm*0.0016", "registers_per_sm is 105. Remedy: give a whole number from 32,768"),
        ("h200+clock_hz*nan", "clock_hz cannot be scaled by nan"),
        ("h200+launch_s*inf", "launch_s cannot be scaled by inf"),
        ("h200+launch_s*0", "launch_s cannot be scaled by 0"),
    ],
)
def test_an_absurd_variant_is_refused_by_name(variant, named):
    with pytest.raises(DeviceError, match=re.escape(named)):
        devices.get(variant)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("registers_per_sm = 100", "registers_per_sm is 100. Remedy: give a whole number from 32,768"),
        ("sms = 1000000000", "sms is 1000000000. Remedy: give a whole number from 1 to 16,384"),
        ("sms = 132.5", "sms is 132.5. Remedy: give a whole number"),
        ("clock_hz = nan", "clock_hz is nan. Remedy: give a number from"),
        ("launch_s = -inf", "launch_s is -inf. Remedy: give a number from"),
        ("dram_bytes_per_s = 0", "dram_bytes_per_s is 0. Remedy: give a number from"),
        ("l2_bytes = -5", "l2_bytes is -5. Remedy: give a whole number from"),
        ('load_s = "slow"', "load_s is 'slow'. Remedy: give a number from"),
        ("queue_curve = [[1024, 1e-6], [2048, nan]]", "queue_curve, seconds is nan. Remedy: give a number from"),
        ("clusters = [[2, 0]]", "clusters, resident clusters is 0. Remedy: give a whole number from 1"),
        ("compute_capability = [9, 0.5]", "compute_capability is 0.5. Remedy: give a whole number"),
        ("[tensor_flops]\nfp8 = -1.0", "tensor_flops['fp8'] is -1.0. Remedy: give a number from"),
    ],
)
def test_an_absurd_device_file_is_refused_by_name(tmp_path, text, named):
    path = tmp_path / "absurd.toml"
    path.write_text(f'base = "h200"\n{text}\n')
    with pytest.raises(DeviceError, match=re.escape(named)):
        devices.get(str(path))


@pytest.mark.exhaustive
@pytest.mark.parametrize("most", [False, True])
def test_the_ends_of_every_range_can_be_planned_for_and_simulated(most):
    module, inputs = APPS["meshgraphnets"].make(100)
    found = analyse(module, inputs, Options(measure=False, cache=False), H200)
    pairs = (("l2_bytes_per_s", "dram_bytes_per_s"), ("l2_shared_bytes_per_s", "l2_bytes_per_s"))
    for name, permitted in RANGES.items():
        value = permitted.most if most else permitted.least
        change = {name: int(value) if permitted.whole else value}
        for larger, smaller in (*pairs, *pairs, ("shared_bytes_per_sm", "shared_bytes_per_cta")):
            sizes = {n: change.get(n, getattr(H200, n)) for n in (larger, smaller)}
            if sizes[larger] < sizes[smaller]:
                change |= {smaller: sizes[larger]} if larger in change else {larger: sizes[smaller]}
        start = time.monotonic()
        us = replan(found, replace(H200, **change)).predicted_us
        assert us is not None and us > 0, name
        assert time.monotonic() - start < 10, name


def test_variants_by_name():
    dual = devices.get("a100+kitsune")
    assert (dual.name, dual.arbiters, dual.sms) == ("a100+kitsune", 2, 108)
    assert dual.dual() is dual
    faster = devices.get("A100+sms*2+l2_bytes_per_s*2+Kitsune")
    a100 = devices.get("a100")
    assert faster.sms == 216 and faster.arbiters == 2
    assert faster.tensor_flops["bf16"] == 2 * a100.tensor_flops["bf16"] and faster.simt_flops == 2 * a100.simt_flops
    assert faster.l2_bytes_per_s == 2 * a100.l2_bytes_per_s
    assert faster.l2_shared_bytes_per_s == 2 * a100.l2_shared_bytes_per_s
    assert faster.dram_bytes_per_s == a100.dram_bytes_per_s
    assert faster.name == "a100+sms*2+l2_bytes_per_s*2+kitsune"
    for variant, match in (
        ("a100+fast", "unknown variant 'fast'"),
        ("a100+sms*x", "'x' is not a factor"),
        ("a100+cores*2", "has no 'cores' to scale.*sms"),
        ("a100+sms*-1", "cannot be scaled by -1"),
        ("a100+dram_bytes_per_s*9", "l2_bytes_per_s is"),
    ):
        with pytest.raises(DeviceError, match=match):
            devices.get(variant)


@pytest.mark.parametrize("what", ["sms", "clock_hz", "tensor_flops", "dram_bytes_per_s", "l2_bytes", "launch_s"])
def test_scaling_changes_one_number_and_what_hangs_on_it(what):
    scaled = H200.scale(what, 1.25)
    changed = {f.name for f in fields(H200) if getattr(scaled, f.name) != getattr(H200, f.name)} - {"name"}
    along = {
        "sms": {"tensor_flops", "simt_flops", "sfu_ops_per_s", "clusters", "dsm_bytes_per_s"},
        "clock_hz": {"tensor_flops", "simt_flops", "sfu_ops_per_s"},
    }
    assert changed == {what} | along.get(what, set())


def test_a_device_file_of_ten_lines(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'base = "h200"\nsms = 160\ndram_bytes_per_s = 5e12\narbiters = 2\n'
        "queue_curve = [[1024, 5e-7], [131072, 2e-6]]\n[tensor_flops]\nbf16 = 1.5e15\n"
    )
    device = devices.get(str(path))
    assert (device.name, device.sms, device.arbiters) == ("mine", 160, 2)
    assert device.tensor_flops["bf16"] == 1.5e15
    assert device.tensor_flops["f32"] == pytest.approx(H200.tensor_flops["f32"] * 160 / 132)
    assert device.simt_flops == pytest.approx(H200.simt_flops * 160 / 132)
    assert device.queue_s(1024) == 5e-7
    assert devices.get(f"{path}+kitsune").arbiters == 2
    assert devices.get("mine") == device, "a plan names its device: it is found again"


def test_a_whole_device_as_json(tmp_path):
    path = tmp_path / "whole.json"
    numbers = {f.name: getattr(H200, f.name) for f in fields(H200)} | {"name": "whole"}
    path.write_text(json.dumps(numbers))
    assert devices.get(str(path)) == replace(H200, name="whole")
    del numbers["dram_bytes_per_s"]
    path.write_text(json.dumps(numbers))
    with pytest.raises(DeviceError, match="has no dram_bytes_per_s.*base"):
        devices.get(str(path))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('base = "h200"\nsmss = 3\n', "unknown key 'smss'.*did you mean 'sms'"),
        ('base = "h300"\n', "unknown base 'h300'.*a100, h100, h200"),
        ('base = "h200"\nsms = 0\n', "sms is 0"),
        ('base = "h200"\nsms = "all"\n', "sms is 'all'"),
        ('base = "h200"\nqueue_curve = [1, 2]\n', "queue_curve is \\[1, 2\\]"),
        ('base = "h200"\ncompute_capability = 9\n', "compute_capability is 9"),
        ('base = "h200"\ntensor_flops = 1\n', "tensor_flops is 1"),
        ("base = h200\n", "is not TOML"),
        ('base = "h200"\nname = "H100"\n', "name is 'H100'.*none of: a100, h100, h200"),
    ],
)
def test_a_wrong_device_file_says_which_number(tmp_path, text, match):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(DeviceError, match=match):
        devices.get(str(path))


def test_a_device_file_that_is_not_there():
    with pytest.raises(DeviceError, match="cannot be read"):
        devices.get("nowhere/none.toml")


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


def test_clusters_and_what_passes_inside_of_them():
    assert [H200.resident_clusters(size) for size in (1, 2, 3, 4, 8, 16)] == [132, 66, 30, 30, 15, 7]
    assert H200.dsm_s(16_384) == 0.54e-6 < H200.queue_s(16_384)
    assert H200.dsm_s(131_072) == pytest.approx(2 * 1.74e-6)
    for size in (0, 17):
        with pytest.raises(DeviceError, match=f"no clusters of {size} CTAs"):
            H200.resident_clusters(size)
    with pytest.raises(DeviceError, match="has no clusters"):
        devices.get("a100").dsm_s(1024)
    with pytest.raises(DeviceError, match="dsm_curve"):
        replace(H200, dsm_curve=())


class Gated(nn.Module):
    """A norm, a gated block and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up, self.down = (
            nn.RMSNorm(64),
            *(nn.Linear(64, 256) for _ in "gu"),
            nn.Linear(256, 64),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


@pytest.mark.parametrize("rows", [1, 16, 128, 700])
@pytest.mark.parametrize("name", ["a100", "h200+sms*0.05"])
@pytest.mark.every(3)
def test_small_models_are_planned_for_devices_without_clusters_or_with_few(name: str, rows: int):
    """Kernels of blocks on few rows may be clusters; where there are none, others are candidates still."""
    block = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    long = nn.Sequential(nn.Linear(2048, 64), nn.ReLU())
    for module, features in ((block, 64), (Gated(), 64), (long, 2048)):
        analysed = explain(module.bfloat16(), torch.randn(rows, features).bfloat16(), device=name).analysis
        assert analysed.regions
        for region in analysed.regions:
            assert region.problem == "" and region.plan is not None and len(region.plan.candidates) > 1
