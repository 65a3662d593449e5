"""Device files of users: TOML or JSON, what differs from a known device.

name = "mine"
base = "h200"
sms = 160
dram_bytes_per_s = 8e12
arbiters = 2
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from tilestream.devices.device import Device
from tilestream.errors import DeviceError

PAIRS = {
    "queue_curve": "payload bytes, seconds",
    "dsm_curve": "payload bytes, seconds",
    "clusters": "CTAs of a cluster, resident clusters",
}


def load(path: str | Path, known: Mapping[str, Device]) -> Device:
    """The device that a file describes. With ``base``, what it leaves out is the base's; ``sms`` alone then brings
    the pipes of those SMs along, as ``Device.with_sms`` does.

    Args:
        path: a file that ends in .toml or .json.
        known: devices that ``base`` may name.

    Raises:
        DeviceError: the file cannot be read, or a key or number in it is wrong: it says which, and what is allowed.
    """
    data = dict(_read(Path(path)))
    base_name = data.pop("base", None)
    name = data.setdefault("name", Path(path).stem)
    if not isinstance(name, str) or not name or "+" in name or name.lower() in known:
        raise DeviceError(
            f"device file {path}: name is {name!r}", f"use a name without + that is none of: {', '.join(sorted(known))}"
        )
    names = [f.name for f in fields(Device)]
    for key in data:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else f"use: base, {', '.join(names)}"
            raise DeviceError(f"device file {path}: unknown key {key!r}", remedy)
    for key, value in data.items():
        data[key] = _value(key, value, path)
    if base_name is None:
        missing = [f.name for f in fields(Device) if f.default is MISSING and f.name not in data]
        if missing:
            raise DeviceError(
                f"device file {path} has no {', '.join(missing)}",
                f"give them, or a base they are taken from: {', '.join(sorted(known))}",
            )
        return Device(**data)
    base = known.get(str(base_name).lower())
    if base is None:
        raise DeviceError(f"device file {path}: unknown base {base_name!r}", f"use one of: {', '.join(sorted(known))}")
    if isinstance(data.get("sms"), int) and data["sms"] > 0:
        base = base.with_sms(data["sms"])
    if "tensor_flops" in data and isinstance(data["tensor_flops"], dict):
        data["tensor_flops"] = {**base.tensor_flops, **data["tensor_flops"]}
    return replace(base, **data)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        data = tomllib.loads(text) if path.suffix.lower() == ".toml" else json.loads(text)
    except OSError as failure:
        raise DeviceError(f"device file {path} cannot be read: {failure.strerror}", "check the path") from failure
    except ValueError as failure:
        raise DeviceError(f"device file {path} is not {path.suffix[1:].upper()}: {failure}", "correct it") from failure
    if not isinstance(data, dict):
        raise DeviceError(f"device file {path} holds a {type(data).__name__}", "write keys and values, as sms = 132")
    return data


def _value(key: str, value: Any, path: str | Path) -> Any:
    """Lists become the tuples that a device holds."""
    if key in PAIRS:
        if not (isinstance(value, list) and all(_pair(point) for point in value)):
            raise DeviceError(f"device file {path}: {key} is {value!r}", f"write [[{PAIRS[key]}], ...] with numbers")
        return tuple((first, second) for first, second in value)
    if key == "compute_capability":
        if not _pair(value):
            raise DeviceError(f"device file {path}: compute_capability is {value!r}", "write it as [9, 0]")
        return tuple(value)
    return value


def _pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(x, (int, float)) for x in value)
