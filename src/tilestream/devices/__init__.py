"""Hardware as data, one file a device. Whoever adds a device adds a file and a line here."""

from __future__ import annotations

import logging
from dataclasses import replace

from tilestream.devices.a100 import A100
from tilestream.devices.device import Device
from tilestream.devices.h100 import H100
from tilestream.devices.h200 import H200
from tilestream.devices.user import load
from tilestream.errors import DeviceError

__all__ = ["DEVICES", "Device", "detect", "get", "load", "planned_for"]

log = logging.getLogger(__name__)

DEVICES: dict[str, Device] = {d.name: d for d in (A100, H100, H200)}
_from_files: dict[str, Device] = {}  # by name, so that a plan's device can be found again


def get(name: str) -> Device:
    """The device that ``name`` says: a known name in any case, or a device file, with variants behind it.

    ``a100+kitsune`` has two arbiters, ``h200+sms*2+l2_bytes_per_s*2`` has twice the SMs and L2 bandwidth, and
    ``mine.toml`` is read by ``load``; from then on its name is known as well.

    Raises:
        DeviceError: listing the known names, or naming what is wrong with the variant or the file.
    """
    base, *variants = name.strip().split("+")
    device = DEVICES.get(base.lower()) or _from_files.get(base)
    if device is None and base.lower().endswith((".toml", ".json")):
        device = load(base, DEVICES)
        _from_files[device.name] = device
    if device is None:
        known = ", ".join(sorted(DEVICES))
        raise DeviceError(f"unknown device {name!r}", f"use one of: {known}, each with +kitsune, or a .toml file")
    for variant in variants:
        what, _, factor = variant.lower().partition("*")
        if variant.lower() == "kitsune":
            device = device.dual()
        elif factor:
            device = device.scale(what, _number(factor, name))
        else:
            raise DeviceError(f"unknown variant {variant!r} of {base!r}", "use +kitsune or, as an example, +sms*2")
    return device


def planned_for(name: str | None) -> Device:
    """The device of that name; without one the GPU here, and an H200 where there is none that we know.

    Raises:
        DeviceError: as ``get``.
    """
    return get(name) if name else detect() or get("h200")


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError as failure:
        raise DeviceError(f"device {name!r}: {text!r} is not a factor", "write it as +sms*2") from failure


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
        shared_bytes_per_sm=max(device.shared_bytes_per_sm, properties.shared_memory_per_block_optin),
    )
