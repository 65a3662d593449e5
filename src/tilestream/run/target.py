"""Where a graph's regions run: the GPU, the reference machine, or nowhere, with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tilestream import devices
from tilestream.devices import Device
from tilestream.errors import DeviceError
from tilestream.options import Options

HOPPER = (9, 0)


@dataclass(frozen=True)
class Target:
    """What runs the pipelines (``kind``), on which torch device, planned for which hardware."""

    kind: Literal["cuda", "reference"]
    device: torch.device
    hardware: Device


def resolve(options: Options, tensors: Iterable[Any]) -> Target | None:
    """The target for a graph with these inputs; None for a graph that has no tensor with rows.

    Tensors on the CPU beside those on a GPU, as indices may be, do not decide.

    Raises:
        DeviceError: nothing can run the pipelines here; the cause says why. Under ``target="auto"``
            the caller hands the graph to Inductor and says so.
    """
    found = dict.fromkeys(t.device for t in tensors if isinstance(t, torch.Tensor) and t.dim())
    if not found:
        return None
    gpus = [d for d in found if d.type != "cpu"]
    if len(gpus) > 1:
        names = " and ".join(str(d) for d in gpus)
        raise DeviceError(f"the model's tensors are on {names}", "move the model and its inputs to one device")
    device = gpus[0] if gpus else next(iter(found))
    if options.target == "reference":
        return Target("reference", device, devices.planned_for(options.device))
    if device.type != "cuda":
        raise DeviceError(
            f"the model's tensors are on the {device.type.upper()}, and kernels need a Hopper GPU (sm_90)",
            "move the model and its inputs to cuda, or use target='reference'",
        )
    capability = torch.cuda.get_device_capability(device)
    if capability != HOPPER:
        raise DeviceError(
            f"{torch.cuda.get_device_name(device)} is sm_{capability[0]}{capability[1]}, and kernels need sm_90",
            "use an H100 or H200, or target='reference'",
        )
    return Target("cuda", device, _fitting(options, device))


def _fitting(options: Options, device: torch.device) -> Device:
    present = devices.detect(device.index)
    if present is None:
        raise DeviceError(
            f"no description fits {torch.cuda.get_device_name(device)}", f"known are {', '.join(devices.DEVICES)}"
        )
    if not options.device:
        return present
    named = devices.get(options.device)
    if named.sms > present.sms:
        raise DeviceError(
            f"device={options.device!r} has {named.sms} SMs, the GPU present {present.sms}: its pipelines do not fit",
            "leave the device option out to plan for the GPU present",
        )
    return named
