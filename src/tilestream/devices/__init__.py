"""Hardware as data, one file a device. Whoever adds a device adds a file and a line here."""

from __future__ import annotations

import logging
from dataclasses import replace

from tilestream.devices.a100 import A100
from tilestream.devices.device import Device
from tilestream.devices.h100 import H100
from tilestream.devices.h200 import H200
from tilestream.errors import DeviceError

__all__ = ["DEVICES", "Device", "detect", "get"]

log = logging.getLogger(__name__)

DEVICES: dict[str, Device] = {d.name: d for d in (A100, H100, H200)}


def get(name: str) -> Device:
    """The device of that name, in any case.

    Raises:
        DeviceError: listing the known names.
    """
    device = DEVICES.get(name.lower())
    if device is None:
        raise DeviceError(f"unknown device {name!r}", f"use one of: {', '.join(sorted(DEVICES))}")
    return device


def detect(index: int | None = None) -> Device | None:
    """The current CUDA device as torch describes it, or None without a GPU that we know.

    SMs and sizes of memories are the GPU's own; rates come from the nearest device file.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    return describe(properties)


def describe(properties) -> Device | None:
    """Match ``torch.cuda.get_device_properties`` to a device: by name, else by compute capability."""
    capability = (properties.major, properties.minor)
    named = next(
        (d for d in DEVICES.values() if d.name.upper() in properties.name.upper().replace("GH200", "H200")), None
    )
    if named is not None and named.compute_capability != capability:
        named = None
    device = named or {(9, 0): H100, (8, 0): A100}.get(capability)
    if device is None:
        log.info(
            "no description of %s (sm_%d%d): known are %s", properties.name, *capability, ", ".join(sorted(DEVICES))
        )
        return None
    sms = properties.multi_processor_count
    if sms != device.sms:
        log.info(
            "%s has %d SMs, %s is described with %d: planning for %d",
            properties.name,
            sms,
            device.name,
            device.sms,
            sms,
        )
        device = device.with_sms(sms)
    return replace(
        device,
        l2_bytes=properties.L2_cache_size,
        dram_bytes=properties.total_memory,
        shared_bytes_per_cta=properties.shared_memory_per_block_optin,
    )
