"""What all library kernels share: tiles merged to keep events few, and the way from one kernel to the next."""

from __future__ import annotations

from math import ceil

from tilestream.devices import Device
from tilestream.simulator.workload import Engine, SimLaunch, SimStage, TileWork

WAVES = 16
"""Tiles a CTA at most: longer runs of equal tiles are merged, which changes no rate, only the number of events."""
GAP, FROM_L2, FROM_DRAM = 0.26, 0.22, 0.25
"""Shares of ``Device.launch_s``: from one kernel of a CUDA graph to the next, from there to its first data out of the
L2, and further out of DRAM. Fitted to elementwise kernels: 0.65, 0.55 and 0.63 us on an H200."""


def launch(name: str, stage: SimStage, device: Device) -> SimLaunch:
    """A library kernel by itself: the gap before it, and what its first load takes to come."""
    return SimLaunch(name, (stage,), launch_s=start_s(device, dram=stage.work.dram_read > 0))


def start_s(device: Device, *, dram: bool = True) -> float:
    """Seconds from the end of one kernel to the first data of the next."""
    return device.launch_s * (GAP + FROM_L2 + (FROM_DRAM if dram else 0.0))


def merge(tiles: int, ctas: int, waves: int = WAVES) -> int:
    """Tiles after merging equal ones: at most ``waves`` a CTA, with the same share of work in the last wave."""
    if tiles <= waves * ctas:
        return tiles
    return max(ctas, round(tiles / ceil(tiles / (waves * ctas))))


def one_stage(
    name: str,
    engine: Engine,
    tiles: int,
    ctas: int,
    registers: int,
    whole: TileWork,
    *,
    latency_s: float = 0.0,
    once: TileWork | None = None,
    overlap: bool = False,
) -> SimStage:
    """``whole`` work in ``tiles`` equal tiles, each with ``latency_s`` that nothing hides."""
    merged = merge(tiles, ctas)
    work = whole.scaled(1 / merged) + TileWork(latency_s=latency_s * tiles / merged)
    return SimStage(
        name, engine, merged, ctas, work, once or TileWork(), registers=registers, ops=(name,), overlap=overlap
    )
