"""Constants that were fitted on an H200, on other devices: each moves with the number of a device that it hangs on.

Every function is a factor, exactly 1 on the H200: of seconds, that a constant takes so many times as long; of a rate,
that it is so many times as high. What a constant hangs on follows from what it is; no other device was measured.
"""

from __future__ import annotations

from tilestream.devices.device import Device
from tilestream.devices.h200 import H200

FLAG_BYTES = 2048
"""A payload so small that its way from SM to SM is latency alone."""
PART_BYTES = 16_384
"""Of a part that goes through distributed shared memory."""


def launch(device: Device) -> float:
    """Of seconds between a launch and its first data: the gap, and the first load, as ``launch_s`` is."""
    return device.launch_s / H200.launch_s


def cycles(device: Device) -> float:
    """Of seconds that are cycles of an SM: barriers, drains, instructions that wait for one another."""
    return H200.clock_hz / device.clock_hz


def issue(device: Device) -> float:
    """Of seconds of an epilogue's instructions, one behind the other."""
    return cycles(device) * (device.issue_cycles / H200.issue_cycles)


def load(device: Device) -> float:
    """Of seconds from asking a memory under load to having the bytes."""
    return device.load_s / H200.load_s


def hand_over(device: Device) -> float:
    """Of seconds from a CTA to another through the L2: a flag, a partial result."""
    return device.queue_s(FLAG_BYTES) / H200.queue_s(FLAG_BYTES)


def dsm(device: Device) -> float:
    """Of seconds of a hand-over in a cluster; 1 where there are none."""
    return device.dsm_s(PART_BYTES) / H200.dsm_s(PART_BYTES) if device.dsm_curve else 1.0


def port(device: Device) -> float:
    """Of bytes/s that an SM takes in."""
    return device.sm_bytes_per_s / H200.sm_bytes_per_s


def dsm_port(device: Device) -> float:
    """Of bytes/s that an SM takes in of its cluster's shared memories."""
    return (device.dsm_bytes_per_s / device.sms) / (H200.dsm_bytes_per_s / H200.sms)


def l2(device: Device) -> float:
    """Of bytes/s of the L2, all SMs together."""
    return device.l2_bytes_per_s / H200.l2_bytes_per_s
